"""The server as a process: start, ports, signals, files."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from kvpool.protocol import wire
from kvpool.protocol.reports import since
from kvpool.protocol.types import ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool.version import __version__
from kvpool_server.app.command import notify
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.observability.metrics import GAUGES
from kvpool_server.process.addresses import held
from tests.conftest import Connect, StartServer
from tests.support.page_client import status_and_text
from tests.support.processes import ServerProcess, run_command, server_command, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

SERVICE = pb.DESCRIPTOR.services_by_name["Pool"].full_name


@pytest.fixture
def pool_server(pool_server: StartServer) -> StartServer:
    """Servers that are executed as an operator's are: their start and end are what is tested here."""
    return functools.partial(pool_server, is_executed=True)


def _metrics(server: ServerProcess) -> dict[str, float]:
    status, text = status_and_text(server.http_url, "/metrics")
    assert status == 200
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_server_says_how_to_point_vllm_at_it(shared_server: ServerProcess) -> None:
    assert "vllm serve MODEL --prefix-caching-hash-algo sha256_cbor" in shared_server.stdout
    assert f'"endpoint":"{shared_server.endpoint}"' in shared_server.stdout


def test_sigterm_ends_the_server_and_leaves_nothing(pool_server: StartServer, socket_dir: Path) -> None:
    path = socket_dir / "socket"
    server = pool_server("--unix-listen", str(path))
    assert sorted(os.listdir(socket_dir)) == ["socket", "socket.memory"]
    server.terminate()
    assert server.wait() == 0
    assert os.listdir(socket_dir) == []
    assert "Traceback" not in server.stderr


@contextlib.contextmanager
def _put_under_way(server: ServerProcess, connect: Connect, go_on: threading.Event) -> Iterator[Any]:
    """A call of two pieces: the first is in the arena, and the second follows when the event is set."""
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
        yield call


def test_sigterm_lets_calls_under_way_finish(pool_server: StartServer, connect: Connect) -> None:
    server, go_on = pool_server("--drain-ms", "60000"), threading.Event()
    with _put_under_way(server, connect, go_on) as call:
        server.terminate()
        draining = (503, "draining\n")
        wait_for(
            lambda: status_and_text(server.http_url, "/healthz") == draining, "/healthz says that the server drains"
        )
        assert not call.done()
        go_on.set()
        assert call.result(timeout=60).nbytes == 64
    assert server.wait() == 0


def test_a_drain_has_an_end(pool_server: StartServer, connect: Connect) -> None:
    server, go_on = pool_server("--drain-ms", "100"), threading.Event()
    with _put_under_way(server, connect, go_on) as call:
        server.terminate()
        assert server.wait() == 0
        go_on.set()
        assert isinstance(call.exception(timeout=60), grpc.RpcError)


def test_two_servers_on_one_port_are_an_error_that_names_it(shared_server: ServerProcess) -> None:
    common = ("--memory", "1MiB")
    done = run_command(*server_command("--listen", shared_server.endpoint, "--http-listen", "127.0.0.1:0", *common))
    assert done.returncode == 2
    sentence = f"kvpool-server: cannot listen on {shared_server.endpoint} for gRPC: Address already in use"
    way_out = "give --listen, --http-listen and --data-listen free ports, or 0"
    assert any(line.startswith(sentence) and way_out in line for line in done.stderr.splitlines())

    http = shared_server.http_url.removeprefix("http://")
    done = run_command(*server_command("--listen", "127.0.0.1:0", "--http-listen", http, *common))
    assert done.returncode == 2
    assert f"cannot listen on {http} for /metrics: Address already in use" in done.stderr and way_out in done.stderr
    assert "Traceback" not in done.stderr


