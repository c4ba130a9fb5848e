"""`kvpool top` at real servers: one frame, a terminal, and servers that go away and come back."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands.top import Interval, Watch
from tests.conftest import StartServer
from tests.support.processes import ServerProcess, clean_environment, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

COMMAND = (sys.executable, "-m", "kvpool.cli", "top")


def _interval(watch: Watch) -> Interval:
    view = watch.look()
    assert not view.trouble and view.interval is not None
    return view.interval


def test_a_server_that_restarts_is_watched_on(tmp_path: Path, connect: Callable[..., Client]) -> None:
    server = ServerProcess(tmp_path)
    watch = Watch(server.endpoint, lambda: Client(ClientConfig(server.endpoint, timeout_ms=2_000)))
    try:
        namespace = connect(server).open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
        connect(server).put_blocks(namespace, run_of("a"), [payload("a", 1_000)])
        first = _interval(watch)
        assert first.now.num_entries == 1
        server.kill()
        view = watch.look()
        assert "cannot reach kvpool-server" in view.trouble and view.silent_s >= 0
        assert view.interval is not None and view.interval.now == first.now
        again = ServerProcess(tmp_path, "--listen", server.endpoint)
        try:
            view = wait_for(lambda: None if (view := watch.look()).trouble else view, "an answer of the next server")
            interval = view.interval
            assert interval is not None and interval.restarted and interval.now.num_entries == 0
            assert all(sum(each.buckets) >= 0 for each in interval.server.rpcs)
            assert not _interval(watch).restarted
        finally:
            again.stop()
    finally:
        watch.close()
        server.kill()


def test_on_a_terminal_it_draws_until_q(pool_server: StartServer) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--interval", "0.1", "--endpoint", pool_server().endpoint]
    environment = clean_environment(TERM="xterm", COLUMNS="100", LINES="40")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        seen = _read_until(ours, rb"up for .*?memory.*?up for ")  # Two frames.
        assert b"hit ratio" in seen
        for other_key in (b"\x1bOQ", b"\x1b[1;2Q", b"\x1b[A"):  # F2, Shift-F2, arrow up.
            os.write(ours, other_key)
            _read_until(ours, rb"up for .*?memory.*?up for ")
        os.write(ours, b"\x1b[Aq")
        _read_until(ours, None)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read_until(terminal: int, pattern: bytes | None, timeout_s: float = 30.0) -> bytes:
    """Reads until a pattern appears; None: until the other side has hung up."""
    seen, ends_at = b"", time.monotonic() + timeout_s
    while pattern is None or not re.search(pattern, seen, re.DOTALL):
        assert select.select([terminal], [], [], max(0.0, ends_at - time.monotonic()))[0], seen[-500:]
        try:
            piece = os.read(terminal, 65_536)
        except OSError:  # The other side has hung up.
            piece = b""
        if not piece:
            assert pattern is None, seen[-500:]
            break
        seen += piece
    return seen
