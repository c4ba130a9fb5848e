"""Which partitions there are, and for how long."""

from __future__ import annotations

import weakref

import pytest

from kvpool.protocol.types import Quota
from kvpool_server.cache.entry import Group
from kvpool_server.cache.eviction import POLICIES, TICK, Policy
from kvpool_server.cache.eviction.partitions import MAX_EMPTY, Partitions
from kvpool_server.process.process_memory import no_collections
from tests.support.clock import FakeClock
from tests.support.entries import drop, make_entry
from tests.support.tenants import WHOLE, House
from tests.support.values import group_spec, namespace_spec, run_of


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


def test_no_partition_is_made_for_groups_that_are_only_declared(rig: Rig) -> None:
    groups = rig.groups(1_000)
    assert rig.partitions.accounts(groups[0]) == ()
    rig.partitions.remove(groups)
    assert rig.num_made == 0 and rig.partitions.last_used("") == 0


def test_a_few_partitions_stay_without_entries_and_all_with_entries(rig: Rig) -> None:
    groups = rig.groups(1_000)
    rig.use(groups[:50], num_entries=1)
    rig.use(groups[50:])
    assert rig.num_made == 1_000
    assert len(rig.partitions._by_key) == len(rig.partitions._by_group) == 50 + MAX_EMPTY
    rig.use([*groups[:50], *groups[-MAX_EMPTY:]])
    assert rig.num_made == 1_000, "one that was to stay was made anew"
    assert [len(rig.partitions.of_class(group.slot_class)) for group in groups] == [1] * 50 + [0] * 950
    rig.use(groups[500:501])
    assert rig.num_made == 1_001 and rig.partitions.of(groups[500]).groups == {groups[500]}


def test_the_last_use_of_a_tenant_is_that_of_its_sizes(rig: Rig) -> None:
    rig.use(rig.groups(3, "a"))
    rig.use(rig.groups(2, "b"))
    assert [rig.partitions.last_used("a", size) for size in (1, 3, 4)] == [64, 192, 0]
    assert [rig.partitions.last_used(tenant) for tenant in "abc"] == [192, 128, 0]


def test_quotas_of_namespaces_without_blocks_make_no_policies(
    policy: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(8, policy)
    acme = house.owner(tenant="acme")
    acme.store(10)
    made: list[int] = []
    partitions = house.pool.placement._partitions
    monkeypatch.setattr(partitions, "_policy", lambda: made.append(1) or policy())  # type: ignore[func-returns-value]
    for nth in range(20):
        house.owner(1 + nth, tenant="acme")
    house.pool.set_quotas([Quota("tenant:acme", 1_000)])
    assert len(made) == 1, "only the entries of one size have moved"
    assert house.pool.quotas()[0].used_bytes == acme.nbytes == 1_000


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


def test_a_lookup_makes_no_partition_for_groups_in_which_it_finds_nothing(policy: type[Policy]) -> None:
    pool = House(8, policy).pool
    spec = namespace_spec(*(group_spec(chunk_bytes=1 + nth) for nth in range(20)))
    namespace, _ = pool.open_namespace(spec)
    pool.put_end(pool.put_start(namespace.fingerprint, [run_of("a")], WHOLE).ticket_id, [0])
    runs = [run_of("a", group_idx=nth) for nth in range(20)]
    found = pool.lookup(namespace.fingerprint, runs, prefix_only=True, lease_ttl_ms=100)
    assert found.lease_id and len(pool.placement._partitions._by_group) == 1
