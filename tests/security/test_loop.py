"""No request, expiry or listing holds the server's event loop for more than about 10 ms, however large the pool is.

Each kind of request is sent at its limit to a server with a million entries (ten million with TEST_EFFORT above 1), and
one beyond its limit is refused. Seconds are CPU time of one callback of the loop.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.messages import MESSAGE_BYTES, pieces
from kvpool.protocol.types import BlockRun, Quota, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.explanations import MAX_ALL_RANGES
from kvpool_server.process.runtime import keep_collections_short, no_collections
from kvpool_server.rpc.buffers import MAX_REQUEST_BYTES
from kvpool_server.rpc.operators import MAX_RUNS as MAX_EXPLAINED
from kvpool_server.sharing import Limits
from tests.support.calls import SERVICE
from tests.support.effort import EFFORT
from tests.support.in_process_server import InProcessServer
from tests.support.processes import wait_for
from tests.support.values import group_spec, namespace_spec

PROMISED_S = 0.010
LONGEST_S = 3 * PROMISED_S
"""What is promised holds on a machine with fast memory that has nothing else to do. What others compute beside the test
costs it its share of caches and of a core's units, and `thread_time` counts that."""
CHUNK = 64
SLOTS_PER_EXTENT = 1 << 18
BATCH = 8_192
NUM_ENTRIES = (123 if EFFORT <= 1 else 1_221) * BATCH
CHAIN = 512
"""Blocks of one prefix."""
LIMITS = Limits()
ONE_SHARD = ShardRange(0, 1)


def _hashes(start: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(start, start + count)]


def _runs(start: int, count: int = BATCH, chain: int = CHAIN) -> list[BlockRun]:
    return [BlockRun(0, _hashes(at, min(chain, start + count - at))) for at in range(start, start + count, chain)]


