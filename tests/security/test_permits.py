"""What a client keeps of a permit once its ticket or lease has ended: nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from kvpool.protocol import wire
from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import BlockRun, PutReceipt, ShardRange
from kvpool.transport.data_port import Kind, Reply, Status
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.leases import Found
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS
from kvpool_server.data_plane import worker
from kvpool_server.data_plane.permits import PermitTable
from testbed.pool_at_once import PoolAtOnce
from tests.conftest import Connect, StartServer
from tests.support.data_client import DataClient
from tests.support.in_process_server import InProcessServer
from tests.support.integrity import check_integrity
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of
from tests.support.workers import Port, data_port

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
NUM_SLOTS = 4
"""Of the server's arena."""

FULL_S = 1.0
"""A worker that sends nothing for so long waits for its client; a busy machine does not pause it for as long."""

WHOLE = ShardRange(0, 1)
FORGED = b"\xbb"


@dataclass(frozen=True)
class Use:
    """A permit, as whoever saw it keeps it."""

    kind: Kind
    holding_id: int
    offsets: tuple[int, ...]
    permit: bytes

    def show(self, client: DataClient) -> None:
        client.show(self.kind, self.holding_id, self.offsets, BLOCK_BYTES, self.permit)

    def try_on(self, client: DataClient) -> Status:
        """Reads, or overwrites, all regions; the worker's answer."""
        self.show(client)
        written = FORGED * (BLOCK_BYTES * len(self.offsets)) if self.kind is Kind.WRITE else b""
        with suppress(ConnectionError):  # The worker has hung up after its answer.
            client.move(0, len(self.offsets), BLOCK_BYTES, written)
        return client.reply()


class Tenants:
    """A server whose arena has `NUM_SLOTS` slots, two tenants of it, and raw connections to its data port."""

    def __init__(self, server: ServerProcess, connect: Connect):
        self.server = server
        self.intruder, self.victim = connect(server, transport="tcp"), connect(server, transport="tcp")
        self._theirs = self.intruder.open_namespace(namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant="a"))
        self.victims = self.victim.open_namespace(namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant="b"))
        self._port = self.intruder.rpc.open_namespace(self._theirs.spec).data_port

    def data_client(self) -> DataClient:
        return DataClient(self._port.port, self._port.nonce)

    def put_start(self) -> Use:
        """The intruder's permit to write its own block."""
        grant = self.intruder.rpc.put_start(self._theirs, [run_of("intruder")], WHOLE)
        return Use(Kind.WRITE, grant.ticket_id, tuple(grant.offsets), grant.permit)

    def put(self) -> None:
        self.intruder.put_blocks(self._theirs, run_of("intruder"), [payload("intruder", BLOCK_BYTES)])

    def get(self, *, locate: bool) -> Use:
        """The intruder's permit to read its own block, from a lookup's answer or from a get's."""
        run = run_of("intruder")
        found = self.intruder.lookup(self._theirs, [run], locate=locate)
        if locate:
            (slots,) = found.slots
            offsets = tuple(np.frombuffer(slots.offsets, "<u8").tolist())
            return Use(Kind.READ, found.lease_id, offsets, slots.permit)
        located = next(self.intruder.rpc.locate(self._theirs, found.lease_id, [[run]], WHOLE))
        return Use(Kind.READ, found.lease_id, tuple(located.offsets), located.permit)

    def fill(self) -> None:
        """The victim puts blocks into every slot."""
        self.intruder.admin.clear()
        blocks = [payload(nth, BLOCK_BYTES) for nth in range(NUM_SLOTS)]
        self.victim.put_blocks(self.victims, self._run(), blocks)

    def check(self) -> None:
        """The victim's blocks are as the victim put them."""
        lease_id = self.victim.lookup(self.victims, [self._run()]).lease_id
        blocks = self.victim.get_blocks(self.victims, lease_id, self._run())
        for nth, block in enumerate(blocks):
            assert block is not None and np.array_equal(block, payload(nth, BLOCK_BYTES))

    def can_fill(self) -> bool:
        """Whether the victim gets every slot."""
        try:
            self.fill()
        except OutOfSpaceError:
            return False
        return True

    @staticmethod
    def _run() -> BlockRun:
        return run_of(*range(NUM_SLOTS))


@pytest.fixture
def pool(pool_server: StartServer, connect: Connect) -> Tenants:
    server = pool_server("--memory", f"{NUM_SLOTS * BLOCK_BYTES}", "--grace-ms", "3600000", "--data-workers", "1")
    return Tenants(server, connect)


@pytest.fixture
def client(pool: Tenants) -> Iterator[DataClient]:
    with pool.data_client() as client:
        yield client


