"""Random histories of one pool against an oracle, and proof that the oracle sees what it is there to see."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import BlockRun, Lookup, PutGrant, PutReceipt, PutStatus, Quota, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.simulation.world import GROUPS, NAMES, SPECS, SUBJECTS, Group, HeldLease, HeldTicket, World
from tests.support.effort import effort

groups = st.sampled_from(GROUPS)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
ttls_ms = st.sampled_from([1, 50, 100, 400, 5_000])


@st.composite
def shards_of(draw: st.DrawFn, group: Group) -> ShardRange:
    num_shards = SPECS[group[0]].groups[group[1]].num_shards
    if draw(st.booleans()):
        return ShardRange(0, num_shards)
    start = draw(st.integers(0, num_shards - 1))
    return ShardRange(start, draw(st.integers(1, num_shards - start)))


class PoolMachine(RuleBasedStateMachine):
    """Any client may do anything at any time; `World` checks what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.ended: list[HeldTicket] = []
        self.released: list[HeldLease] = []

    @initialize(policy=st.sampled_from(sorted(POLICIES)), has_tenants=st.booleans())
    def start(self, policy: str, has_tenants: bool) -> None:
        self.world = World(policy=policy, has_tenants=has_tenants)

    @rule(group=groups, names=names, ttl_ms=st.sampled_from([0, 50, 400, 5_000]), prefix_only=st.booleans())
    def lookup(self, group: Group, names: list[int], ttl_ms: int, prefix_only: bool) -> None:
        self.world.lookup(group, names, ttl_ms=ttl_ms, prefix_only=prefix_only)

    @rule(group=groups, names=names, ttl_ms=ttls_ms, parent=st.none() | st.sampled_from(NAMES), data=st.data())
    def put_start(self, group: Group, names: list[int], ttl_ms: int, parent: int | None, data: st.DataObject) -> None:
        try:
            self.world.put_start(group, names, data.draw(shards_of(group)), ttl_ms=ttl_ms, parent=parent)
        except OutOfSpaceError:
            pass  # `World` has checked that it changed nothing.

    @rule(group=groups, names=names, parent=st.none() | st.sampled_from(NAMES))
    def put(self, group: Group, names: list[int], parent: int | None) -> None:
        """A whole put, undisturbed: what most traffic is."""
        shards = ShardRange(0, SPECS[group[0]].groups[group[1]].num_shards)
        before = len(self.world.tickets)
        try:
            self.world.put_start(group, names, shards, parent=parent)
        except OutOfSpaceError:
            return
        if len(self.world.tickets) > before:
            assert self.world.put_end(self.world.tickets[-1]) is not None

    @precondition(lambda self: self.world.tickets)
    @rule(data=st.data())
    def put_end(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.world.tickets))
        self.ended.append(ticket)
        self.world.put_end(ticket)

    @precondition(lambda self: self.world.tickets)
    @rule(data=st.data())
    def put_revoke(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.world.tickets))
        self.ended.append(ticket)
        self.world.put_revoke(ticket)

    @precondition(lambda self: self.ended or self.world.late)
    @rule(data=st.data(), revoke=st.booleans())
    def end_again(self, data: st.DataObject, revoke: bool) -> None:
        ticket = data.draw(st.sampled_from([*self.ended, *self.world.late]))
        assert not (self.world.put_revoke(ticket) if revoke else self.world.put_end(ticket))

    @precondition(lambda self: self.world.tickets or self.world.late)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """A writer writes, whether its ticket still lives or not."""
        self.world.write_late(data.draw(st.sampled_from([*self.world.tickets, *self.world.late])))

    @precondition(lambda self: self.world.stored)
    @rule(data=st.data(), ttl_ms=ttls_ms)
    def lookup_stored(self, data: st.DataObject, ttl_ms: int) -> None:
        group, name = data.draw(st.sampled_from(list(self.world.stored)))
        self.world.lookup(group, [name], ttl_ms=ttl_ms)

    @precondition(lambda self: self.world.leases or self.released)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([*self.world.leases, *self.released]))
        group = next(iter(lease.slots))[0]
        leased = st.sampled_from([name for _, name in lease.slots])
        wanted = data.draw(st.lists(leased | st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        self.world.get(lease, group, wanted, data.draw(shards_of(group)))

    @precondition(lambda self: self.world.leases or self.released)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([*self.world.leases, *self.released]))
        self.world.release(lease)
        self.released.append(lease)

    @rule(group=groups, names=names, corrupt=st.none() | st.sampled_from(NAMES))
    def verify(self, group: Group, names: list[int], corrupt: int | None) -> None:
        self.world.verify(group, names, corrupt)

    @rule(group=groups, names=names)
    def remove(self, group: Group, names: list[int]) -> None:
        self.world.remove(group, names)

    @rule(space=st.sampled_from([0, 1, None]), really=st.integers(0, 3))
    def clear(self, space: int | None, really: int) -> None:
        if really == 0:  # Rare, for it ends most of what could go wrong.
            self.world.clear(space)

    @rule(group=groups, names=names, seconds=st.sampled_from([0, 1, 2, 600]))
    def pin(self, group: Group, names: list[int], seconds: int) -> None:
        if seconds:
            self.world.pin(group, names, seconds)
        else:
            self.world.unpin(group, names)

    @precondition(lambda self: self.world.stored)
    @rule(data=st.data(), seconds=st.sampled_from([1, 600]))
    def pin_stored(self, data: st.DataObject, seconds: int) -> None:
        group, name = data.draw(st.sampled_from(list(self.world.stored)))
        self.world.pin(group, [name], seconds)

    @rule(group=groups, names=names)
    def expire(self, group: Group, names: list[int]) -> None:
        self.world.expire(group, names)

    @rule(space=st.sampled_from(range(len(SPECS))))
    def open(self, space: int) -> None:
        self.world.open(space)

    @rule(subject=st.sampled_from(sorted(SUBJECTS)), limit_bytes=st.sampled_from([0, 8, 48, 100, 128, 1_000]))
    def set_quota(self, subject: str, limit_bytes: int) -> None:
        self.world.set_quota(subject, limit_bytes)

    @rule()
    def rebalance(self) -> None:
        self.world.rebalance()

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.1, 0.2, 0.3, 1.0]), tell_pool=st.booleans())
    def advance(self, seconds: float, tell_pool: bool) -> None:
        self.world.advance(seconds, tell_pool=tell_pool)

    @rule()
    def bad_calls(self) -> None:
        self.world.bad_calls()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.check_nothing_leaks()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=effort(75), stateful_step_count=50)


