"""Random histories of a pool whose server dies after each write of its table, and in each; a new pool adopts the rest.

What a table has after a death is what the writes before it have left, and some bytes of the one under way. The pool
goes on as if nothing had happened, so that each history has as many deaths as it has writes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import NONCE_BYTES, TOKEN_BYTES, BlockRun, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.cache.pool import Pool
from kvpool_server.keeping import adoption, records, table
from kvpool_server.keeping.adoption import TableFollower
from kvpool_server.keeping.table import Geometry, SlotTable
from testbed.pool_at_once import PoolAtOnce
from tests.simulation.test_pool_machine import ONE, OTHERS, PLAIN, SHARDED, PoolMachine
from tests.simulation.world import EXTENT_BYTES, GRACE_S, LIMITS, NUM_EXTENTS, SPECS, World
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.values import block_hash

Name = tuple[bytes, int, bytes]
"""Of a block: its namespace, its group and its hash."""
Place = tuple[int, tuple[int, ...]]
"""Where it lies, and the checksums of its shards."""


class Logged(SlotTable):
    """A table whose writes can be undone: `log` has where each was, and the bytes before and after it."""

    def __init__(self, *args: Any):
        self.log: list[tuple[int, bytes, bytes]] = []
        super().__init__(*args)

    def _put(self, at: int, data: bytes) -> None:
        self.log.append((at, bytes(self._view[at : at + len(data)]), bytes(data)))
        super()._put(at, data)

    def _erase(self, at: int, nbytes: int) -> None:
        self._put(at, bytes(nbytes))

    def write(self, at: int, data: bytes) -> None:
        """Without a trace."""
        self._view[at : at + len(data)] = data


class Deaths:
    """The deaths of the server of a world. `check` them after each step."""

    def __init__(self, world: World, follow: Callable[[Pool, SlotTable], object] = TableFollower):
        self.world = world
        geometry = Geometry(
            EXTENT_BYTES * NUM_EXTENTS, EXTENT_BYTES, world.has_tenants, bytes(NONCE_BYTES), bytes(TOKEN_BYTES)
        )
        self.table = Logged.create(geometry)
        assert isinstance(self.table, Logged)
        follow(world.pool, self.table)
        self.table.log.clear()
        self._remember()

    def _remember(self) -> None:
        self._before, self._memory = _complete(self.world.pool), self.world.memory.copy()
        self._quotas = [_quotas(self.world.pool)]
        self._tickets = [*self.world.tickets, *self.world.late]

    def check(self) -> None:
        """The server dies at each write since the last call, and in the midst of it; and now."""
        writes, after = list(self.table.log), _complete(self.world.pool)
        self._quotas.append(_quotas(self.world.pool))
        for at, old, _ in reversed(writes):
            self.table.write(at, old)
        for at, old, new in writes:
            self._die(self._before, after)
            for nbytes in sorted({1, 7, 8, 9, len(new) // 2, len(new) - 1} & set(range(1, len(new)))):
                self.table.write(at, new[:nbytes])
                self._die(self._before, after)
                self.table.write(at, old)
            self.table.write(at, new)
        self._tickets += self.world.tickets  # Those of the last step have been granted now.
        self._memory = self.world.memory
        self._die(after, after)
        self.table.log.clear()
        self._remember()

    def _die(self, before: dict[Name, Place], after: dict[Name, Place]) -> None:
        """A new pool adopts what is there: what was complete before and after a step, and nothing that never was."""
        left = Logged.reopen(os.dup(self.table.fd))
        assert isinstance(left, Logged)
        try:
            pool = self._adopt(left)
            assert _quotas(pool) in self._quotas, "a death has changed the quotas"
            found = _complete(pool)
            for name, place in found.items():
                assert place in (before.get(name), after.get(name)), f"{name} was never complete at {place}"
                self._check_bytes(pool, name, self._memory if before.get(name) == place else self.world.memory)
            both = {name: place for name, place in before.items() if after.get(name) == place}
            assert both.items() <= found.items(), "a block that was complete is not there"
            check_integrity(pool)
            self._check_writers(pool.arena)
            again = self._adopt(left)
            assert _complete(again) == found, "the next death loses blocks, or brings some back"
            self._use(again)
        finally:
            for at, old, _ in reversed(left.log):
                left.write(at, old)
            left.close()

    def _adopt(self, left: SlotTable) -> PoolAtOnce:
        zero = (lambda start, nbytes: None) if self.world.has_tenants else None
        arena = Arena(EXTENT_BYTES * NUM_EXTENTS, EXTENT_BYTES, zero=zero)
        ids = itertools.count(1)
        pool = PoolAtOnce(arena, FakeClock(self.world.clock()), lambda: next(ids), LIMITS, POLICIES["lru"])
        adoption.restore(pool, left)
        return pool

    def _use(self, pool: PoolAtOnce) -> None:
        """An adopted pool stores what any other of its size does, at once or when nobody can be late any more."""
        for seconds in (0.0, (LIMITS.max_ttl_ms + LIMITS.grace_ms) / 1000):
            assert isinstance(pool.clock, FakeClock)
            pool.clock.advance(seconds)
            while pool.settle() or pool.rebalance():
                pass
            for space, spec in enumerate(SPECS):
                namespace, _ = pool.open_namespace(spec)
                for idx, group in enumerate(spec.groups):
                    run = BlockRun(idx, [block_hash(f"{space} {idx} {seconds}")])
                    try:
                        grant = pool.put_start(namespace.fingerprint, [run], ShardRange(0, group.num_shards))
                        pool.put_end(grant.ticket_id, [0] * group.num_shards)
                    except OutOfSpaceError:
                        assert not seconds or self.world.quotas, "there is no room in a pool that nobody uses"
            check_integrity(pool)

    @staticmethod
    def _check_bytes(pool: Pool, name: Name, memory: np.ndarray[Any, Any]) -> None:
        namespace = pool.namespace(name[0])
        assert namespace is not None
        entry = namespace.groups[name[1]].index.get(name[2])
        assert entry is not None
        size = entry.group.spec.chunk_bytes
        for nth, told in enumerate(entry.checksums):
            assert checksum(memory[entry.offset + nth * size :][:size]) == told, f"{name} has other bytes"

    def _check_writers(self, arena: Arena) -> None:
        """Nobody gets a slot to which a client of the dead server may still write."""
        if self.world.has_tenants:
            return  # No client has the memory.
        held = [*self.world.tickets, *self.world.late]
        for ticket in [each for each in self._tickets if any(each is other for other in held)]:
            if ticket.deadline + GRACE_S > self.world.clock():
                for _, slot in ticket.blocks:
                    assert arena.owner(slot) is not None, f"slot {slot} is given out under a ticket"


def _complete(pool: Pool) -> dict[Name, Place]:
    entries = [entry for namespace in pool.open_namespaces() for entry in namespace.entries()]
    return {
        (entry.group.fingerprint, entry.group.idx, entry.block_hash): (entry.offset, tuple(entry.checksums))
        for entry in entries
        if entry.complete
    }


def _quotas(pool: Pool) -> dict[str, int]:
    return {quota.subject: quota.limit_bytes for quota in pool.quotas()}


@pytest.fixture(autouse=True, scope="module")
def _few_namespaces() -> Iterator[None]:
    """To look at a thousand places takes a millisecond a death."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (table, adoption):
            patch.setattr(module, "NAMESPACES", 4)
        yield


