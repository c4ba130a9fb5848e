"""Random interleavings of a pool's calls with transfers of old and new permits, and proof that the check sees holes.

A transfer is what a data worker's connection does: announce, look whether the ticket or lease is live, move some bytes,
look again, ..., leave. Every one of these steps may come between any two calls of the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.protocol.errors import LeaseExpiredError, OutOfSpaceError
from kvpool.protocol.types import ShardRange
from kvpool.transport.data_port import Header, Kind, Signer, Terms, pack_offsets
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Entry
from kvpool_server.data_plane.permits import PermitTable, TransferWord
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.values import group_spec, namespace_spec, run_of

KEY = b"k" * 32
CHUNK_BYTES, NUM_SHARDS, NUM_SLOTS, NUM_WORDS = 8, 2, 3, 3
SLOT_BYTES = CHUNK_BYTES * NUM_SHARDS
NAMES = range(4)
LIMITS = Limits(max_ttl_ms=1_000, grace_ms=0, max_leases=4, max_tickets=4)
SHARDS = (ShardRange(0, 1), ShardRange(1, 1), ShardRange(0, 2))

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
words = st.sampled_from(range(NUM_WORDS))


@dataclass(eq=False)
class Held:
    """A ticket or lease, and the permit that somebody keeps.

    Args:
        entries: that it covered, one for each of `offsets`.
        shards: of a ticket.
    """

    kind: Kind
    id: int
    offsets: tuple[int, ...]
    entries: list[Entry]
    terms: Terms
    shards: ShardRange


@dataclass(eq=False)
class Transfer:
    """Under way on one connection. `is_checked`: whether it looked at the table since it last moved bytes."""

    held: Held
    is_checked: bool = False


class World:
    """A pool, its permit table, and the connections of one worker.

    Args:
        table: `PermitTable`, or a broken one that the checks must catch.
    """

    def __init__(self, table: type[PermitTable] = PermitTable):
        self.clock = FakeClock()
        self.permits = table(KEY, LIMITS.max_leases + LIMITS.max_tickets, 1, NUM_WORDS)
        ids = itertools.count(1)
        arena = Arena(NUM_SLOTS * SLOT_BYTES, SLOT_BYTES)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), LIMITS, transfers=self.permits)
        self.spec = namespace_spec(group_spec(chunk_bytes=CHUNK_BYTES, num_shards=NUM_SHARDS), salt="permits")
        self.pool.open_namespace(self.spec)
        self.held: list[Held] = []
        self.transfers: dict[int, Transfer] = {}
        self._words = [
            TransferWord(self.permits.entries, self.permits.words_of(0)[nth : nth + 1]) for nth in range(NUM_WORDS)
        ]

    def close(self) -> None:
        self.permits.close()

    # The server

    def put_start(self, names: list[int], shards: ShardRange, ttl_ms: int) -> None:
        try:
            grant = self.pool.put_start(self.spec.fingerprint(), [run_of(*names)], shards, ttl_ms)
        except OutOfSpaceError:
            return
        ticket = self.pool.tickets.get(grant.ticket_id)
        if ticket is not None:
            self._keep(Kind.WRITE, ticket.id, grant.offsets, list(ticket.entries), shards)

    def put_end(self, held: Held) -> None:
        try:
            self.pool.put_end(held.id, [0] * (len(held.offsets) * held.shards.count))
        except LeaseExpiredError:
            pass

    def lookup(self, names: list[int], ttl_ms: int) -> None:
        fingerprint, run = self.spec.fingerprint(), run_of(*names)
        found = self.pool.lookup(fingerprint, [run], prefix_only=False, lease_ttl_ms=ttl_ms)
        if found.lease_id:
            lease = self.pool.leases.live(found.lease_id)
            located = self.pool.get(lease.id, fingerprint, [run], ShardRange(0, NUM_SHARDS))
            self._keep(Kind.READ, lease.id, located.offsets, list(lease.entries), ShardRange(0, NUM_SHARDS))

    def _keep(
        self, kind: Kind, hold_id: int, offsets: tuple[int, ...], entries: list[Entry], shards: ShardRange
    ) -> None:
        packed, deadline_ns = pack_offsets(offsets), 1 << 62  # The pool alone ends them, late as it may be.
        permit = self.permits.permit(kind, hold_id, deadline_ns, 1, packed)
        terms = Signer(KEY).terms(Header(kind, 0, len(offsets), 1, 0, hold_id, permit), packed)
        assert terms is not None
        self.held.append(Held(kind, hold_id, offsets, entries, terms, shards))

    # The worker

    def begin(self, word: int, held: Held) -> None:
        self._words[word].begin(held.id)
        self.transfers[word] = Transfer(held)

    def look(self, word: int) -> None:
        transfer = self.transfers[word]
        transfer.is_checked = self._words[word].is_live(transfer.held.id, transfer.held.terms)
        if not transfer.is_checked:
            self.leave(word)

    def move(self, word: int) -> None:
        """Moves bytes, if the last look allowed it; whatever has happened since, the bytes are still their owner's."""
        transfer = self.transfers[word]
        if not transfer.is_checked:
            return
        transfer.is_checked = False
        held = transfer.held
        for offset, entry in zip(held.offsets, held.entries, strict=True):
            assert self.pool.arena.owner(offset) is entry, f"{held} moves bytes of a slot that is another's"
            if held.kind is Kind.WRITE:
                self._check_write(held, entry)
            else:
                assert entry.complete, f"{held} reads what no put_end covered"

    def _check_write(self, held: Held, entry: Entry) -> None:
        assert not entry.present & held.shards.mask, f"{held} changes what a put_end has covered"
        for ticket in self.pool.tickets.values():
            others = ticket.id != held.id and ticket.covers(entry)
            assert not (others and ticket.shards.mask & held.shards.mask), f"{held} writes the shards of {ticket.id}"

    def leave(self, word: int) -> None:
        self._words[word].end()
        del self.transfers[word]

    def check(self) -> None:
        check_integrity(self.pool)

    def check_nothing_leaks(self) -> None:
        """Once all is over, every slot can be had."""
        for word in list(self.transfers):
            self.leave(word)
        self.clock.advance(2.0)
        self.pool.clear()
        assert self.pool.arena.available(SLOT_BYTES) == NUM_SLOTS


