"""A server in this process: a start that fails, and what an operator is told about the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvpool.protocol.errors import ConfigError
from kvpool_server.app.server import Server
from kvpool_server.settings.config import ServerConfig
from testbed.ports import free_endpoint
from tests.support.page_client import status_and_text
from tests.support.processes import wait_for

MEMORY_SOCKET = re.compile("@kvpool-[0-9a-f]{32}")


@contextlib.contextmanager
def _taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def _children() -> set[str]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return {pid for pid in listed.stdout.split() if Path(f"/proc/{pid}").exists()}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvpool")}


def _abstract_sockets() -> set[str]:
    """Inodes of this process's sockets that are memory sockets."""
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {f"socket:[{fields[6]}]" for fields in listed if MEMORY_SOCKET.fullmatch(fields[-1])}
    return inodes & {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}


@pytest.mark.parametrize("refused", ["listen", "http_listen", "data_listen", "kv_events", "tier"])
def test_a_start_that_fails_leaves_nothing_behind(refused: str, tmp_path: Path, socket_dir: Path) -> None:
    threads, children = _threads(), _children()
    tmp_path.joinpath("a file").touch()
    ports = {name: free_endpoint() for name in ("listen", "http_listen", "data_listen", "kv_events")}
    with _taken_port() as taken:
        told = {**ports, refused: taken}
        directory = tmp_path / ("a file" if refused == "tier" else "tier")
        config = ServerConfig(
            listen=told["listen"],
            http_listen=told["http_listen"],
            data_listen=told["data_listen"],
            kv_events=f"tcp://{told['kv_events']}",
            tier=(f"file:{directory},size=64MiB,create=yes",),
            memory=ByteSize(16 << 20),
            unix_listen=str(socket_dir / "socket"),
        )
        server = Server(config)  # Referred to until the end: nothing that was left open is freed by chance.
        with pytest.raises(ConfigError, match="a file" if refused == "tier" else taken):
            asyncio.run(server.start())
        assert not list(socket_dir.iterdir()) and not _abstract_sockets()
        for address in ports.values():
            host, port = address.split(":")
            socket.create_server((host, int(port))).close()
    wait_for(lambda: _children() <= children, "the data workers to end")
    wait_for(lambda: _threads() <= threads, "the server's threads to end")
    del server


def test_a_loop_that_has_stopped_is_told_and_hangs_no_scrape() -> None:
    config = ServerConfig(
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        data_listen="",
        memory=ByteSize(1 << 20),
    )
    go_on = threading.Event()

    async def serve_and_stand_still() -> None:
        server = Server(config)
        await server.start()
        try:
            ports.put(server.parts.http_port)
            await asyncio.to_thread(asked.wait, 30)
            go_on.wait(30)  # The loop is blocked.
            await asyncio.to_thread(asked_again.wait, 30)
        finally:
            await server.stop()

    ports: queue.Queue[int] = queue.Queue()
    asked, asked_again = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve_and_stand_still()))
    thread.start()
    try:
        url = f"http://127.0.0.1:{ports.get(timeout=30)}"
        assert status_and_text(url, "/healthz") == (200, "ok\n")
        assert "kvpool_arena_bytes" in status_and_text(url, "/metrics")[1]
        asked.set()
        wait_for(lambda: status_and_text(url, "/healthz")[0] == 503, "a loop that stands still")
        for path in ("/healthz", "/metrics"):
            status, text = status_and_text(url, path)
            assert status == 503 and "event loop did not answer within" in text
        go_on.set()
        wait_for(lambda: status_and_text(url, "/healthz")[0] == 200, "the loop to go on")
        assert status_and_text(url, "/metrics")[0] == 200
    finally:
        for event in (asked, go_on, asked_again):
            event.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_start_collects_no_garbage_and_has_no_threads_of_numpy() -> None:
    script = """
import contextlib, gc, os, sys
from kvpool_server import __main__

def count():
    return [each["collections"] for each in gc.get_stats()]

before, sys.argv[1:] = count(), ["--version"]
with contextlib.suppress(SystemExit):
    __main__.main()
from kvpool_server.app import server
from kvpool_server.process import process_memory
process_memory.keep_collections_short()
assert count() == before and gc.isenabled(), (before, count())
assert len(os.listdir("/proc/self/task")) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)
