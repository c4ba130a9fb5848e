"""A server that is taken out of service: what it refuses, what it finishes, and when it stops."""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.client.rpc import Namespace
from kvpool.protocol.errors import DrainingError, InvalidRequestError, UnavailableError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import MAX_DRAIN_MS, Chunk, PoolKey, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.leases import HoldTable
from kvpool_server.cache.server_access import commit
from kvpool_server.cache.steps import finish
from kvpool_server.rpc.drain import Drain
from kvpool_server.rpc.handlers import SERVICE_NAME
from kvpool_server.tiering.tiered_pool import TieredPool
from testbed.pool_at_once import PoolAtOnce
from tests.conftest import Connect, StartServer
from tests.support.clock import FakeClock
from tests.support.page_client import status_and_text
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

CHUNK_BYTES = 1_000
LONG_MS = "60000"
"""A drain that ends earlier has not waited for its deadline."""


def _spec() -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=CHUNK_BYTES))


def _store(client: Client, namespace: Namespace, *names: str) -> None:
    client.put_blocks(namespace, run_of(*names), [payload(name, CHUNK_BYTES) for name in names])


def _leased(client: Client) -> int:
    """A lease, which keeps a drain from ending."""
    namespace = client.open_namespace(_spec())
    _store(client, namespace, "stored")
    return client.lookup(namespace, [run_of("stored")]).lease_id


def _calls(client: Client, namespace: Namespace) -> dict[str, Callable[[], object]]:
    """Every call that would begin new work, by name."""
    stored = payload("stored", CHUNK_BYTES)
    key = PoolKey(namespace.fingerprint, 0, block_hash("stored"), 0)
    return {
        "OpenNamespace": lambda: client.rpc.open_namespace(_spec()),
        "LookupStream": lambda: client.lookup(namespace, [run_of("stored")]),
        "Lookup": lambda: client.rpc.lookup_async(namespace, [run_of("stored")], wait_ms=100).result(),
        "PutStart": lambda: client.rpc.put_start(namespace, [run_of("new")], ShardRange(0, 1)),
        "PutChunks": lambda: client.chunks.put([Chunk(key, stored.tobytes(), checksum(stored))]),
        "GetChunks": lambda: list(client.chunks.get([key])),
    }


def test_a_drain_counts_what_clients_hold_without_a_visit_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolAtOnce(Arena(1 << 20, 1 << 16), FakeClock(), itertools.count(1).__next__)
    fingerprint = pool.open_namespace(_spec())[0].fingerprint
    put = pool.put_start(fingerprint, [run_of("a")], ShardRange(0, 1))
    pool.put_end(put.ticket_id, [0])
    pool.put_start(fingerprint, [run_of("b")], ShardRange(0, 1))
    own, _ = finish(pool.reserve_in_steps(fingerprint, [run_of("c")], ShardRange(0, 1), math.inf))  # The server's own.
    pool.lookup(fingerprint, [run_of("a")], prefix_only=True, lease_ttl_ms=1_000)
    drain = Drain(TieredPool(pool, np.zeros(1 << 20, np.uint8), [], []), 1_000, AsyncMock(), FakeClock())
    monkeypatch.setattr(HoldTable, "values", lambda _: pytest.fail("every lease and ticket was visited"))
    expected = pb.DrainResponse(num_leases=1, num_tickets=1, num_queued_blocks=0, remaining_ms=0)
    assert drain.progress() == expected
    commit(pool, own.id, [None])
    assert drain.progress() == expected