def test_more_memory_than_there_is_is_refused_with_a_sentence() -> None:
    done = run_command(*server_command("--listen", "127.0.0.1:0", "--http-listen", "", "--memory", "1000TiB"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvpool-server: memory = 1000.0TiB is more than ")
    assert "lower --memory" in done.stderr


@pytest.mark.parametrize("data_listen", ["", "127.0.0.1:0"])
def test_metrics_tell_what_happened(pool_server: StartServer, connect: Connect, data_listen: str) -> None:
    server = pool_server("--data-listen", data_listen)
    transport = "tcp" if data_listen else "grpc"
    client = connect(server, transport=transport)
    before = _metrics(server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    run = run_of("a", "b")
    client.put_blocks(namespace, run, [payload(name, 1_000) for name in "ab"])
    lease_id = client.lookup(namespace, [run_of("a", "b", "c")]).lease_id
    client.get_blocks(namespace, lease_id, run)
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
    for line in lines:
        wait_for(lambda line=line: line in status_and_text(server.http_url, "/metrics")[1], line)


def test_failed_calls_are_counted_by_their_status(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server()
    with grpc.insecure_channel(server.endpoint) as channel:
        stub = PoolStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.PutEnd(pb.PutEndRequest(ticket_id=1), timeout=10)
        with pytest.raises(grpc.RpcError):
            list(stub.GetChunks(pb.GetChunksRequest(lease_id=1, offsets=[0], region_bytes=1), timeout=10))
    for method in ("PutEnd", "GetChunks"):  # A call is counted a moment after its client has heard of its end.
        line = f'kvpool_rpc_seconds_count{{method="{method}",status="ABORTED"}} 1.0'
        wait_for(lambda line=line: line in status_and_text(server.http_url, "/metrics")[1], line)
    assert 'method="GetChunks",status="OK"' not in status_and_text(server.http_url, "/metrics")[1]


def test_readers_that_hang_up_are_counted_as_such(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server("--data-listen", "")
    client = connect(server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1 << 20)))
    client.put_blocks(namespace, run_of("a"), [payload("a", 1 << 20)])
    lease_id = client.lookup(namespace, [run_of("a")]).lease_id
    runs, shard = wire.encode_runs([run_of("a")]), wire.encode_shards(ShardRange(0, 1))
    get = pb.GetRequest(lease_id=lease_id, namespace=namespace.fingerprint, runs=runs, shards=shard)
    (offset,) = wire.decode_located(client.rpc.stub.Get(get, timeout=10)).offsets
    # Far more than gRPC takes in for a client that a busy machine pauses: 50 MiB have been on their way before.
    read = pb.GetChunksRequest(lease_id=lease_id, offsets=[offset] * 2_000, region_bytes=1 << 20)
    for _ in range(20):
        call = client.rpc.stub.GetChunks(read, timeout=60)
        next(call)
        call.cancel()
    line = 'kvpool_rpc_seconds_count{method="GetChunks",status="CANCELLED"} 20.0'
    wait_for(lambda: line in status_and_text(server.http_url, "/metrics")[1], line)


def test_every_metric_is_exported(shared_server: ServerProcess) -> None:
    found = _metrics(shared_server)
    assert {f"kvpool_{name.removeprefix('num_')}" for name in GAUGES} <= found.keys()
    assert {f"kvpool_{name}_total" for name in COUNTERS} <= found.keys()
    assert "process_resident_memory_bytes" in found


def test_the_servers_own_memory_is_without_the_arena(pool_server: StartServer) -> None:
    server = pool_server("--memory", "256MiB")
    wait_for(lambda: _metrics(server)["kvpool_prefaulted_bytes"] == 256 << 20, "the arena to be backed")
    found = _metrics(server)
    assert found["process_resident_memory_bytes"] > 256 << 20
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


def test_a_server_listens_only_where_it_was_told(shared_server: ServerProcess) -> None:
    port = int(shared_server.endpoint.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=2):
        pass


@contextlib.contextmanager
def _server(host: str, port: int = 0) -> Iterator[int]:
    """A socket like those of a server that runs, and its port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((host, port))
        one.listen()
        yield one.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])
def test_a_port_on_which_a_server_listens_is_not_held(host: str) -> None:
    with _server("127.0.0.1") as port, pytest.raises(OSError, match="in use"), held(f"{host}:{port}"):
        pass


def test_of_two_that_start_at_once_one_holds_the_port() -> None:
    with held("127.0.0.1:0") as port:
        with pytest.raises(OSError, match="in use"), held(f"127.0.0.1:{port}"):
            pass
        with _server("127.0.0.1", port), _server("127.0.0.1", port):
            pass
    with held(f"127.0.0.1:{port}") as again:
        assert again == port


def test_an_address_that_is_not_this_hosts_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"), held("192.0.2.1:0"):
        pass


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_manager_is_told(is_abstract: bool, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kvpool-test-{os.getpid()}" if is_abstract else str(socket_dir / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if is_abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if is_abstract else name)
        notify("READY=1", "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


def test_a_manager_that_is_gone_is_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    notify("READY=1")
    assert "the service manager could not be told" in capsys.readouterr().out


def _answers(rpcs: Iterable[pb.RpcStats], method: str) -> int:
    return sum(sum(each.buckets) for each in rpcs if each.method == method)


def test_stats_say_what_the_metrics_say(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server()
    client = connect(server, transport="tcp")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000)))
    client.put_blocks(namespace, run_of("a", "b"), [payload(name, 1_000) for name in "ab"])
    for _ in range(5):
        client.lookup(namespace, [run_of("a", "b", "c")])
    before = client.admin.stats().server
    _, page = status_and_text(server.http_url, "/metrics")
    lookups = sum(
        int(counted)
        for counted in re.findall(r'kvpool_rpc_seconds_bucket\{.*?"\+Inf",method="Lookup".*?\} (\d+)', page)
    )
    assert _answers(before.rpcs, "Lookup") == lookups >= 5
    bounds = re.findall(r'kvpool_rpc_seconds_bucket\{le="([^"]+)",method="PutStart"', page)
    assert list(map(float, bounds[:-1])) == before.rpc_seconds_bounds
    for moved in before.transfers:
        pattern = (
            rf'kvpool_transferred_bytes_total\{{direction="{moved.direction}",transport="{moved.transport}"\}} (\S+)'
        )
        (value,) = re.findall(pattern, page)
        assert float(value) == moved.nbytes
    assert {(moved.transport, moved.direction) for moved in before.transfers} == {
        (transport, direction) for transport in ("grpc", "tcp") for direction in ("read", "write")
    }
    assert sum(moved.nbytes for moved in before.transfers if moved.direction == "write") == 2_000


def test_a_server_says_which_run_of_it_answers(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server()
    with connect(server) as client:
        first = client.admin.stats()
        second = client.admin.stats()
    assert first.server.http_port == int(server.http_url.rpartition(":")[2])
    assert first.server.version == __version__ and abs(first.server.unix_seconds - time.time()) < 60
    assert 0 < first.server.uptime_seconds < second.server.uptime_seconds < 600
    assert first.boot_token == second.boot_token != 0
    assert _answers(since(second.server, first.server).rpcs, "Stats") == 1
    assert 0 <= second.server.loop_lag_p50_seconds <= second.server.loop_lag_max_seconds < 60
