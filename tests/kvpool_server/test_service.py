"""Bad input, faults and deaths, each over real gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvpool.client.block_io import Checksums, DrainBlocks, InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.handles import Namespace, PendingLookup
from kvpool.client.transport_choice import choose
from kvpool.protocol import wire
from kvpool.protocol.errors import (
    ChecksumError,
    IncompatibleNamespaceError,
    IncompatibleReleaseError,
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    OutOfSpaceError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.text import opened_text
from kvpool.protocol.types import BlockRun, Chunk, PoolKey, PutGrant, PutReceipt, PutStatus, Quota, ShardRange
from kvpool.protocol.wire import encode_runs, encode_spec
from kvpool.transport.base import Buffers
from kvpool.transport.segment import NAME
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool.version import __version__
from kvpool_server.cache.limits import Limits
from tests.conftest import Connect, StartServer
from tests.support.faults import offer_elsewhere
from tests.support.memory_files import arena_file
from tests.support.processes import ServerProcess, clean_environment, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of
from tests.support.vanishing_writer import CHUNK_BYTES as VANISHING_CHUNK_BYTES

CHUNK = 512
WHOLE = ShardRange(0, 1)
GRANTED, PRESENT, BUSY = PutStatus


@pytest.fixture
def spec() -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=CHUNK), group_spec(chunk_bytes=CHUNK, num_shards=2))


@pytest.fixture
def namespace(client: Client, spec: NamespaceSpec) -> Namespace:
    return client.open_namespace(spec)


def _store(client: Client, namespace: Namespace, *names: object, chunk_bytes: int = CHUNK) -> BlockRun:
    run = run_of(*names)
    result = client.put_blocks(namespace, run, [payload(name, chunk_bytes) for name in names])
    assert result.receipt.num_complete == len(names)
    return run


def _leading(client: Client, namespace: Namespace, run: BlockRun) -> int:
    return client.lookup(namespace, [run], lease=False).hits[0].num_leading


def _load(client: Client, namespace: Namespace, run: BlockRun) -> list[bytes | None]:
    lease_id = client.lookup(namespace, [run], prefix_only=False).lease_id
    try:
        blocks = client.get_blocks(namespace, lease_id, run)
    finally:
        client.release([lease_id])
    return [None if block is None else block.tobytes() for block in blocks]


def _status(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def _has_expired(client: Client, namespace: Namespace, lease_id: int, run: BlockRun) -> bool:
    try:
        next(client.rpc.locate(namespace, lease_id, [[run]], WHOLE))
    except LeaseExpiredError:
        return True
    return False


# The three paths


def test_what_was_put_is_found_and_read(client: Client, namespace: Namespace) -> None:
    run = _store(client, namespace, "a", "b", "c")
    assert _load(client, namespace, run) == [payload(name, CHUNK).tobytes() for name in "abc"]
    again = client.put_blocks(namespace, run, [payload(name, CHUNK) for name in "abc"])
    assert again.statuses == (PRESENT,) * 3 and again.nbytes == 0


def test_blocks_are_located_in_as_many_calls_as_needed_and_read_as_one(client: Client, namespace: Namespace) -> None:
    stored = [name for name in range(12) if name not in (3, 5, 9)]
    _store(client, namespace, *stored)
    run = run_of(*range(12))
    lease_id = client.lookup(namespace, [run], prefix_only=False).lease_id
    loaded: dict[int, bytes] = {}

    def drain(indices: Sequence[int], buffers: Buffers) -> None:
        loaded.update((idx, buffer.tobytes()) for idx, buffer in zip(indices, buffers, strict=True))

    located = client.get(dataclasses.replace(namespace, max_batch_blocks=5), lease_id, [run], drain)
    assert located.present == tuple(name in stored for name in range(12))
    assert loaded == {name: payload(name, CHUNK).tobytes() for name in stored}
    assert located.checksums == tuple(checksum(loaded[name]) for name in stored)
    client.release([lease_id])


def test_payloads_may_be_bytes_or_arrays(client: Client, namespace: Namespace) -> None:
    array = payload("a", CHUNK)
    for nth, content in enumerate([array, array.tobytes(), bytearray(array.tobytes()), memoryview(array.tobytes())]):
        client.put_blocks(namespace, run_of(nth), [content])
        assert _load(client, namespace, run_of(nth)) == [array.tobytes()]


def test_both_transports_see_the_same_blocks(shm_client: Client, tcp_client: Client, spec: NamespaceSpec) -> None:
    by_shm, by_tcp = shm_client.open_namespace(spec), tcp_client.open_namespace(spec)
    assert (by_shm.transport.name, by_tcp.transport.name) == ("shm", "tcp")
    assert _load(tcp_client, by_tcp, _store(shm_client, by_shm, "a")) == [payload("a", CHUNK).tobytes()]
    assert _load(shm_client, by_shm, _store(tcp_client, by_tcp, "b")) == [payload("b", CHUNK).tobytes()]


def test_a_lookup_that_fails_ends_no_other(client: Client, namespace: Namespace) -> None:
    run = _store(client, namespace, "a")
    unknown = dataclasses.replace(namespace, fingerprint=bytes(32))
    bad = client.rpc.lookup_async(unknown, [run])
    good = client.rpc.lookup_async(namespace, [run], lease=False)
    with pytest.raises(UnknownNamespaceError):
        bad.result(timeout_s=10)
    found = good.result(timeout_s=10)
    assert found is not None and found.hits[0].num_leading == 1


def test_a_server_that_stops_answering_holds_a_lookup_to_its_deadline_and_its_late_answer_is_heard(
    pool_server: StartServer, connect: Connect
) -> None:
    server = pool_server("--memory", "1MiB")
    patient, client = connect(server), connect(server, timeout_ms=300)
    namespace = patient.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    run = _store(patient, namespace, "a")
    wait_for(lambda: _answers(client), "its connection")
    late: list[int] = []
    os.kill(server.pid, signal.SIGSTOP)
    try:
        pending = client.rpc.lookup_async(namespace, [run])
        assert pending.result(timeout_s=0.01) is None and not pending.done()
        started = time.monotonic()
        with pytest.raises(PoolTimeoutError):
            pending.result()
        assert time.monotonic() - started < 10 and pending.done()
        for ask in (lambda: client.lookup(namespace, [run]), client.admin.ping):
            with pytest.raises(PoolTimeoutError, match=f"kvpool-server at {server.endpoint} did not answer in time"):
                ask()
    finally:
        os.kill(server.pid, signal.SIGCONT)

    def release(answered: PendingLookup) -> None:
        found = answered.result(0)
        assert found is not None
        late.append(found.lease_id)

    pending.on_done(release)
    wait_for(lambda: late, "the late answer")
    assert patient.release(late) == 1


def test_lookups_under_way_fail_when_the_server_dies_and_the_next_ones_find_its_successor(
    pool_server: StartServer, connect: Connect
) -> None:
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK))
    server = pool_server()
    endpoint = server.endpoint
    client = connect(server, timeout_ms=20_000)
    namespace = client.open_namespace(spec)
    run = _store(client, namespace, "a")
    os.kill(server.pid, signal.SIGSTOP)
    pending = [client.rpc.lookup_async(namespace, [run]) for _ in range(3)]
    server.kill()
    for each in pending:
        with pytest.raises(UnavailableError):
            each.result(timeout_s=10)
    again = pool_server("--listen", endpoint, "--drain-ms", "60000")
    wait_for(lambda: _answers(client), "the client's reconnection")
    with pytest.raises(UnknownNamespaceError):
        client.lookup(namespace, [run])
    assert client.lookup(client.open_namespace(spec), [run]).hits[0].num_leading == 0
    started = time.monotonic()
    again.stop()
    assert time.monotonic() - started < 30, "an idle stream of lookups must not hold up the end"


def test_a_server_ends_at_once_while_clients_ask(pool_server: StartServer) -> None:
    server = pool_server("--memory", "1MiB", "--drain-ms", "60000")
    asked = threading.Semaphore(0)

    def ask() -> None:
        client = Client(ClientConfig(server.endpoint, timeout_ms=30_000))
        with contextlib.suppress(KVPoolError), contextlib.closing(client):
            namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
            while True:
                client.lookup(namespace, [run_of("a")])
                asked.release()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        assert asked.acquire(timeout=30)
    started = time.monotonic()
    server.stop()
    taken_s = time.monotonic() - started
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert taken_s < 30, "a lookup that was being answered holds up the end"


def test_a_closed_client_leaves_no_thread(pool_server: StartServer) -> None:
    server = pool_server("--memory", "1MiB")
    before = set(threading.enumerate())
    client = Client(ClientConfig(server.endpoint, timeout_ms=10_000))
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    client.lookup(namespace, [run_of("a")])
    client.close()
    wait_for(lambda: not set(threading.enumerate()) - before, "the client's threads to end")
    with pytest.raises(UnavailableError, match="closed"):
        client.lookup(namespace, [run_of("a")])


def test_a_block_of_two_shards_becomes_visible_with_its_second_put_end(client: Client, namespace: Namespace) -> None:
    run = run_of("a", "b", group_idx=1)
    halves = {shard: [payload((name, shard), CHUNK) for name in "ab"] for shard in (0, 1)}
    first = client.put_blocks(namespace, run, halves[0], shards=ShardRange(0, 1))
    assert first.receipt == PutReceipt(num_committed=2, num_complete=0)
    assert _leading(client, namespace, run) == 0
    second = client.put_blocks(namespace, run, halves[1], shards=ShardRange(1, 1))
    assert second.receipt == PutReceipt(num_committed=2, num_complete=2)
    assert _leading(client, namespace, run) == 2

    whole = [(a.tobytes() + b.tobytes()) for a, b in zip(halves[0], halves[1], strict=True)]
    assert _load(client, namespace, run) == whole
    lease_id = client.lookup(namespace, [run]).lease_id
    upper = client.get_blocks(namespace, lease_id, run, shards=ShardRange(1, 1))
    assert [block.tobytes() for block in upper if block is not None] == [half.tobytes() for half in halves[1]]
    client.release([lease_id])


def test_a_failing_fill_gives_the_space_back_and_reaches_the_caller(client: Client, namespace: Namespace) -> None:
    def fill(indices: Sequence[int], buffers: Buffers) -> None:
        raise ZeroDivisionError("no bytes today")

    with pytest.raises(ZeroDivisionError, match="no bytes today"):
        client.put(namespace, [run_of("a")], fill)
    wait_for(lambda: client.rpc.put_start(namespace, [run_of("a")], WHOLE).statuses == (GRANTED,), "the space")


def test_bytes_may_be_on_their_way_until_their_checksums_are_asked_for(
    shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    client = connect(shared_server)
    namespace = client.open_namespace(spec)
    run = run_of("a", "b", "c")
    blocks = [payload(name, CHUNK) for name in "abc"]

    def fill(indices: Sequence[int], buffers: Buffers) -> Checksums:
        def later() -> list[int]:
            for idx, buffer in zip(indices, buffers, strict=True):
                buffer[:] = blocks[idx]
            return [checksum(blocks[idx]) for idx in indices]

        return later

    client.put(namespace, [run], fill, batch_bytes=2 * CHUNK, fill_sums=True)
    assert _load(client, namespace, run) == [block.tobytes() for block in blocks]
    for unlike in (fill, lambda *_: None):
        with pytest.raises(InvalidRequestError, match=f"fill_sums is {unlike is not fill}"):
            client.put(namespace, [run_of("other")], unlike, fill_sums=unlike is not fill)

    asked: list[int] = []

    def drain_with(sums: dict[int, int]) -> DrainBlocks:
        def drain(indices: Sequence[int], buffers: Buffers) -> Checksums:
            asked.extend(indices)
            return lambda: [sums[idx] for idx in indices]

        return drain

    right = {idx: checksum(block) for idx, block in enumerate(blocks)}
    lease_id = client.lookup(namespace, [run]).lease_id

    def get(sums: dict[int, int]) -> tuple[bool, ...]:
        drain = drain_with(sums)
        return tuple(client.get(namespace, lease_id, [run], drain, batch_bytes=2 * CHUNK, drain_sums=True).present)

    assert get(right) == (True,) * 3
    assert asked == [0, 1, 2]
    with pytest.raises(ChecksumError, match=f"1 blocks differ.*{run.block_hashes[1].hex()}"):
        get({**right, 1: right[1] ^ 1})
    with pytest.raises(InvalidRequestError, match="drain_sums is False"):
        client.get(namespace, lease_id, [run], drain_with(right))
    client.release([lease_id])


def test_no_byte_is_on_its_way_when_a_failed_put_gives_its_regions_back(
    shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    client = connect(shared_server)
    namespace = client.open_namespace(spec)
    waited: list[int] = []

    def fill(indices: Sequence[int], buffers: Buffers) -> Checksums:
        if 2 in indices:
            raise ZeroDivisionError("no more bytes")

        def later() -> list[int]:
            waited.extend(indices)
            raise RuntimeError("the device is lost")

        return later

    with pytest.raises(ZeroDivisionError, match="no more bytes"):
        client.put(namespace, [run_of("d", "e", "f")], fill, batch_bytes=CHUNK, fill_sums=True)
    assert waited == [0, 1]
    wait_for(lambda: client.rpc.put_start(namespace, [run_of("d")], WHOLE).statuses == (GRANTED,), "the space")


def test_calls_that_nobody_waits_for_arrive_all_the_same(pool_server: StartServer, connect: Connect) -> None:
    # A gRPC future is cancelled when the last reference to it goes: one call in five was never heard of again.
    client = connect(pool_server("--memory", "1MiB"))
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    run = _store(client, namespace, "a")
    for _ in range(50):
        client.rpc.release_quietly(client.lookup(namespace, [run]).lease_id)
    wait_for(lambda: client.admin.stats().num_leases == 0, "the end of every lease")

    def fill(indices: Sequence[int], buffers: Buffers) -> None:
        raise ZeroDivisionError

    for name in range(50):
        with pytest.raises(ZeroDivisionError):
            client.put(namespace, [run_of(name)], fill)
    wait_for(lambda: client.admin.stats().num_tickets == 0, "the end of every ticket")
    counters = client.admin.stats().counters
    assert not counters.get("expired_tickets", 0) and not counters.get("expired_leases", 0)


def test_a_lookup_may_name_leases_that_end(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server("--memory", "1MiB")
    client = connect(server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    run = _store(client, namespace, "a")
    leases = [client.lookup(namespace, [run]).lease_id for _ in range(4)]
    runs = encode_runs([run])
    with grpc.insecure_channel(server.endpoint) as channel:
        lookup = PoolStub(channel).Lookup  # type: ignore[no-untyped-call]
        assert not lookup(pb.LookupRequest(release=[leases[0], leases[0], 0, (1 << 64) - 1]), timeout=10).hits
        assert client.admin.stats().num_leases == 3
        found = lookup(
            pb.LookupRequest(release=leases[1:3], namespace=namespace.fingerprint, runs=runs, lease_ttl_ms=10_000),
            timeout=10,
        )
        assert found.lease_id and client.admin.stats().num_leases == 2
        for bad in (pb.LookupRequest(), pb.LookupRequest(release=[1] * 10_000)):
            with pytest.raises(grpc.RpcError) as refused:
                lookup(bad, timeout=10)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_every_reply_carries_the_boot_token(pool_server: StartServer, connect: Connect, spec: NamespaceSpec) -> None:
    server = pool_server("--memory", "64MiB")  # A server of its own, which the last call stops.
    with grpc.insecure_channel(server.endpoint) as channel:
        _ask_everything(PoolStub(channel), connect(server, transport="shm"), spec)


def _ask_everything(stub: PoolStub, client: Client, spec: NamespaceSpec) -> None:
    namespace = client.open_namespace(spec)
    run = pb.BlockRun(block_hashes=block_hash("a"))
    one = pb.ShardRange(count=1)
    grant = stub.PutStart(pb.PutStartRequest(namespace=namespace.fingerprint, runs=[run], shards=one), timeout=10)
    piece = pb.PutChunksRequest(ticket_id=grant.ticket_id, offset=grant.offsets[0], payload=bytes(CHUNK))
    replies = [
        grant,
        stub.OpenNamespace(pb.OpenNamespaceRequest(spec=encode_spec(spec)), timeout=10),
        stub.PutChunks(iter([piece]), timeout=10),
        stub.PutEnd(pb.PutEndRequest(ticket_id=grant.ticket_id, checksums=[checksum(bytes(CHUNK))]), timeout=10),
        stub.PutRevoke(pb.PutRevokeRequest(ticket_id=1), timeout=10),
        found := stub.Lookup(
            pb.LookupRequest(namespace=namespace.fingerprint, runs=[run], lease_ttl_ms=10_000), timeout=10
        ),
        located := stub.Get(
            pb.GetRequest(lease_id=found.lease_id, namespace=namespace.fingerprint, runs=[run], shards=one), timeout=10
        ),
        *stub.GetChunks(
            pb.GetChunksRequest(lease_id=found.lease_id, offsets=located.offsets, region_bytes=CHUNK), timeout=10
        ),
        stub.Release(pb.ReleaseRequest(lease_ids=[found.lease_id]), timeout=10),
        stub.PutChunks(iter([pb.PutChunksRequest()]), timeout=10),
        *stub.GetChunks(
            pb.GetChunksRequest(keys=[pb.PoolKey(namespace=namespace.fingerprint, block_hash=block_hash("a"))]),
            timeout=10,
        ),
        stub.Verify(pb.VerifyRequest(namespace=namespace.fingerprint, runs=[run]), timeout=10),
        stub.Remove(pb.RemoveRequest(namespace=namespace.fingerprint, runs=[run]), timeout=10),
        stub.Explain(pb.ExplainRequest(namespace=namespace.fingerprint, runs=[run]), timeout=10),
        stub.Hint(pb.HintRequest(namespace=namespace.fingerprint, runs=[run], kind=pb.HINT_KIND_EXPIRE), timeout=10),
        stub.Exists(pb.ExistsRequest(namespace=namespace.fingerprint, runs=[run]), timeout=10),
        stub.Clear(pb.ClearRequest(namespace=namespace.fingerprint), timeout=10),
        stub.Ping(pb.PingRequest(), timeout=10),
        stub.WhoAmI(pb.WhoAmIRequest(), timeout=10),
        stub.Stats(pb.StatsRequest(), timeout=10),
        stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=10),
        stub.ListQuotas(pb.ListQuotasRequest(), timeout=10),
        stub.SetQuotas(pb.SetQuotasRequest(), timeout=10),
        stub.Report(pb.ReportRequest(reporter=bytes(16), sequence=1, namespaces=[namespace.fingerprint]), timeout=10),
        stub.Ledger(pb.LedgerRequest(), timeout=10),
        stub.Value(pb.ValueRequest(), timeout=10),
    ]
    streamed = stub.LookupStream(iter([pb.LookupRequest(namespace=namespace.fingerprint, runs=[run])]), timeout=10)
    assert [reply.found.boot_token for reply in streamed] == [namespace.boot_token]
    replies.append(stub.Drain(pb.DrainRequest(deadline_ms=1_000), timeout=10))
    methods = [method for method in pb.DESCRIPTOR.services_by_name["Pool"].methods if method.name != "LookupStream"]
    assert {type(reply).DESCRIPTOR.name for reply in replies} == {method.output_type.name for method in methods}
    assert {reply.boot_token for reply in replies} == {namespace.boot_token} and namespace.boot_token


# Malformed requests


NAMING_BLOCKS: dict[str, dict[str, Any]] = {
    "Lookup": {},
    "PutStart": {"shards": pb.ShardRange(count=1)},
    "Get": {"shards": pb.ShardRange(count=1), "lease_id": 1},
    "Verify": {},
    "Remove": {},
    "Explain": {},
    "Hint": {"kind": pb.HINT_KIND_PIN, "pin_seconds": 60},
}


@pytest.mark.parametrize("method", NAMING_BLOCKS)
def test_every_method_that_names_blocks_refuses_names_that_are_none(
    stub: PoolStub, namespace: Namespace, method: str
) -> None:
    most = Limits().max_lookup_blocks if method in ("Lookup", "Explain", "Hint") else namespace.max_batch_blocks
    invalid, known, sound = grpc.StatusCode.INVALID_ARGUMENT, namespace.fingerprint, bytes(32)
    for says, name, code, runs in (
        ("block_hashes has 0 bytes; give 32 for each block", known, invalid, [pb.BlockRun()]),
        ("block_hashes has 63 bytes; give 32", known, invalid, [pb.BlockRun(block_hashes=bytes(63))]),
        ("parent_hash has 3 bytes, not 32", known, invalid, [pb.BlockRun(block_hashes=sound, parent_hash=bytes(3))]),
        ("namespace has 5 bytes, not 32", b"short", invalid, [pb.BlockRun(block_hashes=sound)]),
        (f"{sound.hex()[:12]}.*open it first", sound, grpc.StatusCode.NOT_FOUND, [pb.BlockRun(block_hashes=sound)]),
        ("group_idx 2: .* has groups 0 to 1", known, invalid, [pb.BlockRun(block_hashes=sound, group_idx=2)]),
        (f"of {most + 1} blocks; give 1 to {most}", known, invalid, [pb.BlockRun(block_hashes=sound * (most + 1))]),
        ("names no blocks", known, invalid, []),
    ):  # fmt: skip
        request = getattr(pb, f"{method}Request")(namespace=name, runs=runs, **NAMING_BLOCKS[method])
        found, details = _status(lambda request=request: getattr(stub, method)(request, timeout=10))
        assert found is code and re.search(says, details), details


def test_a_server_that_computes_fingerprints_in_another_way_is_refused(
    client: Client, spec: NamespaceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NamespaceSpec, "fingerprint", lambda self: bytes(32))
    with pytest.raises(
        IncompatibleReleaseError, match=r"compute different fingerprints .* install the same release of kvpool"
    ):
        client.open_namespace(spec)


def test_a_mismatched_spec_is_refused_by_the_name_of_the_field(
    client: Client, namespace: Namespace, spec: NamespaceSpec
) -> None:
    larger = dataclasses.replace(spec.groups[1], chunk_bytes=CHUNK + 1)
    changed = dataclasses.replace(spec, kv_cache_dtype="fp8", groups=(spec.groups[0], larger))
    says = "groups[1].chunk_bytes: 513 here, 512 there; kv_cache_dtype: 'fp8' here, '' there"
    with pytest.raises(IncompatibleNamespaceError, match=re.escape(says)):
        client.open_namespace(changed, expected_fingerprint=namespace.fingerprint)
    assert client.open_namespace(spec, expected_fingerprint=namespace.fingerprint).fingerprint == namespace.fingerprint


def test_bytes_that_are_no_message_fail_their_call_and_nothing_else(
    shared_server: ServerProcess, stub: PoolStub
) -> None:
    with grpc.insecure_channel(shared_server.endpoint) as channel:
        for method in ("Lookup", "OpenNamespace", "Ping"):
            call = channel.unary_unary(f"/kvpool.v1.Pool/{method}")
            _status(lambda call=call: call(b"\xff\xff\xff", timeout=10))
        _status(lambda: channel.stream_unary("/kvpool.v1.Pool/PutChunks")(iter([b"\xff\xff\xff"]), timeout=10))
    assert stub.Ping(pb.PingRequest(), timeout=10).version == __version__


def test_a_write_or_read_of_nothing_moves_nothing(stub: PoolStub, client: Client, namespace: Namespace) -> None:
    grant = client.rpc.put_start(namespace, [run_of("a")], WHOLE)
    empty = pb.PutChunksRequest(ticket_id=grant.ticket_id, offset=grant.offsets[0])
    for messages in ([], [empty]):
        assert stub.PutChunks(iter(messages), timeout=10).nbytes == 0
    assert list(stub.GetChunks(pb.GetChunksRequest(lease_id=1), timeout=10)) == []
    assert client.chunks.put([]) == () and client.chunks.get([]) == []


# Tickets and leases


def test_a_ticket_is_revoked_once_and_its_block_can_be_put_again(client: Client, namespace: Namespace) -> None:
    grant = client.rpc.put_start(namespace, [run_of("a")], WHOLE)
    assert client.rpc.put_start(namespace, [run_of("a")], WHOLE).statuses == (BUSY,)
    assert client.rpc.put_revoke(grant.ticket_id) is True
    assert client.rpc.put_revoke(grant.ticket_id) is False
    with pytest.raises(LeaseExpiredError):
        client.rpc.put_end(grant.ticket_id, [1])
    _store(client, namespace, "a")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fill_that_outlives_its_ticket_is_an_error_and_stores_nothing(
    shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec, transport: str
) -> None:
    client = connect(shared_server, transport=transport, ticket_ttl_ms=1_000)  # It has to connect within.
    namespace, run = client.open_namespace(spec), run_of(transport)

    def slow(indices: Sequence[int], buffers: Buffers) -> None:
        wait_for(lambda: client.rpc.put_start(namespace, [run], WHOLE).statuses == (GRANTED,), "the ticket's end")

    with pytest.raises((LeaseExpiredError, PoolTimeoutError)):
        client.put(namespace, [run], slow)
    assert _leading(client, namespace, run) == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_grant_that_is_seen_after_its_ticket_has_ended_is_not_filled(
    shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped while the server's answer waited for it."""
    client = connect(shared_server, transport=transport, ticket_ttl_ms=200)
    namespace, start, filled = client.open_namespace(spec), client.rpc.put_start, []

    def seen_late(*args: Any) -> PutGrant:
        grant = start(*args)
        time.sleep(0.3)
        return grant

    monkeypatch.setattr(client.rpc, "put_start", seen_late)
    with pytest.raises((LeaseExpiredError, PoolTimeoutError)):
        client.put(namespace, [run_of(transport)], lambda indices, _: filled.append(indices))
    assert not filled


