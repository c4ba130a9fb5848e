"""Bad input, faults and deaths, each over real gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvpool.client.block_io import Checksums, DrainBlocks, InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol import wire
from kvpool.protocol.errors import (
    ChecksumError,
    IncompatibleReleaseError,
    InvalidReplyError,
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    OutOfSpaceError,
    PoolTimeoutError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.replies import existence
from kvpool.protocol.reports import REPORTER_BYTES, ReportRequest
from kvpool.protocol.text import opened_text
from kvpool.protocol.types import BlockRun, Chunk, LeasedSlots, Lookup, PoolKey, PutGrant, PutStatus, Quota, ShardRange
from kvpool.protocol.wire import encode_spec
from kvpool.transport.base import Buffers
from kvpool.transport.segment import NAME
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from kvpool_server.sharing import Limits
from tests.conftest import Connect, StartServer
from tests.support.calls import BLOCK_BYTES, BYTES_BY_ID, SERVICE, Target, requests
from tests.support.memory_files import arena_file
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of

CHUNK = 512
WHOLE = ShardRange(0, 1)
GRANTED, PRESENT, BUSY = PutStatus
ONE_TRANSPORT = pytest.mark.parametrize("client", ["shm"], indirect=True)
"""Runs a test with one client only, because its calls reach no transport."""


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
    run, arrays = run_of(*"abcd"), [payload(name, CHUNK) for name in "abcd"]
    a, b, c, d = arrays
    blocks = [a, b.tobytes(), bytearray(c.tobytes()), memoryview(d.tobytes())]
    assert client.put_blocks(namespace, run, blocks).receipt.num_complete == 4
    assert _load(client, namespace, run) == [array.tobytes() for array in arrays]
    again = client.put_blocks(namespace, run, blocks)
    assert again.statuses == (PRESENT,) * 4 and again.nbytes == 0


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


def test_a_server_ends_at_once_while_clients_ask_or_have_idle_streams(
    pool_server: StartServer, connect: Connect
) -> None:
    server = pool_server("--memory", "1MiB", "--drain-ms", "60000")
    before, idle = set(threading.enumerate()), connect(server)
    idle_namespace = idle.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    idle.lookup(idle_namespace, [run_of("a")])
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
    assert taken_s < 30, "a stream of lookups holds up the end"
    idle.close()
    with pytest.raises(UnavailableError, match="closed"):
        idle.lookup(idle_namespace, [run_of("a")])
    wait_for(lambda: not set(threading.enumerate()) - before, "the clients' threads to end")


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


def test_every_reply_carries_the_boot_token(shm_client: Client) -> None:
    """Drain's reply is checked where a server drains; PutChunks and GetChunks have one kind of reply for both uses."""
    spec = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES))
    namespace = shm_client.open_namespace(spec)
    _store(shm_client, namespace, "block", chunk_bytes=BLOCK_BYTES)
    grant = shm_client.rpc.put_start(namespace, [run_of("written")], WHOLE)
    lease_id = shm_client.lookup(namespace, [run_of("block")]).lease_id
    leased = next(shm_client.rpc.locate(namespace, lease_id, [[run_of("block")]], WHOLE))
    target = Target(namespace.fingerprint, lease_id, leased.offsets[0], grant.ticket_id, grant.offsets[0], spec)
    for name, request in sorted(requests(target).items(), key=lambda named: named[0] not in BYTES_BY_ID):
        if name in ("PutChunks", "Drain"):
            continue
        method = SERVICE.methods_by_name[name.split()[0]]
        call = getattr(shm_client.rpc.stub, method.name)
        reply = call(iter([request]) if method.client_streaming else request, timeout=10)
        for each in reply if method.server_streaming else [reply]:
            assert (each.found if name == "LookupStream" else each).boot_token == namespace.boot_token, name


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
@ONE_TRANSPORT
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


# Tickets and leases


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