class _Unchecked(PoolAtOnce):
    """Broken pools must be caught by what clients see, not by the pool's own bookkeeping."""

    def __init_subclass__(cls) -> None:
        unknown = [name for name in vars(cls) if not hasattr(PoolAtOnce, name)]
        assert not unknown, f"{cls.__name__} breaks nothing: a pool has no {unknown}"

    def check_integrity(self) -> None:
        """Nothing."""


class GraceIgnored(_Unchecked):
    def __init__(self, arena: object, clock: object, new_id: object, limits: Limits, policy: object):
        ungraceful = dataclasses.replace(limits, grace_ms=0)
        super().__init__(arena, clock, new_id, ungraceful, policy)  # type: ignore[arg-type]


class LeaseIgnoredByEviction(_Unchecked):
    def lookup(self, *args: Any, **options: Any) -> Lookup:
        found = super().lookup(*args, **options)
        for namespace in self.open_namespaces():
            for entry in namespace.entries():
                entry.leases = 0
        return found


class VisibleBeforeLastShard(_Unchecked):
    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        ticket = self.tickets.get(ticket_id)
        receipt = super().put_end(ticket_id, checksums)
        for entry in ticket.entries if ticket is not None else ():
            entry.present = entry.group.full_mask
        return receipt


class VisibleBeforePutEnd(_Unchecked):
    def put_start(self, *args: Any) -> PutGrant:
        grant = super().put_start(*args)
        ticket = self.tickets.get(grant.ticket_id)
        for entry in ticket.entries if ticket is not None else ():
            entry.present |= entry.pending
        return grant


class RevokeLeaks(_Unchecked):
    def put_revoke(self, ticket_id: int) -> bool:
        ticket = self.tickets.pop(ticket_id)
        for entry in ticket.entries if ticket is not None else ():
            entry.pending = 0
        return ticket is not None


class RefusalEvicts(_Unchecked):
    def put_start(self, *args: Any) -> PutGrant:
        try:
            return super().put_start(*args)
        except OutOfSpaceError:
            for namespace in self.open_namespaces():
                for entry in [entry for entry in namespace.entries() if entry.movable]:
                    self.entry_table.drop(entry)
            raise


class RemoveForgetsReaders(_Unchecked):
    def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> int:
        for block_hash in runs[0].block_hashes:
            namespace = self.namespace(fingerprint)
            entry = namespace.groups[runs[0].group_idx].index.get(block_hash) if namespace is not None else None
            if entry is not None:
                entry.leases = 0
        return super().remove(fingerprint, runs)


