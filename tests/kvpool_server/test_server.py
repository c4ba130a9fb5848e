"""The server as a process: start, ports, signals, files; and in this process a start that fails, or a stopped loop."""

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
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize

from kvpool.protocol.errors import ConfigError, LeaseExpiredError
from kvpool.protocol.reports import since
from kvpool.protocol.types import ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool.version import __version__
from kvpool_server.app.command import notify
from kvpool_server.app.server import Server
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.observability.metrics import GAUGES
from kvpool_server.process.addresses import held
from kvpool_server.settings.config import ServerConfig
from testbed.ports import free_endpoint
from tests.conftest import Connect, StartServer
from tests.support.page_client import status_and_text
from tests.support.processes import ServerProcess, run_server, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

SERVICE = pb.DESCRIPTOR.services_by_name["Pool"].full_name


def _metrics(server: ServerProcess) -> dict[str, float]:
    status, text = status_and_text(server.http_url, "/metrics")
    assert status == 200
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize("drain_ms", [60_000, 100])
def test_sigterm_lets_calls_under_way_finish_until_the_drain_ends_and_leaves_nothing(
    pool_server: StartServer, connect: Connect, socket_dir: Path, drain_ms: int
) -> None:
    flags = ("--drain-ms", str(drain_ms), "--unix-listen", str(socket_dir / "socket"))
    server, go_on = pool_server(*flags, is_executed=True), threading.Event()
    assert sorted(os.listdir(socket_dir)) == ["socket", "socket.memory"]
    client = connect(server, transport="shm")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=64)))
    grant = client.rpc.put_start(namespace, [run_of("a")], ShardRange(0, 1))
    memory = namespace.transport.memory
    assert memory is not None

    def pieces() -> Iterator[pb.PutChunksRequest]:
        for at in (0, 32):
            yield pb.PutChunksRequest(ticket_id=grant.ticket_id, offset=grant.offsets[0] + at, payload=b"x" * 32)
            go_on.wait(60)

    with grpc.insecure_channel(server.endpoint) as channel:
        call = PoolStub(channel).PutChunks.future(pieces(), timeout=120)
        wait_for(lambda: memory[grant.offsets[0]] == ord("x"), "the first piece")
        server.terminate()
        if drain_ms > 100:
            draining = (503, "draining\n")
            wait_for(lambda: status_and_text(server.http_url, "/healthz") == draining, "/healthz tells of the drain")
            assert not call.done()
            go_on.set()
            assert call.result(timeout=60).nbytes == 64
        assert server.wait() == 0
        assert os.listdir(socket_dir) == [] and "Traceback" not in server.stderr
        go_on.set()
        assert drain_ms > 100 or isinstance(call.exception(timeout=60), grpc.RpcError)


def test_a_server_that_cannot_start_names_the_port_or_the_memory(shared_server: ServerProcess) -> None:
    http = shared_server.http_url.removeprefix("http://")
    way_out = ". Another server may run here; give --listen, --http-listen and --data-listen free ports, or 0"
    taken = "Address already in use"
    for listen, http_listen, memory, says in (
        (shared_server.endpoint, "", "1MiB", f"cannot listen on {shared_server.endpoint} for gRPC: {taken}{way_out}"),
        ("127.0.0.1:0", http, "1MiB", f"cannot listen on {http} for /metrics: {taken}{way_out}"),
        ("127.0.0.1:0", "", "1000TiB", "memory = 1000.0TiB is more than "),
    ):
        done = run_server("--listen", listen, "--http-listen", http_listen, "--memory", memory)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert any(line.startswith(f"kvpool-server: {says}") for line in done.stderr.splitlines()), done.stderr
    port = int(shared_server.endpoint.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=2):
        pass