def _healths(server: ServerProcess, client: Client) -> tuple[tuple[int, str], bool, int]:
    """What /healthz, Ping and gRPC's health service say."""
    with grpc.insecure_channel(server.endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status
    return status_and_text(server.http_url, "/healthz"), client.admin.ping().draining, status


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_transfers_under_way_finish_and_nothing_new_begins(
    pool_server: StartServer, connect: Connect, transport: str
) -> None:
    server = pool_server("--drain-ms", LONG_MS)
    client = connect(server, transport=transport)
    namespace = client.open_namespace(_spec())
    _store(client, namespace, "stored")
    leases = [client.lookup(namespace, [run_of("stored")]).lease_id for _ in range(2)]
    filling, go_on = threading.Event(), threading.Event()

    def fill(indices: object, buffers: list[bytearray]) -> None:
        filling.set()
        assert go_on.wait(60)
        buffers[0][:] = payload("late", CHUNK_BYTES)

    put = threading.Thread(target=client.put, args=(namespace, [run_of("late")], fill))
    put.start()
    assert filling.wait(60)

    assert _healths(server, client) == ((200, "ok\n"), False, health_pb2.HealthCheckResponse.SERVING)
    progress = client.admin.drain()
    assert _healths(server, client) == ((503, "draining\n"), True, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert progress.boot_token == namespace.boot_token
    assert (progress.num_leases, progress.num_tickets) == (2, 1) and 0 < progress.remaining_ms <= int(LONG_MS)
    for name, call in _calls(client, namespace).items():
        with pytest.raises(DrainingError, match=f"{server.endpoint}: the server is draining: it takes no new"):
            pytest.fail(f"{name} was answered: {call()}")
    (block,) = client.get_blocks(namespace, leases[0], run_of("stored"))
    assert block is not None and bytes(block) == payload("stored", CHUNK_BYTES).tobytes()
    go_on.set()
    put.join(60)
    assert not put.is_alive()
    assert client.rpc.release([leases[0]]) == 1
    progress = client.admin.drain()
    assert (progress.num_leases, progress.num_tickets) == (1, 0)
    client.rpc.release_quietly(leases[1])  # With no lookup that it could travel with.
    assert server.wait(30) == 0
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_drain_ends_at_once_or_at_its_deadline_whatever_is_unfinished(
    pool_server: StartServer, connect: Connect, is_idle: bool
) -> None:
    server = pool_server("--drain-ms", LONG_MS if is_idle else "500")
    client = connect(server)
    with pytest.raises(UnavailableError, match="another one has taken its place"):
        client.admin.drain(boot_token=1)
    assert not client.admin.ping().draining
    assert is_idle or _leased(client)
    server.send_signal(signal.SIGUSR2)
    assert server.wait(30) == 0
    assert "drained" in server.stderr and ("leases=1" in server.stderr) != is_idle


@pytest.mark.parametrize("drain_ms", ["0", "700"])
def test_the_earliest_deadline_counts_and_sigterm_leaves_drain_ms(
    pool_server: StartServer, connect: Connect, drain_ms: str
) -> None:
    server = pool_server("--drain-ms", drain_ms)
    client = connect(server, lease_ttl_ms=60_000)  # No drain here ends with its lease.
    assert _leased(client)
    assert 50_000 < client.admin.drain(60_000).remaining_ms <= 60_000
    assert 20_000 < client.admin.drain(30_000).remaining_ms <= 30_000
    assert 20_000 < client.admin.drain(50_000).remaining_ms <= 30_000, "a later drain has put the deadline off"
    assert 20_000 < client.admin.drain().remaining_ms <= 30_000
    with pytest.raises(InvalidRequestError, match=f"deadline_ms is {MAX_DRAIN_MS + 1}; give at most {MAX_DRAIN_MS}"):
        client.admin.drain(MAX_DRAIN_MS + 1)
    started = time.monotonic()
    server.terminate()
    assert server.wait(30) == 0
    assert time.monotonic() - started < 20


def test_a_drain_writes_what_tiers_lack(pool_server: StartServer, connect: Connect, tmp_path: Path) -> None:
    flags = ("--drain-ms", LONG_MS, "--tier", f"file:{tmp_path},name=one,size=64MiB,write=back")
    server, spec = pool_server(*flags), _spec()
    client = connect(server, transport="shm")
    namespace = client.open_namespace(spec)
    _store(client, namespace, "early")
    grant = client.rpc.put_start(namespace, [run_of("late")], ShardRange(0, 1))
    client.admin.drain()
    written = payload("late", CHUNK_BYTES)
    client.rpc.stub.PutChunks(
        iter([pb.PutChunksRequest(ticket_id=grant.ticket_id, offset=grant.offsets[0], payload=written.tobytes())]),
        timeout=60,
    )
    wait_for(lambda: "tiers drained" in server.stderr, "the first write to the tier")
    assert client.rpc.put_end(grant.ticket_id, [checksum(written)]).num_complete == 1
    assert server.wait(30) == 0
    follower = connect(pool_server(*flags), transport="shm")
    namespace = follower.open_namespace(spec)
    wait_for(lambda: follower.lookup(namespace, [run_of("early", "late")]).hits[0].num_leading == 2, "both blocks")


def test_the_command_waits_until_the_server_has_stopped(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server("--drain-ms", LONG_MS)
    client = connect(server)
    lease_id = _leased(client)
    done = CliRunner().invoke(app, ["drain", "--endpoint", server.endpoint, "--deadline", "50"])
    assert done.exit_code == 0 and "drains: 1 leases and 0 tickets of clients" in done.output, done.output
    assert "drains" in CliRunner().invoke(app, ["ping", "--endpoint", server.endpoint]).output
    threading.Timer(1.0, client.release, ([lease_id],)).start()
    done = CliRunner().invoke(app, ["drain", "--endpoint", server.endpoint, "--wait", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["stopped"] and 0.5 < said["seconds"] < 40
    assert server.wait(30) == 0