class QuotaIgnored(_Unchecked):
    def put_start(self, *args: Any) -> PutGrant:
        for namespace in self.open_namespaces():
            self.placement.assign_quotas([(namespace.groups, ())])
        return super().put_start(*args)


class LoweredQuotaKeepsItsSurplus(_Unchecked):
    def rebalance(self) -> None:
        """Nothing."""


class QuotaBindsOthers(_Unchecked):
    def put_start(self, *args: Any) -> PutGrant:
        for quota in self.quotas():
            if quota.used_bytes >= quota.limit_bytes:
                raise OutOfSpaceError(f"quota {quota.subject} = {quota.limit_bytes} bytes: no room")
        return super().put_start(*args)


class SupersededForEver(_Unchecked):
    def lookup(self, *args: Any, **options: Any) -> Lookup:
        superseded = [namespace for namespace in self.open_namespaces() if namespace.superseded]
        found = super().lookup(*args, **options)
        for namespace in superseded:
            namespace.superseded = True
        return found


class BytesLeftBehind(_Unchecked):
    def __init__(self, arena: Arena, *args: Any):
        super().__init__(arena, *args)
        arena._zero = lambda start, nbytes: None


class ExtentsOfEverybody(_Unchecked):
    def __init__(self, arena: Arena, *args: Any):
        super().__init__(arena, *args)
        arena.claim = lambda slot_bytes, count, tenant="": True  # type: ignore[method-assign]
        arena._is_clean = lambda idx, tenant: True  # type: ignore[method-assign]


class SlotsChargedOnly(_Unchecked):
    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        super().set_quotas(quotas)
        self.arena.limits = {}


class PinsIgnored(_Unchecked):
    def put_start(self, *args: Any) -> PutGrant:
        for namespace in self.open_namespaces():
            for entry in namespace.entries():
                entry.pinned_until = 0
        return super().put_start(*args)


class PinsWithoutBudget(_Unchecked):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.pins._budget_bytes = 1 << 60


class ExpiredLikeOthers(_Unchecked):
    def put_start(self, *args: Any) -> PutGrant:
        for namespace in self.open_namespaces():
            for entry in namespace.entries():
                entry.used = max(entry.used, self.placement.stamp)
        return super().put_start(*args)


class QuarantineUncharged(_Unchecked):
    def expire(self) -> float:
        now = super().expire()
        for group in {entry.group for entry in self.entry_table.quarantine}:
            group.num_slots = group.num_live
        return now


PLAIN: Group = (0, 1)
"""One shard of 24 bytes, two blocks an extent."""
SHARDED: Group = (0, 0)
"""Two shards of 8 bytes, four blocks an extent."""
NEWER: Group = (2, 1)
"""The same, with newer weights."""
ONE = ShardRange(0, 1)


def _store(world: World, *names: int, group: Group = PLAIN) -> None:
    shards = ShardRange(0, SPECS[group[0]].groups[group[1]].num_shards)
    assert world.put_start(group, names, shards) == [PutStatus.GRANTED] * len(names)
    world.put_end(world.tickets[-1])
    world.check()


def _a_late_writer(world: World) -> None:
    world.put_start(PLAIN, [0], ONE, ttl_ms=100)
    world.advance(0.15, tell_pool=True)
    world.write_late(world.late[-1])
    _store(world, *range(1, 8))
    world.write_late(world.late[-1])
    world.check()


def _a_full_pool_with_a_reader(world: World) -> None:
    _store(world, *range(8))
    world.lookup(PLAIN, [0, 1], ttl_ms=1_000)
    world.get(world.leases[-1], PLAIN, [0, 1], ONE)
    for name in (8, 9):
        _store(world, name)


def _half_a_block(world: World) -> None:
    world.put_start(SHARDED, [0], ONE)
    world.put_end(world.tickets[-1])
    world.check()
    world.put_start(SHARDED, [0], ShardRange(1, 1))
    world.put_end(world.tickets[-1])
    world.check()


def _a_block_under_way(world: World) -> None:
    world.put_start(PLAIN, [0], ONE)
    world.check()
    world.put_end(world.tickets[-1])


def _a_writer_that_gives_up(world: World) -> None:
    world.put_start(PLAIN, range(8), ONE)
    world.put_revoke(world.tickets[-1])
    world.check()
    _store(world, 8)


def _a_put_without_room(world: World) -> None:
    _store(world, *range(6))
    world.lookup(PLAIN, [0, 2, 4], ttl_ms=1_000)
    with pytest.raises(OutOfSpaceError):
        world.put_start((1, 1), [0, 1, 2, 3], ShardRange(0, 4))