@pytest.mark.parametrize("data_listen", ["", "127.0.0.1:0"])
def test_metrics_tell_what_happened(pool_server: StartServer, connect: Connect, data_listen: str) -> None:
    server = pool_server("--data-listen", data_listen)
    transport = "tcp" if data_listen else "grpc"
    client = connect(server, transport=transport)
    before = _metrics(server)
    assert {f"kvpool_{name.removeprefix('num_')}" for name in GAUGES} <= before.keys()
    assert {f"kvpool_{name}_total" for name in COUNTERS} <= before.keys()
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    run = run_of("a", "b")
    client.put_blocks(namespace, run, [payload(name, 1_000) for name in "ab"])
    lease_id = client.lookup(namespace, [run_of("a", "b", "c")]).lease_id
    client.get_blocks(namespace, lease_id, run)
    with pytest.raises(LeaseExpiredError):
        client.rpc.put_end(1, [1])
    after = _metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert after["kvpool_arena_bytes"] == 8 << 20
    assert grown("kvpool_entries") == 2 and grown("kvpool_leases") == 1 and grown("kvpool_free_bytes") == -2_000
    assert grown("kvpool_put_completed_blocks_total") == 2
    assert grown("kvpool_lookup_blocks_total") == 3 and grown("kvpool_lookup_hits_total") == 2
    lines = [
        f'kvpool_transferred_bytes_total{{direction="{direction}",transport="{transport}"}} 2000.0'
        for direction in ("read", "write")
    ]
    through_grpc = () if data_listen else ("PutChunks", "GetChunks")
    for method in ("OpenNamespace", "Lookup", "PutStart", "PutEnd", "Get", *through_grpc):
        lines.append(f'kvpool_rpc_seconds_count{{method="{method}",status="OK"}} 1.0')
    lines.append('kvpool_rpc_seconds_count{method="PutEnd",status="ABORTED"} 1.0')
    for line in lines:  # A call is counted a moment after its client has heard of its end.
        wait_for(lambda line=line: line in status_and_text(server.http_url, "/metrics")[1], line)
    stats, page = client.admin.stats().server, status_and_text(server.http_url, "/metrics")[1]
    counted = re.findall(r'kvpool_rpc_seconds_bucket\{.*?"\+Inf",method="Lookup".*?\} (\d+)', page)
    assert _answers(stats.rpcs, "Lookup") == sum(map(int, counted)) >= 1
    bounds = re.findall(r'kvpool_rpc_seconds_bucket\{le="([^"]+)",method="PutStart"', page)
    assert list(map(float, bounds[:-1])) == stats.rpc_seconds_bounds
    moved = {(each.transport, each.direction): each.nbytes for each in stats.transfers}
    assert moved == {("grpc", "read"): 0, ("grpc", "write"): 0} | {
        (transport, direction): 2_000 for direction in ("read", "write")
    }


def test_the_servers_own_memory_is_without_the_arena(pool_server: StartServer) -> None:
    server = pool_server("--memory", "256MiB")
    wait_for(lambda: _metrics(server)["kvpool_prefaulted_bytes"] == 256 << 20, "the arena to be backed")
    found = _metrics(server)
    assert 10 << 20 < found["kvpool_own_memory_bytes"] < found["process_resident_memory_bytes"] - (256 << 20)


def test_reflection_lists_the_service_and_its_methods(shared_server: ServerProcess) -> None:
    with grpc.insecure_channel(shared_server.endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = stub.ServerReflectionInfo(iter(asked), timeout=10)
    assert {"grpc.health.v1.Health", SERVICE} <= {each.name for each in listed.list_services_response.service}
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


@contextlib.contextmanager
def _server(host: str, port: int = 0) -> Iterator[int]:
    """A socket like those of a server that runs, and its port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((host, port))
        one.listen()
        yield one.getsockname()[1]


def test_a_port_is_held_by_one_of_two_that_start_at_once_unless_a_server_listens_on_it() -> None:
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::]"):
        with _server("127.0.0.1") as port, pytest.raises(OSError, match="in use"), held(f"{host}:{port}"):
            pass
    with pytest.raises(OSError, match="assign requested address"), held("192.0.2.1:0"):
        pass
    with held("127.0.0.1:0") as port:
        with pytest.raises(OSError, match="in use"), held(f"127.0.0.1:{port}"):
            pass
        with _server("127.0.0.1", port), _server("127.0.0.1", port):
            pass
    with held(f"127.0.0.1:{port}") as again:
        assert again == port


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_manager_is_told_and_a_manager_that_is_gone_is_logged(
    is_abstract: bool, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"kvpool-test-{os.getpid()}" if is_abstract else str(socket_dir / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if is_abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if is_abstract else name)
        notify("READY=1", "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"
    notify("READY=1")
    assert "the service manager could not be told" in capsys.readouterr().out


def _answers(rpcs: Iterable[pb.RpcStats], method: str) -> int:
    return sum(sum(each.buckets) for each in rpcs if each.method == method)


def test_a_server_says_which_run_of_it_answers(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server()
    assert "vllm serve MODEL --prefix-caching-hash-algo sha256_cbor" in server.stdout
    assert f'"endpoint":"{server.endpoint}"' in server.stdout
    with connect(server) as client:
        first = client.admin.stats()
        second = client.admin.stats()
    assert first.server.http_port == int(server.http_url.rpartition(":")[2])
    assert first.server.version == __version__ and abs(first.server.unix_seconds - time.time()) < 60
    assert 0 < first.server.uptime_seconds < second.server.uptime_seconds < 600
    assert first.boot_token == second.boot_token != 0
    assert _answers(since(second.server, first.server).rpcs, "Stats") == 1
    assert 0 <= second.server.loop_lag_p50_seconds <= second.server.loop_lag_max_seconds < 60


MEMORY_SOCKET = re.compile("@kvpool-[0-9a-f]{32}")


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
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = f"127.0.0.1:{listening.getsockname()[1]}"
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
    config = ServerConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", data_listen="", memory=ByteSize(1 << 20))
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
from kvpool_server.process import runtime
runtime.keep_collections_short()
assert count() == before and gc.isenabled(), (before, count())
assert len(os.listdir("/proc/self/task")) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)