class AdoptionMachine(PoolMachine):
    @initialize(policy=st.sampled_from(sorted(POLICIES)), has_tenants=st.booleans())
    def start(self, policy: str, has_tenants: bool) -> None:
        self.world = World(policy=policy, has_tenants=has_tenants)
        self.deaths = Deaths(self.world)

    @invariant()
    def holds(self) -> None:
        super().holds()
        self.deaths.check()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "deaths"):
            self.deaths.table.close()


TestAdoptionMachine = AdoptionMachine.TestCase
TestAdoptionMachine.settings = settings(max_examples=effort(60), stateful_step_count=30)


# What the deaths have to find


class ClearsLate(TableFollower):
    """Removes a record with the next change."""

    _late: Entry | None = None

    def stored(self, entries: Sequence[Entry]) -> None:
        self._clear_late()
        super().stored(entries)

    def removed(self, entry: Entry) -> None:
        self._clear_late()
        self._late = entry

    def _clear_late(self) -> None:
        if self._late is not None:
            super().removed(self._late)


class ClearsNever(TableFollower):
    def removed(self, entry: Entry) -> None:
        """Nothing."""


class RecordsTooSoon(TableFollower):
    """Has a block readable that some shard lacks."""

    def __init__(self, pool: Pool, into: SlotTable):
        super().__init__(pool, into)
        commit = pool.entry_table.commit

        def committed(entries: Sequence[Entry], *args: Any) -> tuple[int, int]:
            done = commit(entries, *args)
            if done[0] > done[1]:
                self.stored(entries)
            return done

        pool.entry_table.commit = committed  # type: ignore[method-assign]


class ForgetsTickets(TableFollower):
    def __init__(self, pool: Pool, into: SlotTable):
        super().__init__(pool, into)
        pool.on_ticket = lambda ticket: None


class ForgetsExtents(TableFollower):
    def __init__(self, pool: Pool, into: SlotTable):
        super().__init__(pool, into)
        pool.arena.on_extent = lambda idx, slot_bytes: None


def _history(world: World) -> Iterator[None]:
    """Puts, one of them under way, a removal, evictions, an extent that changes its class; yields after each step."""
    for names, group in (((0, 1), PLAIN), ((2, 3), PLAIN), ((0, 1, 2), SHARDED)):
        shards = ShardRange(0, 2) if group is SHARDED else ONE
        world.put_start(group, names, shards)
        yield
        world.put_end(world.tickets[-1])
        yield
    world.put_start(SHARDED, [5], ONE)
    world.put_end(world.tickets[-1])
    yield
    world.remove(PLAIN, [1, 2])
    yield
    world.remove(PLAIN, [0, 3])
    yield
    world.put_start(OTHERS, [7], ShardRange(0, 2), ttl_ms=900)
    yield


def _play(follow: Callable[[Pool, SlotTable], object]) -> None:
    world = World(PoolAtOnce)
    deaths = Deaths(world, follow)
    try:
        for _ in _history(world):
            deaths.check()
    finally:
        deaths.table.close()


def test_each_death_of_a_history_loses_nothing_and_brings_nothing_back() -> None:
    _play(TableFollower)


@pytest.mark.parametrize("broken", [ClearsLate, ClearsNever, RecordsTooSoon, ForgetsTickets, ForgetsExtents])
def test_a_table_that_is_written_in_another_order_is_caught(broken: type[TableFollower]) -> None:
    with pytest.raises(AssertionError):
        _play(broken)


def test_records_without_checksums_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "check_of", lambda at, content: 1)
    monkeypatch.setattr(records, "_checks", lambda words, secret: np.ones(len(words), np.uint64))
    with pytest.raises((AssertionError, ValueError, UnicodeDecodeError)):
        _play(TableFollower)