@pytest.mark.parametrize("end", ["put_end", "put_revoke"])
def test_a_ticket_that_has_ended_writes_nothing(pool: Tenants, client: DataClient, end: str) -> None:
    use = pool.put_start()
    assert use.try_on(client) is Status.OK
    if end == "put_end":
        assert pool.intruder.rpc.put_end(use.holding_id, [0]).num_complete == 1
    else:
        assert pool.intruder.rpc.put_revoke(use.holding_id)
    pool.fill()
    with pool.data_client() as another:  # It has not shown the permit before.
        assert [use.try_on(each) for each in (client, another)] == [Status.EXPIRED] * 2
    pool.check()


@pytest.mark.parametrize("locate", [False, True], ids=["of a get", "of a lookup"])
def test_a_lease_that_has_ended_reads_nothing(pool: Tenants, client: DataClient, locate: bool) -> None:
    pool.put()
    use = pool.get(locate=locate)
    assert use.try_on(client) is Status.OK
    assert client.receive(BLOCK_BYTES) == payload("intruder", BLOCK_BYTES).tobytes()
    assert pool.intruder.release([use.holding_id]) == 1
    pool.fill()
    with pool.data_client() as another:
        assert [use.try_on(each) for each in (client, another)] == [Status.EXPIRED] * 2


def test_a_lease_that_lives_on_keeps_its_slots_through_a_clear(pool: Tenants, client: DataClient) -> None:
    pool.put()
    use = pool.get(locate=False)
    assert not pool.can_fill(), "a slot under a lease was given to another"
    assert use.try_on(client) is Status.OK
    assert client.receive(BLOCK_BYTES) == payload("intruder", BLOCK_BYTES).tobytes()
    pool.intruder.release([use.holding_id])
    assert pool.can_fill()


class PooledPort:
    """A pool and a data port in this process, where a test sees what the port's worker is doing."""

    def __init__(self, port: Port):
        self.port = port
        ids = itertools.count(1)
        self.pool = PoolAtOnce(
            Arena(NUM_SLOTS * BLOCK_BYTES, BLOCK_BYTES),
            time.monotonic,
            lambda: next(ids),
            Limits(grace_ms=3_600_000),
            transfers=port.permits,
        )
        self._spec = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES))
        self.pool.open_namespace(self._spec)

    def put_start(self, *names: object) -> Use:
        grant = self.pool.put_start(self._spec.fingerprint(), [run_of(*names)], WHOLE, 60_000)
        return self._use(Kind.WRITE, grant.ticket_id, grant.offsets)

    def lookup(self, name: object) -> Use:
        found = self.pool.lookup(self._spec.fingerprint(), [run_of(name)], prefix_only=True, lease_ttl_ms=60_000)
        located = self.pool.get(found.lease_id, self._spec.fingerprint(), [run_of(name)], WHOLE)
        return self._use(Kind.READ, found.lease_id, located.offsets)

    def _use(self, kind: Kind, holding_id: int, offsets: tuple[int, ...]) -> Use:
        return Use(kind, holding_id, offsets, self.port.permit(kind, holding_id, offsets, BLOCK_BYTES))

    def client(self) -> DataClient:
        return DataClient(self.port.info.port, self.port.info.nonce)

    def num_free(self) -> int:
        """Slots that the next put can have, besides those of blocks that it evicts."""
        self.pool.expire()
        check_integrity(self.pool)
        return self.pool.arena.available(BLOCK_BYTES)

    def wait_for_transfer(self, use: Use) -> None:
        wait_for(lambda: use.holding_id in self.port.permits.active(), "the worker to begin")


@pytest.fixture
def pooled() -> Iterator[PooledPort]:
    with data_port(NUM_SLOTS * BLOCK_BYTES) as port:
        yield PooledPort(port)