def test_get_after_the_lease_is_an_error(shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec) -> None:
    client = connect(shared_server, lease_ttl_ms=1)
    namespace = client.open_namespace(spec)
    run = _store(client, namespace, "a")
    lease_id = client.lookup(namespace, [run]).lease_id
    wait_for(lambda: _has_expired(client, namespace, lease_id, run), "the lease's end")
    with pytest.raises(LeaseExpiredError, match=f"lease {lease_id:#x} is not live.*look up again"):
        client.get_blocks(namespace, lease_id, run)
    with pytest.raises(LeaseExpiredError):
        client.get_blocks(namespace, 0, run)


def test_a_lease_that_runs_out_during_the_read_is_an_error(
    shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    client = connect(shared_server, transport="shm", lease_ttl_ms=2_000)
    namespace = client.open_namespace(spec)
    run = _store(client, namespace, "a")
    lease_id = client.lookup(namespace, [run]).lease_id

    drained: list[int] = []

    def drain(indices: Sequence[int], buffers: Buffers) -> None:
        drained.extend(indices)
        wait_for(lambda: _has_expired(client, namespace, lease_id, run), "the lease's end")

    with pytest.raises((LeaseExpiredError, PoolTimeoutError)):
        client.get(namespace, lease_id, [run], drain)
    assert drained == [0]


def test_a_get_of_several_groups_is_refused_before_it_is_sent(client: Client, namespace: Namespace) -> None:
    says = r"the runs are of groups \[0, 1\]; a put or get moves blocks of one group"
    with pytest.raises(InvalidRequestError, match=says):
        client.get(namespace, 1, [run_of("a"), run_of("a", group_idx=1)], lambda *_: None)


def test_payloads_of_a_wrong_size_or_number_are_refused_before_they_are_sent(
    client: Client, namespace: Namespace
) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"payload 1 has {CHUNK - 1} bytes of uint8; the group's blocks have {CHUNK}"
    ):
        client.put_blocks(namespace, run_of("a", "b"), [bytes(CHUNK), bytes(CHUNK - 1)])
    with pytest.raises(InvalidRequestError, match="1 payloads for 2 blocks"):
        client.put_blocks(namespace, run_of("a", "b"), [bytes(CHUNK)])
    with pytest.raises(InvalidRequestError, match=f"payload 0 has {CHUNK} bytes of uint16"):
        client.put_blocks(namespace, run_of("a"), [np.zeros(CHUNK // 2, np.uint16)])
    assert client.rpc.put_start(namespace, [run_of("a")], WHOLE).statuses == (GRANTED,), "a ticket was left"


@pytest.mark.parametrize(
    "blocks",
    [
        [np.zeros(CHUNK, np.int64)] * 2,
        [np.zeros(CHUNK // 2, np.uint16)] * 2,
        [np.zeros((CHUNK // 2, 2), np.uint8)] * 2,
        [np.zeros(2 * CHUNK, np.uint8)[::2]] * 2,
        [np.zeros(CHUNK, np.uint8), np.zeros(1, np.uint8)],
        [np.zeros(CHUNK, np.uint8)],
        [bytes(CHUNK)] * 2,
    ],
)
def test_blocks_in_place_that_are_no_such_blocks_are_refused_and_harm_nobody(
    client: Client, namespace: Namespace, blocks: list[Any]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"for 2 blocks|uint8|not contiguous|it must have"):
        client.put(namespace, [run_of("a", "b")], InPlace(blocks))
    run = _store(client, namespace, "c", "d")
    lease_id = client.lookup(namespace, [run]).lease_id
    with pytest.raises(InvalidRequestError, match=r"for 2 blocks|uint8|not contiguous|it must have"):
        client.get(namespace, lease_id, [run], InPlace(blocks))
    with pytest.raises(InvalidRequestError, match="block 0 is read-only"):
        client.get(namespace, lease_id, [run], InPlace([np.frombuffer(bytes(CHUNK), np.uint8)] * 2))
    assert _load(client, namespace, run) == [payload(name, CHUNK).tobytes() for name in "cd"]


# Faults


def test_a_writer_that_is_killed_leaks_nothing_and_blocks_nobody(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server("--grace-ms", "300")
    client = connect(server, transport="shm")
    spec = namespace_spec(group_spec(chunk_bytes=VANISHING_CHUNK_BYTES))
    namespace = client.open_namespace(spec)
    run = run_of("a", "b")
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.vanishing_writer", server.endpoint, spec.salt, "5000"],
        stdout=subprocess.PIPE, text=True, env=clean_environment(PYTHONPATH=":".join(sys.path)),
    )  # fmt: skip
    assert writer.stdout is not None
    try:
        assert int(writer.stdout.readline()) != 0
        assert client.rpc.put_start(namespace, [run], WHOLE).statuses == (BUSY, BUSY)
    finally:
        writer.kill()
        writer.wait(10)
        writer.stdout.close()

    # While its ticket lives, other blocks can be put and its own answer at once that they are busy.
    _store(client, namespace, "c", chunk_bytes=VANISHING_CHUNK_BYTES)
    assert _leading(client, namespace, run) == 0
    # As soon as its ticket has expired the next writer gets fresh slots, with the old ones still in quarantine.
    wait_for(lambda: client.admin.stats().num_tickets == 0, "the end of the ticket")
    again = client.put_blocks(namespace, run, [payload(name, VANISHING_CHUNK_BYTES) for name in "ab"])
    assert again.receipt.num_complete == 2
    assert _load(client, namespace, run) == [payload(name, VANISHING_CHUNK_BYTES).tobytes() for name in "ab"]
    # After the grace the space is back.
    wait_for(lambda: client.admin.stats().num_quarantined == 0, "the end of the grace")
    stats = client.admin.stats()
    assert stats.free_bytes == stats.arena_bytes - 3 * VANISHING_CHUNK_BYTES
    assert stats.counters["expired_tickets"] == 1


def _flip_a_byte(client: Client, server: ServerProcess, namespace: Namespace, run: BlockRun) -> None:
    """As a stray writer, or a broken DIMM, would."""
    lease_id = client.lookup(namespace, [run]).lease_id
    offset = next(client.rpc.locate(namespace, lease_id, [[run]], WHOLE)).offsets[0]
    client.release([lease_id])
    np.memmap(arena_file(server.pid), np.uint8, "r+")[offset + CHUNK // 2] ^= 0x01


def test_a_corrupted_block_is_an_error_once_and_then_a_miss(
    client: Client, shared_server: ServerProcess, namespace: Namespace
) -> None:
    run = _store(client, namespace, "a", "b", "c")
    bad = run_of("b")
    _flip_a_byte(client, shared_server, namespace, bad)
    dropped = client.admin.stats().counters.get("corrupt_blocks", 0)
    lease_id = client.lookup(namespace, [run]).lease_id
    with pytest.raises(
        ChecksumError, match=f"1 blocks differ from their checksums, the first is {block_hash('b').hex()}"
    ):
        client.get_blocks(namespace, lease_id, run)
    assert client.admin.stats().counters["corrupt_blocks"] == dropped + 1
    client.release([lease_id])
    assert client.lookup(namespace, [run], prefix_only=False, lease=False).hits[0].complete == 0b101
    _store(client, namespace, "b")
    assert _load(client, namespace, run) == [payload(name, CHUNK).tobytes() for name in "abc"]


def test_a_corrupted_block_is_a_miss_for_inline_gets_and_is_dropped(
    client: Client, shared_server: ServerProcess, namespace: Namespace
) -> None:
    run = _store(client, namespace, "a")
    _flip_a_byte(client, shared_server, namespace, run)
    dropped = client.admin.stats().counters.get("corrupt_blocks", 0)
    assert client.chunks.get([PoolKey(namespace.fingerprint, 0, block_hash("a"), 0)]) == [None]
    assert client.admin.stats().counters["corrupt_blocks"] == dropped + 1
    assert _leading(client, namespace, run) == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_restarted_server_is_noticed_and_its_old_bytes_are_never_read(
    pool_server: StartServer, connect: Connect, transport: str
) -> None:
    server = pool_server("--memory", "1MiB")
    client = connect(server, transport=transport)
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK))
    old = client.open_namespace(spec)
    run = _store(client, old, "a")
    old_lease = client.lookup(old, [run]).lease_id
    old_ticket = client.rpc.put_start(old, [run_of("b")], WHOLE).ticket_id
    old_pid = server.pid
    server.kill()
    with pytest.raises((UnavailableError, PoolTimeoutError)):
        client.lookup(old, [run])
    server = pool_server("--memory", "1MiB", "--listen", server.endpoint)
    wait_for(lambda: _answers(client), "the client's reconnection")

    def used_as_before() -> list[Callable[[], object]]:
        return [
            lambda: client.lookup(old, [run]),
            lambda: client.get_blocks(old, old_lease, run),
            lambda: client.put_blocks(old, run_of("new"), [bytes(CHUNK)]),
        ]

    for call in used_as_before():
        with pytest.raises(UnknownNamespaceError, match="open it first"):
            call()
    with pytest.raises(LeaseExpiredError, match="of another boot"):
        client.rpc.put_end(old_ticket, [1])

    # Another engine opens the namespace and stores other bytes under the same name: the old handle must not see them.
    other = connect(server, transport=transport)
    theirs = other.open_namespace(spec)
    assert theirs.boot_token != old.boot_token
    other.put_blocks(theirs, run, [payload("anew", CHUNK)])
    for call in used_as_before():
        with pytest.raises((UnavailableError, LeaseExpiredError)):
            call()
    with pytest.raises(UnavailableError, match="has restarted; open the namespace again"):
        client.lookup(old, [run])
    assert _leading(other, theirs, run_of("new")) == 0
    wait_for(lambda: other.admin.stats().num_tickets == 0, "the old handle's ticket is given back")
    wait_for(lambda: other.admin.stats().num_leases == 0, "the old handle's leases are given back", 5)

    assert f"/memfd:{NAME}{old_pid} " in Path("/proc/self/maps").read_text() or transport == "tcp"
    reopened = client.open_namespace(spec)
    wait_for(lambda: f"/memfd:{NAME}{old_pid} " not in Path("/proc/self/maps").read_text(), "the old memory is let go")
    assert reopened.boot_token == theirs.boot_token
    assert _load(client, reopened, run) == [payload("anew", CHUNK).tobytes()]
    assert _leading(client, reopened, run_of("b")) == 0


def _answers(client: Client) -> bool:
    try:
        client.admin.ping()
    except (UnavailableError, PoolTimeoutError):
        return False
    return True


def test_an_address_that_does_not_resolve_is_named() -> None:
    with (
        Client(ClientConfig(endpoint="no-such-host.invalid:50051", timeout_ms=10_000, insecure_network=True)) as client,
        pytest.raises((UnavailableError, PoolTimeoutError), match=r"kvpool-server at no-such-host\.invalid:50051"),
    ):
        client.admin.ping()


def test_a_client_that_shares_no_memory_falls_back_to_the_stream_or_says_so(
    shared_server: ServerProcess, connect: Connect
) -> None:
    client = connect(shared_server, transport="auto")
    assert client.open_namespace(namespace_spec()).transport.name == "shm", "both sides see it"
    offer = offer_elsewhere(client)
    choice = choose(client.config, offer, client.rpc.channel)
    with contextlib.closing(choice.transport):
        assert choice.transport.name == "tcp"
    with pytest.raises(TransferError, match="memory socket cannot be reached from here: Connection refused"):
        choose(dataclasses.replace(client.config, transport="shm"), offer, client.rpc.channel)


# Inline


def _chunk(namespace: Namespace, name: object, *, shard: int = 0, group_idx: int = 0, **fields: Any) -> Chunk:
    content = fields.pop("payload", payload((name, shard), CHUNK).tobytes())
    key = PoolKey(namespace.fingerprint, group_idx, block_hash(name), shard)
    return Chunk(key, content, fields.pop("checksum", checksum(content)), **fields)


def test_inline_chunks_come_back(client: Client, namespace: Namespace) -> None:
    chunks = [_chunk(namespace, "a"), _chunk(namespace, "b", parent_hash=block_hash("a"))]
    tickets_before = client.admin.stats().num_tickets
    assert client.chunks.put(chunks) == (GRANTED, GRANTED)
    assert client.chunks.put(chunks) == (PRESENT, PRESENT)
    missing = PoolKey(namespace.fingerprint, 0, block_hash("c"), 0)
    found = client.chunks.get([chunks[1].key, missing, chunks[0].key])
    assert found == [dataclasses.replace(chunks[1], parent_hash=b""), None, chunks[0]]
    assert client.admin.stats().num_tickets <= tickets_before, "an inline put left a ticket"


def test_an_inline_block_is_found_when_its_last_shard_is_there(client: Client, namespace: Namespace) -> None:
    first, second = (_chunk(namespace, "a", shard=shard, group_idx=1) for shard in (0, 1))
    client.chunks.put([first])
    assert client.chunks.get([first.key]) == [None]
    client.chunks.put([second])
    assert client.chunks.get([first.key, second.key]) == [first, second]


def test_many_inline_chunks_travel_in_several_messages(client: Client) -> None:
    nbytes = 1 << 20
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=nbytes)))
    chunks = [_chunk(namespace, name, payload=payload(name, nbytes).tobytes()) for name in range(9)]
    assert client.chunks.put(chunks) == (GRANTED,) * 9
    assert client.chunks.get([chunk.key for chunk in chunks]) == chunks
    client.admin.clear(namespace.fingerprint)


def test_an_inline_chunk_that_arrives_with_other_bytes_is_an_error(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = _chunk(namespace, "a")
    client.chunks.put([chunk])
    decode = wire.decode_chunk

    def decode_flipped(message: pb.Chunk) -> Chunk:
        return dataclasses.replace(decode(message), payload=bytes(CHUNK))

    monkeypatch.setattr(wire, "decode_chunk", decode_flipped)
    with pytest.raises(ChecksumError, match=f"chunk {block_hash('a').hex()} shard 0 differs from its checksum"):
        client.chunks.get([chunk.key])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"payload": bytes(CHUNK - 1)}, InvalidRequestError, f"has {CHUNK - 1} bytes; group 0's chunks have {CHUNK}"),
        ({"payload": b""}, InvalidRequestError, f"has 0 bytes; group 0's chunks have {CHUNK}"),
        ({"checksum": 7}, ChecksumError, "the payload's xxh3-64 is not 0x7"),
        ({"shard": 1}, InvalidRequestError, r"shards \[1, 2\) are not within the group's 1 shards"),
        ({"group_idx": 5}, InvalidRequestError, "group_idx 5: the namespace has groups 0 to 1"),
        ({"parent_hash": b"short"}, InvalidRequestError, "parent_hash has 5 bytes, not 32"),
    ],
)
def test_bad_inline_chunks_are_refused_and_not_stored(
    client: Client, namespace: Namespace, change: dict[str, Any], error: type[KVPoolError], says: str
) -> None:
    with pytest.raises(error, match=says):
        client.chunks.put([_chunk(namespace, "a", **change)])
    assert _leading(client, namespace, run_of("a")) == 0
    assert client.rpc.put_start(namespace, [run_of("a")], WHOLE).statuses == (GRANTED,)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"block_hash": b"short"}, InvalidRequestError, "block_hash has 5 bytes, not 32"),
        ({"namespace": b"short"}, InvalidRequestError, "namespace has 5 bytes, not 32"),
        ({"namespace": bytes(32)}, UnknownNamespaceError, "open it first"),
        ({"group_idx": 5}, InvalidRequestError, "group_idx 5: the namespace has groups 0 to 1"),
        ({"shard": 1}, InvalidRequestError, r"shards \[1, 2\) are not within the group's 1 shards"),
    ],
)
def test_bad_inline_keys_are_refused(
    client: Client, namespace: Namespace, change: dict[str, Any], error: type[KVPoolError], says: str
) -> None:
    chunk = _chunk(namespace, "a")
    client.chunks.put([chunk])
    bad = dataclasses.replace(chunk.key, **change)
    with pytest.raises(error, match=says):
        client.chunks.get([chunk.key, bad])
    with pytest.raises(error, match=says):
        client.chunks.put([dataclasses.replace(chunk, key=bad)])