class PermitMachine(RuleBasedStateMachine):
    """Any client may do anything at any time, and keeps every permit that it ever got."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(names=names, shards=st.sampled_from(SHARDS), ttl_ms=st.sampled_from([10, 1_000]))
    def put_start(self, names: list[int], shards: ShardRange, ttl_ms: int) -> None:
        self.world.put_start(names, shards, ttl_ms)

    @rule(names=names)
    def put(self, names: list[int]) -> None:
        before = len(self.world.held)
        self.world.put_start(names, ShardRange(0, NUM_SHARDS), 1_000)
        if len(self.world.held) > before:
            self.world.put_end(self.world.held[-1])

    @rule(names=names, ttl_ms=st.sampled_from([10, 1_000]))
    def lookup(self, names: list[int], ttl_ms: int) -> None:
        self.world.lookup(names, ttl_ms)

    @precondition(lambda self: self.world.held)
    @rule(data=st.data(), end=st.sampled_from(["put_end", "put_revoke", "release"]))
    def end(self, data: st.DataObject, end: str) -> None:
        held = data.draw(st.sampled_from(self.world.held[-6:]))
        if held.kind is Kind.READ:
            self.world.pool.release([held.id])
        elif end == "put_end":
            self.world.put_end(held)
        else:
            self.world.pool.put_revoke(held.id)

    @rule(names=names)
    def remove(self, names: list[int]) -> None:
        self.world.pool.remove(self.world.spec.fingerprint(), [run_of(*names)])

    @rule(rarely=st.integers(0, 3))
    def clear(self, rarely: int) -> None:
        if not rarely:
            self.world.pool.clear()

    @rule(seconds=st.sampled_from([0.005, 0.02, 1.0]), tell_pool=st.booleans())
    def advance(self, seconds: float, tell_pool: bool) -> None:
        self.world.clock.advance(seconds)
        if tell_pool:
            self.world.pool.expire()

    @precondition(lambda self: self.world.held)
    @rule(data=st.data(), word=words, looks=st.booleans())
    def begin(self, data: st.DataObject, word: int, looks: bool) -> None:
        if word not in self.world.transfers:
            self.world.begin(word, data.draw(st.sampled_from(self.world.held[-6:])))
            if looks:
                self.world.look(word)

    @precondition(lambda self: self.world.transfers)
    @rule(data=st.data(), step=st.sampled_from(["look", "move", "move", "leave"]))
    def go_on(self, data: st.DataObject, step: str) -> None:
        word = data.draw(st.sampled_from(sorted(self.world.transfers)))
        getattr(self.world, step)(word)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.check_nothing_leaks()
        self.world.close()


TestPermitMachine = PermitMachine.TestCase
TestPermitMachine.settings = settings(max_examples=effort(150), stateful_step_count=40)


class PermitsOutliveTheirHolds(PermitTable):
    """As permits were that only a deadline ended."""

    def end(self, hold_id: int) -> bool:
        return True


class TransfersUnderWayAreForgotten(PermitTable):
    def end(self, hold_id: int) -> bool:
        super().end(hold_id)
        return True


def _store(world: World, *names: int) -> Held:
    world.put_start(list(names), ShardRange(0, NUM_SHARDS), 1_000)
    world.put_end(world.held[-1])
    return world.held[-1]


def _a_bearer_of_an_ended_ticket(world: World) -> None:
    _use(world, _store(world, 0))


def _use(world: World, held: Held) -> None:
    world.begin(0, held)
    world.look(0)
    if world.transfers:
        world.move(0)


def _a_bearer_of_an_ended_lease(world: World) -> None:
    _store(world, 0)
    world.lookup([0], 1_000)
    held = world.held[-1]
    world.pool.release([held.id])
    _store(world, 1, 2, 3)
    _use(world, held)


def _a_slow_reader(world: World) -> None:
    _store(world, 0)
    world.lookup([0], 1_000)
    world.begin(0, world.held[-1])
    world.look(0)
    world.pool.release([world.held[-1].id])
    _store(world, 1)
    world.put_start([2, 3], ShardRange(0, NUM_SHARDS), 1_000)
    world.move(0)


def _a_slow_writer(world: World) -> None:
    world.put_start([0], ShardRange(0, NUM_SHARDS), 1_000)
    world.begin(0, world.held[-1])
    world.look(0)
    world.pool.put_revoke(world.held[-1].id)
    world.put_start([1, 2, 3], ShardRange(0, NUM_SHARDS), 1_000)
    world.move(0)


SCENARIOS: dict[Callable[[World], None], type[PermitTable]] = {
    _a_bearer_of_an_ended_ticket: PermitsOutliveTheirHolds,
    _a_bearer_of_an_ended_lease: PermitsOutliveTheirHolds,
    _a_slow_reader: TransfersUnderWayAreForgotten,
    _a_slow_writer: TransfersUnderWayAreForgotten,
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_permits_pass_every_scenario_and_the_checks_catch_a_broken_table(scenario: Callable[[World], None]) -> None:
    with closing(World()) as world:
        scenario(world)
        world.check()
        world.check_nothing_leaks()
    with (
        closing(World(SCENARIOS[scenario])) as broken,
        pytest.raises(AssertionError, match=r"moves bytes of a slot|changes what a put_end has covered"),
    ):
        scenario(broken)
