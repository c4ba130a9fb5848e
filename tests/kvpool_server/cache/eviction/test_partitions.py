"""Which partitions there are, and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from kvpool_server.cache.entry import Group
from kvpool_server.cache.eviction import POLICIES, TICK, Evictor, Policy, SearchCutError
from kvpool_server.cache.eviction.evictor import MAX_VISITED
from kvpool_server.cache.eviction.partitions import (
    MAX_EMPTY,
    Partition,
    Partitions,
    Victims,
)
from kvpool_server.process.runtime import no_collections
from tests.support.clock import FakeClock
from tests.support.entries import drop, make_entry
from tests.support.tenants import House
from tests.support.values import group_spec


class Rig:
    """Partitions of groups of sizes of their own; notes how many policies there are."""

    def __init__(self) -> None:
        self.num_made = 0
        self.partitions = Partitions(self._policy, FakeClock())

    def _policy(self) -> Policy:
        self.num_made += 1
        return POLICIES["lru"]()

    def groups(self, count: int, tenant: str = "") -> list[Group]:
        groups = [Group(group_spec(chunk_bytes=1 + nth), tenant=tenant) for nth in range(count)]
        self.partitions.place([(groups, ())], 0)
        return groups

    def use(self, groups: list[Group], num_entries: int = 0) -> None:
        for nth, group in enumerate(groups):
            partition = self.partitions.of(group)
            partition.last_used = 64 * (1 + nth)
            partition.evictor.num_entries += num_entries


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_none_is_made_for_declared_groups_a_few_stay_without_entries_and_all_with_entries(rig: Rig) -> None:
    groups = rig.groups(1_001)
    assert rig.partitions.accounts(groups[0]) == ()
    rig.partitions.remove([groups.pop()])
    assert rig.num_made == 0 and rig.partitions.last_used("") == 0
    rig.use(groups[:50], num_entries=1)
    rig.use(groups[50:])
    assert rig.num_made == 1_000
    assert len(rig.partitions._by_key) == len(rig.partitions._by_group) == 50 + MAX_EMPTY
    rig.use([*groups[:50], *groups[-MAX_EMPTY:]])
    assert rig.num_made == 1_000, "one that was to stay was made anew"
    assert [len(rig.partitions.of_class(group.slot_class)) for group in groups] == [1] * 50 + [0] * 950
    rig.use(groups[500:501])
    assert rig.num_made == 1_001 and rig.partitions.of(groups[500]).groups == {groups[500]}


def test_the_last_use_is_known_when_a_quota_is_deleted() -> None:
    house = House(8)
    owner = house.owner(tenant="acme")
    house.quota("tenant:acme", 1_000)
    owner.store(3)
    used = house.pool.placement.stamp
    house.quota("tenant:acme", 0)
    assert house.pool.placement._partitions.last_used("") == used


def test_one_choice_among_many_partitions_visits_few_entries_in_vain(
    policy: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_partitions, num_pops = 6, 0
    partitions = [Partition(("", 1), (), Evictor(policy(), FakeClock())) for _ in range(num_partitions)]

    def counted(pop: Callable[[], object]) -> object:
        nonlocal num_pops
        num_pops += 1
        return pop()

    for nth, evictor in enumerate(each.evictor for each in partitions):
        for which in range(MAX_VISITED):
            entry, is_last = make_entry((nth, which)), which == MAX_VISITED - 1
            evictor.stored([entry], 2 * TICK if is_last else TICK)
            evictor.add(entry)
            entry.leases = not is_last
        monkeypatch.setattr(evictor._queue, "pop", partial(counted, evictor._queue.pop))
    num_chosen = num_calls = 0
    while not num_chosen:
        before, num_calls = num_pops, num_calls + 1
        with suppress(SearchCutError), Victims(lambda _: partitions[0].evictor) as victims:
            num_chosen = victims.choose_unpinned(partitions, 1, 3 * TICK)
        assert num_pops - before <= MAX_VISITED + 1 + 3 * num_partitions
    assert num_calls == num_partitions, "a call does not go on where the one before has ended"


def test_the_last_use_of_a_tenant_is_that_of_its_sizes(rig: Rig) -> None:
    rig.use(rig.groups(3, "a"))
    rig.use(rig.groups(2, "b"))
    assert [rig.partitions.last_used("a", size) for size in (1, 3, 4)] == [64, 192, 0]
    assert [rig.partitions.last_used(tenant) for tenant in "abc"] == [192, 128, 0]


def test_a_partition_that_is_forgotten_is_freed_at_once(rig: Rig) -> None:
    """Policy, queue, dropped entry and evictor in a cycle would stay until a collection of all objects."""
    groups = rig.groups(1 + MAX_EMPTY)
    evictor, entry = rig.partitions.of(groups[0]).evictor, make_entry("a")
    evictor.stored([entry], TICK)
    evictor.add(entry)
    drop(evictor, entry)
    freed = weakref.ref(evictor)
    with no_collections():
        del evictor
        rig.use(groups[1:])
        assert freed() is None