# Operations


def test_namespaces_say_who_opened_them_and_are_listed_without_a_look_at_every_entry(
    connect: Connect, pool_server: StartServer
) -> None:
    client = connect(server := pool_server())
    first = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=1)))
    client.put_blocks(first, run_of("a"), [payload("a", CHUNK)])
    assert client.rpc.check(first) == 1
    # A host's name comes from outside: it must not break a line of a log, nor fill one.
    spec = namespace_spec()
    with grpc.insecure_channel(server.endpoint) as channel:
        stub = PoolStub(channel)
        for opener in ("host\n\x1b[31m" + "x" * 100, "who came later"):
            stub.OpenNamespace(pb.OpenNamespaceRequest(spec=encode_spec(spec), opener=opener), timeout=10)
    assert client.rpc.check(first) == 2
    mine, theirs = client.admin.namespaces(holdings=False)
    assert mine.opened_by == socket.gethostname() and (mine.num_entries, mine.nbytes) == (0, 0)
    assert theirs.opened_by == "host[31m" + "x" * 54
    assert re.fullmatch(r"opened by .*, \d+ (s|min) ago", opened_text(mine.opened_by, mine.age_seconds))
    assert client.admin.namespaces()[0].num_entries == 1


def test_a_namespace_tells_how_it_is_used(client: Client) -> None:
    spec = namespace_spec(group_spec())
    newer = dataclasses.replace(spec, weights_epoch="newer")
    namespace = client.open_namespace(spec)
    run = _store(client, namespace, "a", "b", chunk_bytes=256)
    client.lookup(namespace, [run], lease=False)
    client.lookup(namespace, [run_of("x", "y")], lease=False)

    def told() -> pb.NamespaceInfo:
        return next(info for info in client.admin.namespaces() if info.fingerprint == namespace.fingerprint)

    assert (told().lookup_blocks, told().lookup_hits) == (4, 2)
    info = told()
    assert info.age_seconds >= info.idle_seconds > 0 and not info.superseded and not info.tiers
    client.open_namespace(newer)
    assert told().superseded
    client.lookup(namespace, [run])
    assert not told().superseded


