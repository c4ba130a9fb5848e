"""A data port beside clients that keep permits of ended tickets and leases, and connections that move no bytes."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from kvpool.protocol import wire
from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import PutReceipt, ShardRange
from kvpool.transport.data_port import Header, Kind, Reply, Status, pack_offsets
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.leases import Found
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS
from kvpool_server.data_plane import worker
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.support.data_client import DataClient
from tests.support.in_process_server import InProcessServer
from tests.support.integrity import check_integrity
from tests.support.processes import wait_for
from tests.support.values import group_spec, namespace_spec, run_of
from tests.support.workers import Port, data_port

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
NUM_SLOTS = 4
"""Of the server's arena."""

FULL_S = 1.0
"""A worker that sends nothing for so long waits for its client; a busy machine does not pause it for as long."""

NUM_SILENT = 40
PROVE_S = 0.5

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
        return _client(self.port)

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


@pytest.mark.parametrize("end", ["put_end", "put_revoke", "release"])
def test_a_permit_ends_with_its_ticket_or_lease(pooled: PooledPort, end: str) -> None:
    pool, arena = pooled.pool, pooled.port.arena
    use = pooled.put_start("mine")
    if end == "release":
        pool.put_end(use.holding_id, [0])
        use = pooled.lookup("mine")
    with pooled.client() as client, pooled.client() as another:
        assert use.try_on(client) is Status.OK
        if end == "put_end":
            assert pool.put_end(use.holding_id, [0]).num_complete == 1
        elif end == "put_revoke":
            assert pool.put_revoke(use.holding_id)
        else:
            assert client.receive(BLOCK_BYTES) == bytes(BLOCK_BYTES)
            assert pool.release([use.holding_id]) == 1
        arena[:] = 2  # The next owner's.
        assert [use.try_on(each) for each in (client, another)] == [Status.EXPIRED] * 2
    assert (arena == 2).all()


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


# Connections that move nothing: `test_admission.py` has the rules by which they make room


@pytest.fixture
def port() -> Iterator[Port]:
    with data_port(MIB) as port:
        yield port


@pytest.fixture
def impatient_port(monkeypatch: pytest.MonkeyPatch, port: Port) -> Port:
    """A port that soon hangs up on a client that has shown no permit."""
    monkeypatch.setattr(worker, "PROVE_S", PROVE_S)
    return port


def _client(port: Port) -> DataClient:
    return DataClient(port.info.port, port.info.nonce)


def _trickle(client: DataClient, sent: bytes) -> None:
    """Sends bytes one by one, slowly, until the worker hangs up."""
    for nth in range(len(sent)):
        client.socket.sendall(sent[nth : nth + 1])
        time.sleep(PROVE_S / 20)
    raise AssertionError("the worker listened to the last byte")


def test_a_client_without_a_permit_is_hung_up_on(impatient_port: Port) -> None:
    with _client(impatient_port) as client:
        assert client.socket.recv(1) == b""


@pytest.mark.parametrize("num_offsets", [1, 30], ids=["in the header", "in the offsets"])
def test_a_permit_that_trickles_is_not_waited_for(impatient_port: Port, num_offsets: int) -> None:
    port = impatient_port
    offsets = list(range(num_offsets))
    permit = port.permit(Kind.READ, 1, offsets, 64)
    header = Header(Kind.READ, 0, num_offsets, 64, holding_id=1, permit=permit).encode()
    with _client(port) as client:
        if num_offsets > 1:
            client.socket.sendall(header)
            header = b""
        with pytest.raises(ConnectionError):
            _trickle(client, header + pack_offsets(offsets).tobytes())


def test_silent_connections_keep_nobody_from_the_data_port() -> None:
    with data_port(MIB, max_connections=4) as port, ExitStack() as stack, _client(port) as proven:
        proven.show(Kind.READ, 1, [0], 64, port.permit(Kind.READ, 1, [0], 64))
        for _ in range(NUM_SILENT):
            stack.enter_context(socket.create_connection(("127.0.0.1", port.info.port), timeout=10))
        assert _is_served(port)
        proven.move(0, 1, 64)
        assert proven.reply() is Status.OK


def test_a_client_with_a_permit_may_pause(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PROVE_S", 4 * PROVE_S)  # A busy machine may pause before the permit is shown.
    with _client(port) as client:
        client.show(Kind.READ, 1, [0], 64, port.permit(Kind.READ, 1, [0], 64))
        time.sleep(5 * PROVE_S)
        client.move(0, 1, 64)
        assert client.reply() is Status.OK


@pytest.mark.parametrize("stalls", ["before the offsets", "in a write", "in a read"])
def test_a_client_that_stalls_makes_room_for_another(stalls: str) -> None:
    nbytes = 64 * MIB  # More than the sockets' buffers hold.
    kind = Kind.READ if stalls == "in a read" else Kind.WRITE
    with data_port(nbytes, max_connections=1) as port, _client(port) as stalled:
        stalled.show(kind, 1, [0], nbytes, port.permit(kind, 1, [0], nbytes))
        if stalls == "before the offsets":
            permit = port.permit(kind, 2, [0], nbytes)
            stalled.socket.sendall(Header(kind, 0, 1, nbytes, holding_id=2, permit=permit).encode())
        else:
            stalled.move(0, 1, nbytes)
        ends_at = time.monotonic() + worker.STALL_S / 2
        while not _is_served(port):
            assert time.monotonic() < ends_at
            time.sleep(0.1)


def _is_served(port: Port) -> bool:
    """Whether a new client gets bytes."""
    try:
        with _client(port) as client:
            client.show(Kind.READ, 3, [0], 64, port.permit(Kind.READ, 3, [0], 64))
            client.move(0, 1, 64)
            return client.reply() is Status.OK
    except ConnectionRefusedError:
        return False