class House:
    """A server that is full, but for some extents, of one namespace's entries."""

    def __init__(self) -> None:
        keep_collections_short()
        extents = -(-NUM_ENTRIES // SLOTS_PER_EXTENT) + 2
        self.server = InProcessServer(extents * SLOTS_PER_EXTENT * CHUNK, SLOTS_PER_EXTENT * CHUNK)
        self.pool, self.stub = self.server.pool, self.server.stub
        self.pool.arena.max_slots = SLOTS_PER_EXTENT  # As in extents that are larger than the memory of a test.
        self.name = self.open(tenant="acme")
        self._num_gone = -1

    def open(self, **fields: object) -> bytes:
        spec = namespace_spec(group_spec(chunk_bytes=CHUNK), group_spec(chunk_bytes=CHUNK // 8, num_shards=8), **fields)
        return self.server.on_loop(lambda: self.pool.open_namespace(spec)[0].fingerprint)

    def fill(self) -> None:
        """Stores what is missing of `NUM_ENTRIES`; the first blocks are those numbered 0, 1, ..."""
        self.server.on_loop(self.end_all_holds)
        if self._num_gone == (num_gone := self.num_gone()):
            return  # No block has left the pool since it was filled.
        self._num_gone = num_gone
        for start in range(0, NUM_ENTRIES, BATCH):
            if self.lookup(_runs(start), ttl_ms=0).hits[-1].num_leading < CHAIN:
                self.server.on_loop(lambda start=start: self.put(_runs(start)))
        self.server.on_loop(gc.collect)

    def num_gone(self) -> int:
        """How many blocks have left the pool so far."""
        return self.pool.counters["put_completed_blocks"] - self.pool.stats().num_entries

    def end_all_holds(self) -> None:
        for tickets in self.pool.tickets.values():
            self.pool.put_revoke(tickets.id)
        self.pool.release([lease.id for lease in self.pool.leases.values()])
        while self.pool.settle():
            pass

    def put(self, runs: list[BlockRun], shards: ShardRange = ONE_SHARD, name: bytes = b"") -> None:
        with no_collections():
            grant = self.pool.put_start(name or self.name, runs, shards)
            self.pool.put_end(grant.ticket_id, [0] * (len(grant.offsets) * shards.count))

    def longest_s(self, call: Callable[[], object]) -> float:
        """The longest callback while a call is answered."""
        self.server.on_loop(self.server.probe.reset)
        call()
        return self.server.on_loop(lambda: self.server.probe.longest_s)

    def expect_short(self, call: Callable[[], object]) -> None:
        seconds = self.longest_s(call)
        assert seconds <= LONGEST_S, f"{seconds * 1000:.1f} ms: {self.server.probe.culprit}"

    def settled(self) -> None:
        """Waits until what has ended holds nothing any more."""
        wait_for(lambda: not self.server.on_loop(self.pool.settle), "the end of all holds", 120)

    def call(self, method: str, runs: Sequence[BlockRun] = (), **fields: Any) -> Any:
        """The reply to a request about blocks of the namespace, of one shard, unless `fields` says otherwise."""
        make = GetMessageClass(SERVICE.methods_by_name[method].input_type)
        shards = {"shards": wire.encode_shards(ONE_SHARD)} if "shards" in make.DESCRIPTOR.fields_by_name else {}
        about = {"namespace": self.name, "runs": wire.encode_runs(runs), **shards} if runs else {}
        return getattr(self.stub, method)(make(**{**about, **fields}), timeout=300)

    def lookup(self, runs: list[BlockRun], ttl_ms: int = 60_000, **fields: Any) -> pb.LookupResponse:
        wanted = {"prefix_only": True, "lease_ttl_ms": ttl_ms, "locate": True, **fields}
        found: pb.LookupResponse = self.call("Lookup", runs, **wanted)
        return found


@pytest.fixture(scope="module")
def filled() -> Iterator[House]:
    house = House()
    yield house
    house.server.close()


@pytest.fixture
def house(filled: House) -> House:
    filled.fill()
    return filled


def _is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and says in caught.value.details()


def test_lookups_of_the_longest_prompt_and_of_many_runs(house: House) -> None:
    reply = pb.LookupResponse()

    def lookup() -> None:
        reply.CopyFrom(house.lookup([BlockRun(0, _hashes(0, LIMITS.max_lookup_blocks))]))

    house.expect_short(lookup)
    assert reply.hits[0].num_leading == LIMITS.max_lookup_blocks and reply.lease_id
    house.expect_short(lambda: house.call("Release", lease_ids=[reply.lease_id]))
    house.settled()
    assert house.pool.stats().num_leases == 0
    most = LIMITS.max_runs
    house.expect_short(lambda: house.lookup(_runs(0, BATCH, BATCH // most)))
    house.expect_short(lambda: _is_refused(lambda: house.lookup(_runs(0, 2 * most, 1)), f"give at most {most}"))


@pytest.mark.parametrize("method", list(SERVICE.methods), ids=lambda method: str(method.name))
def test_messages_full_of_short_fields(house: House, method: MethodDescriptor) -> None:
    """A part is two bytes on the wire, and a hundred once it is decoded; numbers can come one by one."""
    fields = [field for field in method.input_type.fields if field.is_repeated or field.message_type is not None]
    for field, wire_type in itertools.product(fields, (0, 2)):
        part = bytes([field.number << 3 | wire_type, 0])
        for nbytes in (MESSAGE_BYTES - 2, MESSAGE_BYTES, 1 << 20, MAX_REQUEST_BYTES):
            call = house.server.channel.stream_stream(f"/{SERVICE.full_name}/{method.name}")
            request = part * (nbytes // len(part))

            def send(call: Any = call, request: bytes = request) -> None:
                with contextlib.suppress(grpc.RpcError):
                    next(call(pieces(request), timeout=60), None)

            house.expect_short(send)


def test_gets_puts_and_removals_of_a_whole_batch(house: House) -> None:
    lease_id = house.lookup(_runs(0)).lease_id
    house.expect_short(lambda: house.call("Get", _runs(0), lease_id=lease_id))
    shards = ShardRange(0, 8)  # As many chunks as fit.
    runs = [BlockRun(1, _hashes(0, LIMITS.max_batch_chunks // shards.count))]
    house.server.on_loop(lambda: house.put(runs, shards))
    lease_id = house.lookup(runs).lease_id
    house.expect_short(lambda: house.call("Get", runs, lease_id=lease_id, shards=wire.encode_shards(shards)))
    house.call("Release", lease_ids=[lease_id])
    grant = pb.PutStartResponse()
    house.expect_short(lambda: grant.CopyFrom(house.call("PutStart", _runs(NUM_ENTRIES), ticket_ttl_ms=60_000)))
    assert len(grant.offsets) == BATCH
    house.expect_short(lambda: house.call("PutEnd", ticket_id=grant.ticket_id, checksums=[0] * BATCH))
    house.expect_short(lambda: house.call("Verify", _runs(NUM_ENTRIES)))
    revoked = house.call("PutStart", _runs(NUM_ENTRIES + BATCH), ticket_ttl_ms=60_000).ticket_id
    house.expect_short(lambda: house.call("PutRevoke", ticket_id=revoked))
    house.settled()
    house.expect_short(lambda: house.call("Remove", _runs(0)))
    house.server.on_loop(lambda: house.put(_runs(0)))
    too_many = _runs(0, 20_000, 1)
    house.expect_short(lambda: _is_refused(lambda: house.call("Remove", too_many), "more than 9216 fields"))


@pytest.mark.parametrize("num_shards", [4, 64])
def test_located_lookups_of_many_chunks(house: House, num_shards: int) -> None:
    """As many as are located, and more: then `Get` says where the blocks lie."""
    spec = namespace_spec(group_spec(chunk_bytes=1, num_shards=num_shards), salt=str(num_shards))
    name = house.server.on_loop(lambda: house.pool.open_namespace(spec)[0].fingerprint)
    (block,) = _hashes(0, 1)
    house.server.on_loop(lambda: house.put([BlockRun(0, [block])], ShardRange(0, num_shards), name))
    runs, reply = [BlockRun(0, [block] * LIMITS.max_lookup_blocks)], pb.LookupResponse()
    house.expect_short(lambda: reply.CopyFrom(house.lookup(runs, namespace=name)))
    assert reply.hits[0].num_leading == LIMITS.max_lookup_blocks and reply.lease_id
    assert len(reply.hits[0].checksums) == 8 * (LIMITS.max_lookup_blocks * num_shards if num_shards == 4 else 0)
    house.call("Release", lease_ids=[reply.lease_id])
    house.call("Clear", namespace=name)


def test_explaining_many_runs_whose_blocks_alternate_and_hints_of_many_blocks(house: House) -> None:
    there, gone = _hashes(0, 1)[0], _hashes(1 << 40, 1)[0]
    runs = [BlockRun(0, [there, gone] * (LIMITS.max_lookup_blocks // 2 // MAX_EXPLAINED)) for _ in range(MAX_EXPLAINED)]
    reply = pb.ExplainResponse()
    house.expect_short(lambda: reply.CopyFrom(house.call("Explain", runs)))
    assert sum(len(run.ranges) for run in reply.runs) == MAX_ALL_RANGES
    runs = _runs(0, 64 * CHAIN)
    for kind, pin_seconds in ((pb.HINT_KIND_PIN, 60), (pb.HINT_KIND_PIN, 0), (pb.HINT_KIND_EXPIRE, 0)):
        house.expect_short(lambda: house.call("Hint", runs, kind=kind, pin_seconds=pin_seconds))  # noqa: B023


def test_leases_tickets_and_quarantines_that_expire_together(house: House) -> None:
    """Half a million blocks of 512 leases, and the same again of one block that is leased many times."""
    block = [BlockRun(0, _hashes(0, 1) * 4_096)]
    for nth in range(256):
        assert house.lookup(_runs(nth * CHAIN, 4 * CHAIN)).lease_id
        assert house.lookup(block).lease_id
    assert house.pool.stats().num_leases == 512
    house.server.clock.advance(61)
    house.expect_short(house.settled)
    assert house.pool.stats().num_leases == 0
    for nth in range(8):
        house.call("PutStart", _runs(NUM_ENTRIES + nth * BATCH), ticket_ttl_ms=60_000)
    house.server.clock.advance(61)
    house.expect_short(house.settled)
    assert house.pool.stats().num_tickets == 0 and house.pool.stats().num_quarantined == 8 * BATCH
    house.server.clock.advance(31)
    house.expect_short(house.settled)
    assert house.pool.stats().num_quarantined == 0


def test_listing_as_many_namespaces_as_there_may_be(house: House) -> None:
    for nth in range(LIMITS.max_namespaces - len(house.pool.open_namespaces())):
        house.open(salt=f"listed-{nth}")
    try:
        house.expect_short(lambda: house.call("ListNamespaces"))
        house.expect_short(lambda: house.call("Stats"))
    finally:
        house.server.clock.advance(LIMITS.namespace_idle_ms / 1000)  # They may be closed for those of later tests.
    house.expect_short(lambda: house.open(salt="another"))


def test_opening_the_largest_namespace(house: House) -> None:
    names = [f"layer {nth}" for nth in range(4_800)]
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK, layer_names=tuple(names)))
    request = pb.OpenNamespaceRequest(spec=wire.encode_spec(spec))
    assert 0.8 * LIMITS.max_spec_bytes < request.ByteSize() <= LIMITS.max_spec_bytes
    house.expect_short(lambda: house.stub.OpenNamespace(request, timeout=60))
    request.spec.groups[0].layer_names.extend(names * 30)
    house.expect_short(
        lambda: _is_refused(lambda: house.stub.OpenNamespace(request, timeout=60), "the limit is 64 KiB")
    )


def test_a_put_of_another_size_than_all_that_the_pool_holds(house: House) -> None:
    spec = namespace_spec(group_spec(chunk_bytes=4 * CHUNK))
    name = house.server.on_loop(lambda: house.pool.open_namespace(spec)[0].fingerprint)

    def put() -> None:
        for _ in range(20):
            try:
                house.call("PutStart", _runs(0, 2_048), namespace=name)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # Until an extent has been drained.
                    raise

    house.expect_short(put)


# What empties the server comes last: to fill it takes seconds.


def test_quotas_that_move_and_evict_every_entry(house: House) -> None:
    def set_quotas(*quotas: Quota) -> None:
        house.call("SetQuotas", quotas=wire.encode_quotas(quotas))

    others = [Quota(f"tenant:{nth}", 1) for nth in range(LIMITS.max_quotas - 1)]
    house.expect_short(lambda: set_quotas(Quota("tenant:acme", NUM_ENTRIES * CHUNK // 2), *others))
    assert house.pool.stats().num_entries <= NUM_ENTRIES // 2
    house.expect_short(lambda: set_quotas(*(Quota(quota.subject, 0) for quota in house.pool.quotas())))
    too_many = [Quota(f"tenant:{nth}", 1) for nth in range(1_000)]
    house.expect_short(
        lambda: _is_refused(lambda: set_quotas(*too_many), "1000 quotas in one message; give at most 256")
    )


def test_clear_of_everything(house: House) -> None:
    house.expect_short(lambda: house.call("Clear"))
    stats = house.pool.stats()
    assert stats.num_entries == 0 and stats.free_bytes == stats.arena_bytes


def test_what_a_request_may_hold_is_checked_by_the_pool_too(house: House) -> None:
    wide = namespace_spec(group_spec(chunk_bytes=1, num_shards=64))
    name = house.server.on_loop(lambda: house.pool.open_namespace(wide)[0].fingerprint)
    with pytest.raises(InvalidRequestError, match="8192 blocks x 64 shards; give at most 65536 chunks"):
        house.server.on_loop(lambda: house.pool.put_start(name, _runs(0), ShardRange(0, 64)))