def test_quotas_are_set_listed_and_kept(client: Client) -> None:
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="bounded")
    namespace = client.open_namespace(spec)
    _store(client, namespace, *range(8))
    assert client.admin.set_quotas([Quota("tenant:bounded", 4 * CHUNK)]) == [
        pb.Quota(subject="tenant:bounded", limit_bytes=4 * CHUNK, used_bytes=4 * CHUNK)
    ]
    with pytest.raises(OutOfSpaceError, match=r"quota tenant:bounded = 2048 bytes: 5 blocks .* are more"):
        client.put_blocks(namespace, run_of(*"abcde"), [payload(name, CHUNK) for name in "abcde"])
    _store(client, namespace, "a", "b")
    assert client.admin.quotas() == [pb.Quota(subject="tenant:bounded", limit_bytes=4 * CHUNK, used_bytes=4 * CHUNK)]
    client.admin.set_quotas([Quota("tenant:a", CHUNK), Quota("tenant:z", CHUNK)])
    told = [quota.subject for quota in client.admin.stats().quotas]
    assert told == ["tenant:bounded", "tenant:a", "tenant:z"], "the fullest come first"
    client.admin.set_quotas([Quota("tenant:a", 0), Quota("tenant:z", 0)])
    with pytest.raises(InvalidRequestError, match="quota subject 'bounded' is neither"):
        client.admin.set_quotas([Quota("tenant:bounded", 0), Quota("bounded", 1)])
    assert len(client.admin.quotas()) == 1
    assert client.admin.set_quotas([Quota("tenant:bounded", 0)]) == []


def test_quotas_may_be_given_at_the_start(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server("--memory", "1MiB", "--quota", "tenant:a=64KiB", "--quota", "tenant:b=1000B")
    assert connect(server).admin.quotas() == [
        pb.Quota(subject="tenant:a", limit_bytes=64 << 10),
        pb.Quota(subject="tenant:b", limit_bytes=1_000),
    ]


def test_ping_tells_version_and_uptime(client: Client) -> None:
    pong = client.admin.ping()
    version, uptime_s = pong.version, pong.uptime_seconds
    assert version == __version__ and uptime_s > 0
