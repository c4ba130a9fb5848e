"""Whatever happens to a pool, its subscribers know what it holds: those that hear all, join late, or miss some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvpool.protocol.types import PutGrant
from kvpool_server.cache.entry import Entry
from kvpool_server.events.ledger import Change, ChangeBatch, Ledger
from kvpool_server.events.messages import BlockHash, BlockStored, Encoder, History, Message
from testbed.pool_at_once import PoolAtOnce
from tests.simulation.test_pool_machine import ONE, PLAIN, SHARDED, PoolMachine, _store
from tests.simulation.world import GROUPS, SPECS, World
from tests.support.effort import effort
from tests.support.events import Known, View, decoded, low_64_bits
from tests.support.values import block_hash

FIRST_SEQ = 1_000
MAX_KEPT = 8
"""No fewer than the batches of a snapshot: a snapshot then stands for more messages than it has."""
BATCH_BLOCKS = 3
MAX_QUEUED_BLOCKS = 6


class ListenedPool(PoolAtOnce):
    """A pool with all of publishing but the sockets."""

    def __init__(self, *pool: Any, ledger: type[Ledger] = Ledger, encoder: type[Encoder] = Encoder):
        super().__init__(*pool)
        self.ledger = ledger(
            lambda flush: None, self.counters, FIRST_SEQ, max_queued_blocks=MAX_QUEUED_BLOCKS, batch_blocks=BATCH_BLOCKS
        )
        self.history = History(self.ledger, encoder(), self.counters, MAX_KEPT)
        self.observe(self.ledger)


class Network:
    """Subscribers of one pool. The publisher publishes when it is told to; the stream may lose what it carries."""

    def __init__(self, world: World):
        assert isinstance(world.pool, ListenedPool)
        self.world = world
        self.pool = world.pool
        self.views: list[View] = []
        self.answers: Counter[str] = Counter()
        self.join()

    def turn(self) -> None:
        """What the end of each turn of the loop does."""
        self.pool.ledger.flush()

    def publish(self, *, losing: bool = False) -> None:
        messages = list(self.pool.history.publish())
        for view in self.views:
            for message in messages if not losing else ():
                self.hear(view, message)

    def hear(self, view: View, message: Message) -> None:
        """What docs/reference/kv-events.md tells a subscriber to do."""
        if message.seq <= view.seq:
            return
        if message.seq > view.seq + 1:
            self.ask(view, view.seq + 1)
            assert view.seq >= message.seq
        else:
            view.apply(decoded(message))

    def ask(self, view: View, start_seq: int) -> None:
        answer = [decoded(message) for message in self.pool.history.answer(start_seq)]
        numbers = [message.seq for message in answer]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if answer and answer[0].events and answer[0].events[0]["type"] == "AllBlocksCleared":
            self.answers["snapshot"] += start_seq > 0
            assert start_seq < FIRST_SEQ or numbers[0] >= start_seq, "a snapshot reuses numbers that were given"
        else:
            self.answers["replay"] += 1
            answer = [message for message in answer if message.seq > view.seq]
        for message in answer:
            assert all(len(event.get("block_hashes", ())) <= BATCH_BLOCKS for event in message.events)
            view.apply(message)

    def join(self) -> None:
        self.views.append(View())
        self.ask(self.views[-1], 0)

    def check(self) -> None:
        """A subscriber that has heard all messages knows just the complete blocks."""
        self.turn()
        self.publish()
        complete = set(self.complete())
        for view in self.views:
            self.ask(view, view.seq + 1)
            assert view.blocks == complete

    def complete(self) -> list[Known]:
        """By what an existence check says."""
        return [
            (f"{self.world.fingerprints[space].hex()}@{SPECS[space].model}", idx, low_64_bits(block_hash(name)))
            for space, idx in GROUPS
            for name in self.world.seen((space, idx))
        ]


class EventsMachine(PoolMachine):
    """`PoolMachine`, overheard. Turns end and messages go out at any time, and not always do they arrive."""

    @initialize()
    def listen(self) -> None:
        self.world = World(ListenedPool)
        self.network = Network(self.world)

    @rule(losing=st.booleans())
    def publish(self, losing: bool) -> None:
        self.network.turn()
        self.network.publish(losing=losing)

    @rule()
    def turn(self) -> None:
        self.network.turn()

    @rule()
    def join(self) -> None:
        if len(self.network.views) < 6:
            self.network.join()

    @rule()
    def compare(self) -> None:
        self.network.check()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "network"):
            self.network.check()
            self.network.join()
            self.network.check()
        self.world.check_nothing_leaks()
        if hasattr(self, "network"):
            self.network.check()
            assert not self.network.views[0].blocks


TestEventsMachine = EventsMachine.TestCase
TestEventsMachine.settings = settings(max_examples=effort(40), stateful_step_count=50)


# The oracle sees what it is there to see.


class Deaf(Ledger):
    def removed(self, entry: Entry) -> None:
        """Nothing."""


class ClaimsBeforePutEnd(ListenedPool):
    def put_start(self, *args: object) -> PutGrant:
        grant = super().put_start(*args)  # type: ignore[arg-type]
        ticket = self.tickets.get(grant.ticket_id)
        for entry in ticket.entries if ticket is not None else ():
            self.ledger.stored([entry])
        return grant


class ForgetsGroups(Encoder):
    def _stored(self, change: Change, name: BlockHash) -> BlockStored:
        event = super()._stored(change, name)
        event.group_idx = event.group_idx or None
        return event


class LosesWithoutAGap(Ledger):
    def _enqueue(self, changes: list[object]) -> None:
        if self._queued_blocks + len(changes) <= self._max_queued_blocks:
            self._append(changes)  # type: ignore[arg-type]


class SnapshotOfYesterday(Ledger):
    def snapshot(self):  # type: ignore[no-untyped-def]
        last_seq = self._next_seq - 1
        return iter([ChangeBatch(last_seq, 0.0, [], cleared=True)])


def _removes_of_the_first_group(world: World, network: Network) -> None:
    _store(world, 0, 1, group=SHARDED)
    _store(world, 0, 1, group=PLAIN)
    network.check()
    world.remove(SHARDED, [0])
    network.check()


def _evicts(world: World, network: Network) -> None:
    _store(world, *range(8))
    network.check()
    _store(world, 8)
    network.check()


def _writes(world: World, network: Network) -> None:
    world.put_start(PLAIN, [0], ONE)
    network.check()


def _overflows(world: World, network: Network) -> None:
    network.check()
    for name in range(8):
        _store(world, name)
        network.turn()
    network.check()
    assert network.pool.counters["dropped_kv_event_batches"] == 2
    assert network.answers["snapshot"] == 1


def _joins_late(world: World, network: Network) -> None:
    _store(world, 0, 1, 2, 3)
    network.check()
    network.join()
    network.check()


def _misses_messages(world: World, network: Network) -> None:
    """A few, which are replayed; then more than are kept, for which a snapshot stands."""
    for count, num_snapshots in ((3, 0), (MAX_KEPT + 1, 1)):
        network.check()
        for name in range(count):
            world.remove(PLAIN, [name])
            _store(world, name)
            network.turn()
            network.publish(losing=True)
        network.check()
        assert network.answers["snapshot"] == num_snapshots and network.answers["replay"] >= 1


SCENARIOS = (_removes_of_the_first_group, _evicts, _writes, _overflows, _joins_late, _misses_messages)
BROKEN: dict[str, tuple[Callable[..., PoolAtOnce], Callable[[World, Network], None]]] = {
    "forgets removals": (partial(ListenedPool, ledger=Deaf), _evicts),
    "claims blocks before put_end": (ClaimsBeforePutEnd, _writes),
    "forgets groups": (partial(ListenedPool, encoder=ForgetsGroups), _removes_of_the_first_group),
    "loses without a gap": (partial(ListenedPool, ledger=LosesWithoutAGap), _overflows),
    "snapshot of yesterday": (partial(ListenedPool, ledger=SnapshotOfYesterday), _joins_late),
}


def _play(pool_class: Callable[..., PoolAtOnce], scenario: Callable[[World, Network], None]) -> None:
    world = World(pool_class)
    scenario(world, Network(world))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_subscribers_pass_every_scenario(scenario: Callable[[World, Network], None]) -> None:
    _play(ListenedPool, scenario)


@pytest.mark.parametrize("broken", BROKEN)
def test_the_oracle_catches_a_broken_publisher(broken: str) -> None:
    with pytest.raises(AssertionError) as caught:
        _play(*BROKEN[broken])
    assert "kvpool_server" not in str(caught.traceback[-1].path)