@pytest.mark.parametrize("end", ["put_end", "put_revoke"])
def test_a_write_under_way_ends_with_its_ticket(pooled: PooledPort, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block never becomes readable, and its slot is nobody's until the worker has left it."""
    monkeypatch.setattr(worker, "LOOK_EVERY_S", 3.0)  # The worker leaves after this test has looked.
    pool = pooled.pool
    use = pooled.put_start("mine")
    with pooled.client() as client:
        use.show(client)
        client.move(0, 1, BLOCK_BYTES, FORGED * MIB)  # The other bytes never come.
        pooled.wait_for_transfer(use)
        if end == "put_end":
            assert pool.put_end(use.holding_id, [0]) == PutReceipt(0, 0)
        else:
            assert pool.put_revoke(use.holding_id)
        with pytest.raises(OutOfSpaceError):
            pooled.put_start(*range(NUM_SLOTS))
        assert pooled.num_free() == NUM_SLOTS - 1
        assert client.reply() is Status.EXPIRED
        wait_for(lambda: pooled.num_free() == NUM_SLOTS, "the worker to leave the slot")
        pooled.put_start(*range(NUM_SLOTS))
        before = pooled.port.arena.copy()
        with suppress(ConnectionError):
            client.socket.sendall(FORGED * MIB)
        assert np.array_equal(pooled.port.arena, before)


def test_a_shard_is_not_granted_again_while_its_last_writer_writes(pooled: PooledPort) -> None:
    """The next writer of the block gets another slot, although the block's first shard lives on in this one."""
    pool, spec = pooled.pool, namespace_spec(group_spec(chunk_bytes=MIB, num_shards=2))
    pool.open_namespace(spec)

    def grant(shard: int) -> Use:
        made = pool.put_start(spec.fingerprint(), [run_of("mine")], ShardRange(shard, 1), 60_000)
        permit = pooled.port.permit(Kind.WRITE, made.ticket_id, made.offsets, MIB)
        return Use(Kind.WRITE, made.ticket_id, made.offsets, permit)

    pool.put_end(grant(0).holding_id, [0])
    second = grant(1)
    with pooled.client() as client:
        client.show(Kind.WRITE, second.holding_id, second.offsets, MIB, second.permit)
        client.move(0, 1, MIB, FORGED)
        pooled.wait_for_transfer(second)
        assert pool.put_revoke(second.holding_id)
        assert grant(1).offsets != second.offsets
        check_integrity(pool)


def test_a_read_under_way_keeps_its_slot_until_it_has_ended(pooled: PooledPort) -> None:
    pool = pooled.pool
    ticket = pooled.put_start("mine")
    (slot,) = ticket.offsets
    pooled.port.arena[slot : slot + BLOCK_BYTES] = 1
    pool.put_end(ticket.holding_id, [0])
    use = pooled.lookup("mine")
    with pooled.client() as client:
        use.show(client)
        for _ in range(20):  # More than the sockets buffer.
            client.move(0, 1, BLOCK_BYTES)
        pooled.wait_for_transfer(use)
        wait_for(lambda: _is_full(pooled, use), "the client's socket to be full")
        assert pool.release([use.holding_id]) == 1
        pool.clear()
        assert pooled.num_free() == NUM_SLOTS - 1
        wait_for(lambda: pooled.num_free() == NUM_SLOTS, "the worker to leave the slot")
        pooled.port.arena[:] = 2
        received = bytearray()
        with suppress(ConnectionError):
            while more := client.socket.recv(MIB):
                received += more
    payloads = bytes(received).replace(Reply(Status.OK, BLOCK_BYTES).encode(), b"")
    assert payloads and set(payloads) == {1}, "bytes of the slot's next owner were sent"


def _is_full(pooled: PooledPort, use: Use) -> bool:
    """Whether the worker has been in the same payload for a while."""
    before = pooled.port.tally.tolist()
    time.sleep(FULL_S)
    return use.holding_id in pooled.port.permits.active() and pooled.port.tally.tolist() == before


def test_nobody_has_a_permit_of_a_hold_that_ended_before_the_answer() -> None:
    """Nothing would end such a permit; and a table of permits that are never ended is full some day."""
    count, chunk = LOOKUP_STEP_BLOCKS + 1, 64
    with ExitStack() as stack:
        permits = stack.enter_context(closing(PermitTable(b"k" * 32, 4, 1, 1)))
        server = InProcessServer(count * chunk, count * chunk, permits=permits)
        stack.callback(server.close)
        pool, spec = server.pool, namespace_spec(group_spec(chunk_bytes=chunk))
        name = server.on_loop(lambda: pool.open_namespace(spec)[0].fingerprint)
        run = run_of(*range(count))
        request = pb.LookupRequest(
            namespace=name, runs=wire.encode_runs([run]), prefix_only=True, lease_ttl_ms=100, locate=True
        )

        def store() -> None:
            pool.put_end(pool.put_start(name, [run], WHOLE).ticket_id, [0] * count)

        server.on_loop(store)
        assert server.stub.Lookup(request, timeout=60).hits[0].permit
        locate = pool.lookups.slots

        def ends_meanwhile(found: Found) -> object:
            """Another call of the loop, between the last step and the answer."""
            located = locate(found)
            server.clock.advance(1.0)
            pool.expire()
            return located

        pool.lookups.slots = ends_meanwhile  # type: ignore[method-assign,assignment]
        for _ in range(8):
            hits = server.stub.Lookup(request, timeout=60).hits[0]
            assert (hits.num_leading, hits.permit) == (count, b"")