def test_a_lease_that_has_run_out_is_an_error_after_and_before_the_read(
    shared_server: ServerProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    client = connect(shared_server, transport="shm", lease_ttl_ms=1_000)
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
    with pytest.raises(LeaseExpiredError, match=f"lease {lease_id:#x} is not live.*look up again"):
        client.get_blocks(namespace, lease_id, run)
    with pytest.raises(LeaseExpiredError):
        client.get_blocks(namespace, 0, run)


@ONE_TRANSPORT
def test_calls_that_make_no_sense_are_refused_before_they_are_sent(
    client: Client, namespace: Namespace, spec: NamespaceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, run = run_of("a", "b"), _store(client, namespace, "c", "d")
    lease_id = client.lookup(namespace, [run]).lease_id
    says = r"the runs are of groups \[0, 1\]; a put or get moves blocks of one group"
    with pytest.raises(InvalidRequestError, match=says):
        client.get(namespace, 1, [run_of("a"), run_of("a", group_idx=1)], lambda *_: None)
    for payloads, says in (
        ([bytes(CHUNK), bytes(7)], f"payload 1 has 7 bytes of uint8; the group's blocks have {CHUNK}"),
        ([bytes(CHUNK)], "1 payloads for 2 blocks"),
        ([np.zeros(CHUNK // 2, np.uint16)] * 2, f"payload 0 has {CHUNK} bytes of uint16"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            client.put_blocks(namespace, pair, payloads)
    in_place: list[list[Any]] = [
        [np.zeros(CHUNK, np.int64)] * 2,
        [np.zeros((CHUNK // 2, 2), np.uint8)] * 2,
        [np.zeros(2 * CHUNK, np.uint8)[::2]] * 2,
        [np.zeros(CHUNK, np.uint8), np.zeros(1, np.uint8)],
        [np.zeros(CHUNK, np.uint8)],
        [bytes(CHUNK)] * 2,
    ]
    for blocks in in_place:
        with pytest.raises(InvalidRequestError, match=r"for 2 blocks|uint8|not contiguous|it must have"):
            client.put(namespace, [pair], InPlace(blocks))
        with pytest.raises(InvalidRequestError, match=r"for 2 blocks|uint8|not contiguous|it must have"):
            client.get(namespace, lease_id, [run], InPlace(blocks))
    with pytest.raises(InvalidRequestError, match="block 0 is read-only"):
        client.get(namespace, lease_id, [run], InPlace([np.frombuffer(bytes(CHUNK), np.uint8)] * 2))
    assert _load(client, namespace, run) == [payload(name, CHUNK).tobytes() for name in "cd"]
    assert client.rpc.put_start(namespace, [pair], WHOLE).statuses == (GRANTED, GRANTED), "a ticket was left"
    monkeypatch.setattr(NamespaceSpec, "fingerprint", lambda self: bytes(32))
    with pytest.raises(IncompatibleReleaseError, match=r"compute different fingerprints .* install the same release"):
        client.open_namespace(spec)


# Faults


def test_a_writer_that_vanishes_leaks_nothing_and_blocks_nobody(pool_server: StartServer, connect: Connect) -> None:
    """A killed writer is the same to the server: it watches no processes, and ends the ticket at its deadline."""
    chunk_bytes = 1_000
    server = pool_server("--grace-ms", "300")
    client, vanishing = connect(server), connect(server, ticket_ttl_ms=1_000)
    namespace, run = client.open_namespace(namespace_spec(group_spec(chunk_bytes=chunk_bytes))), run_of("a", "b")
    assert vanishing.rpc.put_start(namespace, [run], WHOLE).statuses == (GRANTED, GRANTED)
    assert client.rpc.put_start(namespace, [run], WHOLE).statuses == (BUSY, BUSY)

    # While its ticket lives, other blocks can be put and its own answer at once that they are busy.
    _store(client, namespace, "c", chunk_bytes=chunk_bytes)
    assert _leading(client, namespace, run) == 0
    # As soon as its ticket has expired the next writer gets fresh slots, with the old ones still in quarantine.
    wait_for(lambda: client.admin.stats().num_tickets == 0, "the end of the ticket")
    _store(client, namespace, "a", "b", chunk_bytes=chunk_bytes)
    assert _load(client, namespace, run) == [payload(name, chunk_bytes).tobytes() for name in "ab"]
    # After the grace the space is back.
    wait_for(lambda: client.admin.stats().num_quarantined == 0, "the end of the grace")
    stats = client.admin.stats()
    assert stats.free_bytes == stats.arena_bytes - 3 * chunk_bytes
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
    _flip_a_byte(client, shared_server, namespace, run_of("b"))
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

    _flip_a_byte(client, shared_server, namespace, run_of("a"))
    assert client.chunks.get([PoolKey(namespace.fingerprint, 0, block_hash("a"), 0)]) == [None], "an inline get misses"
    assert client.admin.stats().counters["corrupt_blocks"] == dropped + 2
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


# Inline


def _chunk(namespace: Namespace, name: object, *, shard: int = 0, group_idx: int = 0, **fields: Any) -> Chunk:
    content = fields.pop("payload", payload((name, shard), CHUNK).tobytes())
    key = PoolKey(namespace.fingerprint, group_idx, block_hash(name), shard)
    return Chunk(key, content, fields.pop("checksum", checksum(content)), **fields)


@ONE_TRANSPORT
def test_inline_chunks_come_back(client: Client, namespace: Namespace) -> None:
    chunks = [_chunk(namespace, "a"), _chunk(namespace, "b", parent_hash=block_hash("a"))]
    tickets_before = client.admin.stats().num_tickets
    assert client.chunks.put(chunks) == (GRANTED, GRANTED)
    assert client.chunks.put(chunks) == (PRESENT, PRESENT)
    missing = PoolKey(namespace.fingerprint, 0, block_hash("c"), 0)
    found = client.chunks.get([chunks[1].key, missing, chunks[0].key])
    assert found == [dataclasses.replace(chunks[1], parent_hash=b""), None, chunks[0]]
    assert client.admin.stats().num_tickets <= tickets_before, "an inline put left a ticket"
    first, second = (_chunk(namespace, "a", shard=shard, group_idx=1) for shard in (0, 1))
    client.chunks.put([first])
    assert client.chunks.get([first.key]) == [None], "a block is found when its last shard is there"
    client.chunks.put([second])
    assert client.chunks.get([first.key, second.key]) == [first, second]

    nbytes = 1 << 20
    large = client.open_namespace(namespace_spec(group_spec(chunk_bytes=nbytes)))
    chunks = [_chunk(large, name, payload=payload(name, nbytes).tobytes()) for name in range(9)]
    assert client.chunks.put(chunks) == (GRANTED,) * 9, "several messages"
    assert client.chunks.get([chunk.key for chunk in chunks]) == chunks
    client.admin.clear(large.fingerprint)


@ONE_TRANSPORT
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


BAD_PARTS: list[tuple[dict[str, Any], type[KVPoolError], str]] = [
    ({"payload": bytes(CHUNK - 1)}, InvalidRequestError, f"has {CHUNK - 1} bytes; group 0's chunks have {CHUNK}"),
    ({"payload": b""}, InvalidRequestError, f"has 0 bytes; group 0's chunks have {CHUNK}"),
    ({"checksum": 7}, ChecksumError, "the payload's xxh3-64 is not 0x7"),
    ({"parent_hash": b"short"}, InvalidRequestError, "parent_hash has 5 bytes, not 32"),
]
BAD_KEYS: list[tuple[dict[str, Any], type[KVPoolError], str]] = [
    ({"block_hash": b"short"}, InvalidRequestError, "block_hash has 5 bytes, not 32"),
    ({"namespace": b"short"}, InvalidRequestError, "namespace has 5 bytes, not 32"),
    ({"namespace": bytes(32)}, UnknownNamespaceError, "open it first"),
    ({"group_idx": 5}, InvalidRequestError, "group_idx 5: the namespace has groups 0 to 1"),
    ({"shard": 1}, InvalidRequestError, r"shards \[1, 2\) are not within the group's 1 shards"),
]


@ONE_TRANSPORT
def test_bad_inline_chunks_and_keys_are_refused_and_not_stored(client: Client, namespace: Namespace) -> None:
    chunk = _chunk(namespace, "a")
    for change, error, says in BAD_PARTS:
        with pytest.raises(error, match=says):
            client.chunks.put([_chunk(namespace, "a", **change)])
    assert _leading(client, namespace, run_of("a")) == 0
    assert client.chunks.put([chunk]) == (GRANTED,), "a ticket was left"
    for change, error, says in BAD_KEYS:
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
    client.lookup(first, [run_of("a", "b")], lease=False)
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
    used = client.admin.namespaces()[0]
    assert (used.num_entries, used.lookup_blocks, used.lookup_hits) == (1, 2, 1)
    assert used.age_seconds >= used.idle_seconds > 0 and not used.superseded and not used.tiers
    client.open_namespace(dataclasses.replace(first.spec, weights_epoch="newer"))
    assert client.admin.namespaces()[0].superseded
    client.lookup(first, [run_of("a")])
    assert not client.admin.namespaces()[0].superseded


def test_quotas_are_given_at_the_start_and_set_listed_and_kept(pool_server: StartServer, connect: Connect) -> None:
    bound, full = (Quota("tenant:bounded", 4 * CHUNK), ("tenant:bounded", 4 * CHUNK, 4 * CHUNK))
    client = connect(pool_server("--memory", "1MiB", "--quota", "tenant:a=64KiB", "--quota", "tenant:z=1000B"))
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="bounded"))
    _store(client, namespace, *range(8))

    def told(quotas: Iterable[pb.Quota]) -> list[tuple[str, int, int]]:
        return [(quota.subject, quota.limit_bytes, quota.used_bytes) for quota in quotas]

    given = [("tenant:a", 64 << 10, 0), ("tenant:z", 1_000, 0)]
    assert told(client.admin.quotas()) == given
    assert told(client.admin.set_quotas([bound])) == [given[0], full, given[1]]
    with pytest.raises(OutOfSpaceError, match=r"quota tenant:bounded = 2048 bytes: 5 blocks .* are more"):
        client.put_blocks(namespace, run_of(*"abcde"), [payload(name, CHUNK) for name in "abcde"])
    _store(client, namespace, "a", "b")
    assert told(client.admin.stats().quotas) == [full, *given], "the fullest come first"
    assert told(client.admin.set_quotas([Quota("tenant:a", 0), Quota("tenant:z", 0)])) == [full]
    with pytest.raises(InvalidRequestError, match="quota subject 'bounded' is neither"):
        client.admin.set_quotas([Quota("tenant:bounded", 0), Quota("bounded", 1)])
    assert told(client.admin.quotas()) == [full]
    assert client.admin.set_quotas([Quota("tenant:bounded", 0)]) == []


# Exists


def test_exists_tells_what_an_engine_would_find_and_have_waited_and_leaves_no_trace(
    pool_server: StartServer, connect: Connect
) -> None:
    block_bytes = 128 << 10
    client = connect(pool_server("--memory", "1MiB", "--policy", "lru"))
    groups = (
        group_spec(chunk_bytes=block_bytes),
        group_spec(chunk_bytes=block_bytes, kind="sliding_window", window_tokens=18),
    )
    namespace = client.open_namespace(namespace_spec(*groups))
    name, runs = namespace.fingerprint, [run_of(*"abcd"), run_of(*"abcd", group_idx=1)]
    for names in ("p", "q", "abcd"):
        _store(client, namespace, *names, chunk_bytes=block_bytes)
    assert client.exists(name, runs).usable_tokens == 0, "each group is needed"
    for each in "bc":
        client.put_blocks(namespace, run_of(each, group_idx=1), [payload(each, block_bytes)])
    report = ReportRequest(
        reporter=b"r" * REPORTER_BYTES, sequence=1, engine="host:1", namespaces=(name,), loaded_tokens=1_600,
        load_seconds=0.5,
    )  # fmt: skip
    assert client.rpc.report(report, 5_000)

    def counts() -> tuple[int, ...]:
        (info,) = client.admin.namespaces()
        stats = client.admin.stats()
        return info.lookup_blocks, info.lookup_hits, stats.counters["lookups"], stats.counters["lookup_blocks"]

    before = counts()
    found = client.exists(name, runs)
    assert (found.usable_tokens, found.load_seconds) == (48, pytest.approx(0.015))
    assert [(hit.num_leading, hit.complete) for hit in found.hits] == [(4, 0b1111), (0, 0b0110)]
    with pytest.raises(InvalidRequestError, match="a run has a parent_hash; give the blocks of a prompt from"):
        client.exists(name, [run_of("b", parent="a")])
    with pytest.raises(UnknownNamespaceError):
        client.exists(block_hash("never opened"), [run_of("a")])
    for _ in range(10):
        client.exists(name, [run_of("p")])
    assert counts() == before
    _store(client, namespace, "e", chunk_bytes=block_bytes)
    assert _leading(client, namespace, run_of("p")) == 0, "the eviction policy takes a question for a use"
    assert _leading(client, namespace, run_of("q")) == 1 and counts() != before


ONE_BLOCK = pb.RunHits(num_leading=1, complete=b"\x01")


@pytest.mark.parametrize(
    "reply",
    [
        pb.ExistsResponse(),
        pb.ExistsResponse(hits=[pb.RunHits(num_leading=3)]),
        pb.ExistsResponse(hits=[pb.RunHits()], usable_tokens=16),
        *(pb.ExistsResponse(hits=[ONE_BLOCK], load_seconds=seconds) for seconds in (-1, float("nan"))),
    ],
)
def test_answers_that_no_question_has_are_refused(reply: pb.ExistsResponse) -> None:
    with pytest.raises(InvalidReplyError):
        existence(reply, [BlockRun(0, [block_hash("a"), block_hash("b")])])


# Loads whose lookup says where the blocks lie: no other call before the bytes, and never bytes of another block


SHARDS = 4
NAMES = ("a", "b", "c", "d", "e")
SHARDED = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=SHARDS), group_spec(chunk_bytes=CHUNK))


def _whole(name: str) -> bytes:
    return bytes(payload(name, SHARDS * CHUNK))


@pytest.fixture(params=["shm", "tcp", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Leasing:
    """A server with blocks in it, and a client over one transport."""

    def __init__(self, server: ServerProcess, connect: Connect, transport: str, **config: int):
        self.client = connect(server, transport=transport, **config)
        self.namespace = self.client.open_namespace(SHARDED)
        blocks = [payload(name, SHARDS * CHUNK) for name in NAMES]
        assert self.client.put_blocks(self.namespace, run_of(*NAMES), blocks).receipt.num_complete == len(NAMES)
        self._before = dict(self.client.admin.stats().counters)

    def lookup(self, *names: str, prefix_only: bool = True) -> Lookup:
        return self.client.lookup(self.namespace, [run_of(*names)], prefix_only=prefix_only, locate=True)

    def read(
        self,
        lease_id: int,
        leased: LeasedSlots | None,
        *names: str,
        shards: ShardRange | None = None,
        namespace: Namespace | None = None,
    ) -> list[bytes]:
        """The blocks' bytes, as far as `get` vouches for them; by default of the rig's namespace."""
        blocks = [b""] * len(names)

        def drain(indices: Sequence[int], buffers: Buffers) -> None:
            for idx, buffer in zip(indices, buffers, strict=True):
                blocks[idx] = bytes(buffer)

        located = self.client.get(
            namespace or self.namespace, lease_id, [run_of(*names)], drain, shards=shards, leased=leased
        )
        assert all(located.present)
        return blocks

    def counted(self, name: str) -> int:
        """How much a counter has grown."""
        return self.client.admin.stats().counters[name] - self._before.get(name, 0)


@pytest.fixture
def rig(shared_server: ServerProcess, connect: Connect, transport: str) -> Leasing:
    return Leasing(shared_server, connect, transport)


def test_a_load_asks_once_and_reads_what_was_stored(rig: Leasing) -> None:
    found = rig.lookup("a", "b", "gone", "c", "d", "e", prefix_only=False)
    assert rig.read(found.lease_id, found.leased(0, 4, 6), "d", "e") == [_whole("d"), _whole("e")]
    assert found.leased(0, 1, 4) is None, "the answer does not say where a missing block lies"
    for shards in (ShardRange(0, 1), ShardRange(1, 2), ShardRange(3, 1)):
        mine = slice(shards.start * CHUNK, (shards.start + shards.count) * CHUNK)
        assert rig.read(found.lease_id, found.leased(0, 0, 2), "a", "b", shards=shards) == [
            _whole("a")[mine],
            _whole("b")[mine],
        ]
    assert rig.counted("get_blocks") == 0
    assert rig.counted("located_blocks") == len(NAMES)


def test_slots_of_other_blocks_than_those_to_read_are_refused(rig: Leasing) -> None:
    """A rank may have other weights than those that the scheduler looked up with."""
    other = rig.client.open_namespace(namespace_spec(*SHARDED.groups, salt="another"))
    found = rig.lookup(*NAMES)
    with pytest.raises(InvalidRequestError, match="the leased slots are of namespace"):
        rig.read(found.lease_id, found.leased(0, 0, len(NAMES)), *NAMES, namespace=other)
    restarted = dataclasses.replace(rig.namespace, boot_token=rig.namespace.boot_token ^ 1)
    with pytest.raises(LeaseExpiredError, match="another boot"):
        rig.read(found.lease_id, found.leased(0, 0, len(NAMES)), *NAMES, namespace=restarted)
    with pytest.raises(InvalidRequestError, match="2 leased slots for 3 blocks; give one a block"):
        rig.read(found.lease_id, found.leased(0, 0, 2), "a", "b", "c")
    run = run_of(*NAMES)
    assert rig.client.lookup(rig.namespace, [run]).leased(0, 0, 1) is None, "nobody asked where the blocks lie"
    assert rig.client.lookup(rig.namespace, [run], lease=False, locate=True).leased(0, 0, 1) is None


def test_a_lease_that_expired_yields_nothing(shared_server: ServerProcess, connect: Connect, transport: str) -> None:
    """A late answer counts from when it was asked; over TCP the server's own clock ends the permit as well."""
    rig = Leasing(shared_server, connect, transport, lease_ttl_ms=100)
    pending = rig.client.rpc.lookup_async(rig.namespace, [run_of(*NAMES)], locate=True)
    asked_by = time.monotonic()
    time.sleep(0.11)
    found = pending.result(10)
    assert found is not None and found.ends_at <= asked_by + found.lease_ttl_ms / 1000
    leased = found.leased(0, 0, len(NAMES))
    assert leased is not None
    with pytest.raises(LeaseExpiredError):
        rig.read(found.lease_id, leased, *NAMES)
    if transport == "tcp":
        with pytest.raises(KVPoolError, match="expired"):
            rig.read(found.lease_id, dataclasses.replace(leased, ends_at=time.monotonic() + 60), *NAMES)
