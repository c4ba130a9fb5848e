"""A new namespace is never starved by an old one that fills the arena, whatever the policy."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool_server.cache import placement, pool
from kvpool_server.cache.donations import DRAIN_S
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.steps import STEP_BLOCKS
from tests.support.tenants import EXTENT, WHOLE, House, Owner
from tests.support.values import block_hash, group_spec, namespace_spec, run_of

NUM_EXTENTS = 8


@pytest.fixture
def house(policy: type[Policy]) -> House:
    return House(NUM_EXTENTS, policy)


def _full(house: House, size: int) -> tuple[Owner, list[int]]:
    """An old namespace that has all of the arena, and uses all of it."""
    old = house.owner(size)
    names = old.fill_extents(NUM_EXTENTS)
    for start in range(0, len(names), 10):
        old.use(*names[start : start + 10])
    return old, names


def _ratio(old: Owner, new: Owner, num_wanted: int) -> float:
    """Hits of a newcomer that asks for the same blocks again and again, while the old one stores, once it has begun."""
    wanted = [f"wanted {idx}" for idx in range(num_wanted)]
    hits = asked = 0
    for turn in range(60):
        there = new.present(*wanted)
        if turn >= 30:
            hits, asked = hits + len(there), asked + len(wanted)
        if there:
            new.use(*there)
        for name in wanted:
            new.put(name)
        old.store(10)
    return hits / asked


@pytest.mark.parametrize("size", [50, 200, 500])
def test_what_a_newcomer_uses_stays_although_the_old_one_stores_and_is_leased_for_the_greater_part(
    house: House, size: int
) -> None:
    old, names = _full(house, 100)
    assert _ratio(old, house.owner(size), 2 * EXTENT // size) >= 0.9
    old.lease(*names[: 6 * len(names) // 8])
    assert _ratio(old, house.owner(size), EXTENT // size) >= 0.9


def _read_everywhere(old: Owner, slot: int) -> int:
    """A lease on a block in each extent."""
    owners = [extent.owners[slot] for extent in old.pool.arena.extents(old.size)]
    run = BlockRun(0, [owner.block_hash for owner in owners if owner is not None])
    return old.pool.lookup(old.fingerprint, [run], prefix_only=False, lease_ttl_ms=60_000).lease_id


def _busy_everywhere(house: House) -> tuple[Owner, list[int], list[int]]:
    """An old namespace with readers in each extent; their leases."""
    old, names = _full(house, 100)
    return old, names, [_read_everywhere(old, slot) for slot in (0, 5)]


@pytest.mark.parametrize("size", [50, 200, 500])
def test_another_size_gets_its_share_where_every_extent_has_readers(house: House, size: int) -> None:
    old, _, leases = _busy_everywhere(house)
    new = house.owner(size)
    refused = 0
    for turn in range(120):
        house.clock.advance(0.5)
        house.pool.rebalance()
        house.pool.release([leases.pop(0)])
        leases.append(_read_everywhere(old, turn % 10))
        try:
            new.store(2)
        except OutOfSpaceError:
            refused += 1
        old.store(1)
    assert refused <= 8
    assert len(house.pool.arena.extents(size)) == NUM_EXTENTS // 2


def _many(house: House, size: int = 1) -> Owner:
    """An old namespace that has all of the arena."""
    old = house.owner(size)
    for first in range(0, NUM_EXTENTS * EXTENT // size, 100):
        runs = [run_of(("old", name)) for name in range(first, first + 100)]
        grant = house.pool.put_start(old.fingerprint, runs, WHOLE)
        house.pool.put_end(grant.ticket_id, [0] * len(grant.offsets))
    return old


def _draining(house: House, num_leased: int = 1) -> tuple[Owner, int]:
    """An old namespace that has all of the arena, of which one extent is being drained; the lease on its blocks.

    The drain has not come to most of the extent's slots yet. One of them is leased, and `num_leased` of each other
    extent.
    """
    old = _many(house)
    extents = house.pool.arena.extents(1)
    owners = [owner for extent in extents for owner in extent.owners[: 1 if extent is extents[0] else num_leased]]
    run = BlockRun(0, [owner.block_hash for owner in owners if owner is not None])
    lease_id = house.pool.lookup(old.fingerprint, [run], prefix_only=False, lease_ttl_ms=60_000).lease_id
    with pytest.raises(OutOfSpaceError):
        house.owner(2).store()
    house.pool.rebalance()
    assert house.pool.arena.withheld(("", 1)) == {extents[0].start}
    return old, lease_id


def test_the_start_of_a_drain_looks_at_few_slots_of_each_extent(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    decider, num_looked_at, looked_at = house.pool.placement, [], []
    is_movable, start_drain = Entry.movable.fget, decider.start_drain

    def start(now: float, count: int) -> list[Entry]:
        looked_at.clear()
        victims = start_drain(now, count)
        num_looked_at.append(len(looked_at))
        return victims

    monkeypatch.setattr(Entry, "movable", property(lambda entry: looked_at.append(entry) or is_movable(entry)))
    monkeypatch.setattr(decider, "start_drain", start)
    _draining(house)
    assert NUM_EXTENTS <= max(num_looked_at) <= NUM_EXTENTS * 100 + STEP_BLOCKS


@pytest.mark.parametrize("count", [1, 1_000])
def test_blocks_in_an_extent_that_is_being_drained_make_no_room(house: House, count: int) -> None:
    old, _ = _draining(house)
    new = range(count)
    old.put(*new)
    assert old.present(*new) == list(new)


def test_a_put_that_finds_room_only_in_an_extent_that_is_being_drained_evicts_nothing_else(house: House) -> None:
    old, _ = _draining(house, num_leased=EXTENT)
    with pytest.raises(OutOfSpaceError):
        old.put("new")
    assert old.nbytes > (NUM_EXTENTS - 1) * EXTENT


@pytest.mark.parametrize(("count", "most"), [(1, EXTENT), (4, 9 * EXTENT)])
def test_a_put_goes_on_with_the_extent_that_it_empties(
    house: House, monkeypatch: pytest.MonkeyPatch, count: int, most: int
) -> None:
    """Beside puts that take each slot that is free, even of whole extents, and uses of what has not been evicted."""
    monkeypatch.setattr(placement, "MAX_VICTIMS", 150)
    monkeypatch.setattr(pool, "SETTLED_PER_CALL", 1)
    old, new = _many(house), house.owner(EXTENT)
    steps = house.pool.put_start_in_steps(new.fingerprint, [run_of(*range(count))], WHOLE)
    evicted: list[int] = []
    before = house.pool.counters["evicted_blocks"]
    for nth, _ in enumerate(steps):
        evicted.append(house.pool.counters["evicted_blocks"] - before)
        old.put(*((nth, name) for name in range(100)))
        for extent in old.pool.arena.extents(1):
            for owner in filter(None, extent.owners if extent.free else ()):
                owner.used = old.pool.placement.stamp  # As a lookup does, and without a lease.
        before = house.pool.counters["evicted_blocks"]
    assert max(evicted) <= 2 * 150 and sum(evicted) <= most, "extents were emptied in vain"
    assert len(house.pool.arena.extents(EXTENT)) == count


def test_a_put_that_empties_extents_in_steps_gets_no_more_than_its_share(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MAX_VICTIMS", 300)
    _many(house)
    new = house.owner(EXTENT)
    new.evictions(*range(NUM_EXTENTS // 2 + 2))
    assert len(house.pool.arena.extents(1)) >= NUM_EXTENTS // 2
    new.put(*range(NUM_EXTENTS // 2))


def test_an_extent_that_is_being_drained_is_not_given_to_a_third_size(house: House) -> None:
    _, lease_id = _draining(house)
    house.pool.release([lease_id])
    third = house.owner(500)
    names = third.store(4)
    assert third.present(*names) == names


def test_an_extent_that_is_not_fetched_or_never_free_is_as_any_other_after_a_while(house: House) -> None:
    old, _, leases = _busy_everywhere(house)
    new = house.owner(200)
    for free_it in (False, True):
        with pytest.raises(OutOfSpaceError):
            new.store()
        house.pool.rebalance()
        if free_it:
            house.pool.release(leases)
        house.clock.advance(DRAIN_S)
        house.pool.expire()
        old.store(20)
        assert old.nbytes == 8_000


def test_another_tenant_that_never_stops_writing_gives_up_an_extent(policy: type[Policy]) -> None:
    house = House(4, policy, has_tenants=True)
    spec = namespace_spec(group_spec(chunk_bytes=50, num_shards=4), tenant="evil")
    fingerprint = house.pool.open_namespace(spec)[0].fingerprint
    names = [f"evil {nth}" for nth in range(4 * EXTENT // 200)]
    for name in names:
        grant = house.pool.put_start(fingerprint, [run_of(name)], ShardRange(0, 1))
        house.pool.put_end(grant.ticket_id, [0])
    run = BlockRun(0, [block_hash(name) for name in names])

    def start(shard: int) -> int:
        return house.pool.put_start(fingerprint, [run], ShardRange(shard, 1)).ticket_id

    ticket, shard = start(1), 1
    victim, limits = house.owner(100, tenant="victim"), house.pool.limits
    ends_at = house.clock() + DRAIN_S + (limits.max_ttl_ms + limits.grace_ms) / 1000
    while house.clock() < ends_at:
        house.clock.advance(1)
        house.pool.rebalance()
        with suppress(OutOfSpaceError):
            victim.store()
            return
        with suppress(OutOfSpaceError):
            other = start(3 - shard)
            house.pool.put_revoke(ticket)
            ticket, shard = other, 3 - shard
    raise AssertionError("a share is never given")