def _a_removal_under_a_reader(world: World) -> None:
    _store(world, 0, 1)
    world.lookup(PLAIN, [0, 1], ttl_ms=1_000)
    world.get(world.leases[-1], PLAIN, [0, 1], ONE)
    world.remove(PLAIN, [0])
    world.check()


def _a_quota(world: World) -> None:
    world.set_quota("tenant:acme", 100)
    for name in range(6):
        _store(world, name)


def _a_lowered_quota(world: World) -> None:
    _store(world, *range(6))
    world.set_quota("tenant:acme", 100)
    world.check()


def _a_full_tenant_beside_another(world: World) -> None:
    world.set_quota("tenant:acme", 48)
    _store(world, 0, 1)
    _store(world, 0, group=(1, 1))


def _an_old_namespace_in_use(world: World) -> None:
    world.open(2)
    world.lookup(PLAIN, [0], ttl_ms=100)
    world.check()


OTHERS: Group = (1, 0)
"""Of another tenant."""


def _an_extent_that_changes_hands(world: World) -> None:
    _store(world, *range(8))
    world.remove(PLAIN, range(8))
    _store(world, 0, group=OTHERS)


def _a_quota_and_many_sizes(world: World) -> None:
    world.set_quota("tenant:acme", 64)
    _store(world, 0)
    _store(world, 0, group=SHARDED)
    world.check()


def _a_quota_and_late_writers(world: World) -> None:
    world.set_quota("tenant:acme", 48)
    for name in (0, 2):
        with contextlib.suppress(OutOfSpaceError):
            world.put_start(PLAIN, [name, name + 1], ONE, ttl_ms=1)
        world.advance(0.01, tell_pool=True)
        world.check()


def _a_full_pool_with_pins(world: World) -> None:
    for name in range(8):
        _store(world, name)
    world.pin(PLAIN, [0, 2, 4, 6], 600)
    world.check()
    _store(world, 8, 9, 10, 11)


def _more_pins_than_the_budget(world: World) -> None:
    _store(world, *range(8))
    world.pin(PLAIN, range(8), 600)
    world.check()


def _a_full_pool_with_an_expired_prefix(world: World) -> None:
    for name in range(8):
        _store(world, name)
    world.expire(PLAIN, [6])
    world.check()
    _store(world, 8)


SCENARIOS: dict[type[PoolAtOnce], Callable[[World], None]] = {
    GraceIgnored: _a_late_writer,
    LeaseIgnoredByEviction: _a_full_pool_with_a_reader,
    VisibleBeforeLastShard: _half_a_block,
    VisibleBeforePutEnd: _a_block_under_way,
    RevokeLeaks: _a_writer_that_gives_up,
    RefusalEvicts: _a_put_without_room,
    RemoveForgetsReaders: _a_removal_under_a_reader,
    QuotaIgnored: _a_quota,
    LoweredQuotaKeepsItsSurplus: _a_lowered_quota,
    QuotaBindsOthers: _a_full_tenant_beside_another,
    SupersededForEver: _an_old_namespace_in_use,
    BytesLeftBehind: _an_extent_that_changes_hands,
    ExtentsOfEverybody: _an_extent_that_changes_hands,
    SlotsChargedOnly: _a_quota_and_many_sizes,
    QuarantineUncharged: _a_quota_and_late_writers,
    PinsIgnored: _a_full_pool_with_pins,
    PinsWithoutBudget: _more_pins_than_the_budget,
    ExpiredLikeOthers: _a_full_pool_with_an_expired_prefix,
}
OF_TENANTS = {_an_extent_that_changes_hands, _a_quota_and_many_sizes}
"""Scenarios of a pool whose extents belong to tenants."""


def _play(pool_class: type[PoolAtOnce], scenario: Callable[[World], None]) -> None:
    world = World(pool_class, has_tenants=scenario in OF_TENANTS)
    scenario(world)
    world.check_nothing_leaks()


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.__name__.strip("_"))
def test_the_pool_passes_every_scenario(scenario: Callable[[World], None]) -> None:
    _play(PoolAtOnce, scenario)


@pytest.mark.parametrize("broken", SCENARIOS, ids=lambda broken: broken.__name__)
def test_the_oracle_catches_a_broken_pool(broken: type[PoolAtOnce]) -> None:
    with pytest.raises(AssertionError) as caught:
        _play(broken, SCENARIOS[broken])
    assert "kvpool_server" not in str(caught.traceback[-1].path), "the pool tripped over itself; the oracle saw nothing"
