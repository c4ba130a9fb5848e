"""Work in steps: what other calls see between two steps, and that the pool is consistent there."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.protocol.errors import KVPoolError, LeaseExpiredError, OutOfSpaceError
from kvpool.protocol.types import BlockRun, Quota, ShardRange
from kvpool.protocol.wire import encode_runs
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache import entry_table, holds, lookups, placement, pool
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import POLICIES, Evictor, SearchCutError, evictor
from kvpool_server.cache.leases import NOBODY
from kvpool_server.cache.steps import Steps, finish
from kvpool_server.rpc.turns import Turns
from kvpool_server.sharing import Limits
from kvpool_server.tiering import tiered_pool
from kvpool_server.tiering.tiered_pool import TieredPool
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.pool_service import pool_service
from tests.support.service_loop import CallContext
from tests.support.values import block_hash, group_spec, namespace_spec, run_of

CHUNK = 8
ONE = ShardRange(0, 1)
LIMITS = Limits(max_ttl_ms=1_000, default_ticket_ttl_ms=100, grace_ms=200)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "STEP_BLOCKS": (pool, lookups, entry_table),
        "LOOKUP_STEP_BLOCKS": (lookups, pool, tiered_pool),
        "SETTLED_PER_CALL": (pool, holds),
    }
    for name, modules in small.items():
        for module in modules:
            monkeypatch.setattr(module, name, 2)
    monkeypatch.setattr(placement, "REQUEUED_SLOTS", 2)
    monkeypatch.setattr(evictor, "MAX_VISITED", 2)


class Rig:
    """A pool of 24 slots and one namespace."""

    def __init__(self, policy: str = "density") -> None:
        ids = itertools.count(1)
        self.clock = FakeClock()
        arena = Arena(24 * CHUNK, 8 * CHUNK)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids), LIMITS, POLICIES[policy])
        spec = namespace_spec(group_spec(chunk_bytes=CHUNK), group_spec(chunk_bytes=2 * CHUNK), tenant="acme")
        self.name = self.pool.open_namespace(spec)[0].fingerprint

    def store(self, *names: object) -> None:
        grant = self.pool.put_start(self.name, [run_of(*names)], ONE)
        self.pool.put_end(grant.ticket_id, [0] * len(grant.offsets))

    def leading(self, *names: object) -> int:
        return self.pool.lookup(self.name, [run_of(*names)], prefix_only=True).hits[0].num_leading

    def settle(self) -> None:
        while self.pool.settle():
            check_integrity(self.pool)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_clear_takes_what_there_was_from_its_first_step_on_and_nothing_that_is_put_later(rig: Rig) -> None:
    rig.store(*range(10))
    grant = rig.pool.put_start(rig.name, [run_of("a")], ONE)
    clearing = rig.pool.removals.clear(rig.name)
    next(clearing)
    assert rig.leading(0) == 0 and rig.pool.stats().num_entries == 8
    assert rig.pool.put_end(grant.ticket_id, [0]).num_committed == 0
    rig.store(*range(5))
    check_integrity(rig.pool)
    assert finish(clearing) == 11
    assert rig.leading("a") == 0 and rig.leading(*range(10)) == 5 and rig.pool.stats().num_entries == 5


def test_a_block_that_a_clear_is_dropping_is_not_removed_again_and_counts_as_corrupt(rig: Rig) -> None:
    rig.store(*range(12))
    entries = finish(rig.pool.removals.complete(rig.name, [run_of(*range(12))]))
    removing = rig.pool.removals.remove(rig.name, [run_of(*range(12))])
    next(removing)
    clearing = rig.pool.removals.clear(rig.name)
    next(clearing)
    num_live = sum(entry.live for entry in entries)
    assert finish(rig.pool.removals.drop_corrupt(entries)) == num_live > 0
    assert finish(removing) + finish(clearing) == rig.pool.counters["removed_blocks"] == 12
    assert rig.pool.counters["corrupt_blocks"] == num_live
    assert len(list(rig.pool.removals.remove(rig.name, [run_of(*range(10))]))) == 4, "what is not there is looked for"


def test_a_lease_that_has_expired_is_not_live_though_many_others_have_expired_before_it(rig: Rig) -> None:
    rig.store("a")
    leases = [rig.pool.lookup(rig.name, [run_of("a")], prefix_only=True, lease_ttl_ms=100).lease_id for _ in range(20)]
    rig.clock.advance(0.2)
    with pytest.raises(LeaseExpiredError):
        rig.pool.get(leases[-1], rig.name, [run_of("a")], ONE)
    assert rig.pool.release(leases[-1:]) == 0
    rig.settle()
    assert rig.pool.stats().num_leases == 0


def test_a_lookup_in_steps_finds_what_one_in_one_step_finds(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(*(name for name in range(12) if name != 7))
    for runs in ([[*range(12)]], [[7, 8, 9]], [[0, 1, 2, 3]], [[50]], [[0], [0, 1, 2], [7], [9, 10, 11]]):
        for prefix_only in (True, False):
            asked = [run_of(*names) for names in runs]
            steps = rig.pool.lookups.find(rig.name, asked, prefix_only, lease_ttl_ms=100)
            assert len(list(steps)) <= (sum(map(len, runs)) - 1) // 2, "a step finds two blocks"
            in_steps = finish(rig.pool.lookups.find(rig.name, asked, prefix_only, lease_ttl_ms=100))
            with monkeypatch.context() as patched:
                patched.setattr(lookups, "LOOKUP_STEP_BLOCKS", 100)
                at_once = finish(rig.pool.lookups.find(rig.name, asked, prefix_only, lease_ttl_ms=100))
            assert in_steps.hits == at_once.hits and in_steps.entries == at_once.entries
            assert bool(in_steps.lease_id) == bool(at_once.lease_id)
    check_integrity(rig.pool)


def test_a_get_in_steps_answers_as_one_in_one_step_and_ends_with_its_lease(rig: Rig) -> None:
    rig.store(*(name for name in range(12) if name != 7))
    run = run_of(*range(12))
    lease_id = rig.pool.lookup(rig.name, [run], prefix_only=True, lease_ttl_ms=100).lease_id
    at_once = rig.pool.get(lease_id, rig.name, [run], ONE)
    assert at_once.present == (True,) * 7 + (False,) * 5
    steps = rig.pool.lookups.get(lease_id, rig.name, [run], ONE)
    next(steps)
    assert finish(steps) == at_once
    steps = rig.pool.lookups.get(lease_id, rig.name, [run], ONE)
    next(steps)
    rig.pool.release([lease_id])
    with pytest.raises(LeaseExpiredError):
        finish(steps)


def test_a_verification_passes_over_what_was_dropped_since_it_was_found(rig: Rig) -> None:
    rig.store(*range(12))

    async def run(steps: Steps[Any]) -> Any:
        """As a server's turns, where others have theirs before the caller goes on."""
        result = finish(steps)
        rig.pool.remove(rig.name, [run_of(11)])
        return result

    memory, turns = np.zeros(24 * CHUNK, np.uint8), Turns()
    turns.run = run  # type: ignore[method-assign]
    service = pool_service(TieredPool(rig.pool, memory), memory, offer=pb.PingResponse(), turns=turns)
    request = pb.VerifyRequest(namespace=rig.name, runs=encode_runs([run_of(*range(12))]))
    assert asyncio.run(service.Verify(request, CallContext())).num_checked == 11
    check_integrity(rig.pool)
    rig.pool.clear()
    rig.settle()
    assert rig.pool.stats().free_bytes == 24 * CHUNK


def test_a_lookup_whose_lease_ends_before_it_is_located_tells_no_places(rig: Rig) -> None:
    rig.store(*range(12))

    async def look() -> None:
        num_leases = []

        async def run(steps: Steps[Any]) -> Any:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
                if not num_leases and rig.pool.leases:
                    num_leases.append(len(rig.pool.leases))
                    rig.clock.advance(0.2)
                    rig.settle()

        tiered = TieredPool(rig.pool, np.zeros(24 * CHUNK, np.uint8), run=run)
        answer = await tiered.lookup(rig.name, [run_of(*range(12))], True, 100, locate=True)
        assert num_leases == [1] and answer.hits[0].num_leading == 12
        assert (answer.lease_id, answer.slots) == (0, ())
        await tiered.close()

    asyncio.run(look())
    check_integrity(rig.pool)


def _search_in_vain(rig: Rig) -> None:
    """Fills the pool with blocks that a search for victims visits in vain first: all but the last are leased."""
    for nth in range(24):
        rig.store(nth)
    for nth in range(23):
        rig.pool.lookup(rig.name, [run_of(nth)], prefix_only=True, lease_ttl_ms=500)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_search_for_victims_is_done_in_steps(policy: str) -> None:
    rig = Rig(policy)
    _search_in_vain(rig)
    putting = rig.pool.put_start_in_steps(rig.name, [run_of("new")], ONE)
    steps = [check_integrity(rig.pool) for _ in putting]
    assert len(steps) >= 7 and rig.leading(23) == 0
    again = rig.pool.put_start_in_steps(rig.name, [run_of("another")], ONE)
    with pytest.raises(OutOfSpaceError, match="others are leased"):
        next(again)  # It visits none of them again.
    assert (rig.pool.stats().num_incomplete, rig.pool.stats().num_tickets) == (1, 1), (
        "the refused put has reserved something"
    )
    rig.clock.advance(0.5)
    rig.settle()
    rig.store("another")
    check_integrity(rig.pool)


def test_a_search_for_victims_that_does_not_end_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _search_in_vain(rig)

    def cut(*_: object) -> None:
        rig.clock.advance(0.3)
        raise SearchCutError

    monkeypatch.setattr(Evictor, "choose", cut)
    with pytest.raises(OutOfSpaceError, match="it takes too long to make room"):
        rig.store("new")
    assert rig.pool.counters["out_of_space_puts"] == 1
    monkeypatch.undo()
    rig.settle()
    check_integrity(rig.pool)


def test_a_quota_is_in_force_although_the_search_for_what_exceeds_it_is_long(rig: Rig) -> None:
    _search_in_vain(rig)
    rig.pool.release([lease.id for lease in rig.pool.leases.values()][:14])
    for _ in rig.pool.set_quotas_in_steps([Quota("tenant:acme", 10 * CHUNK)]):
        check_integrity(rig.pool)
    assert rig.pool.stats().num_entries == 10


def _start(rig: Rig, dice: random.Random) -> Steps[object]:
    """Some work in steps on some blocks."""
    first = dice.randrange(20)
    runs = [run_of(*range(first, first + dice.randint(1, 6)), group_idx=dice.randrange(2))]
    pool, name = rig.pool, rig.name
    kind = dice.randrange(8)
    if kind == 0:
        return pool.removals.clear(dice.choice([name, b""]))
    if kind == 1:
        return pool.removals.remove(name, runs)
    if kind == 2:
        return pool.lookups.find(name, runs, dice.random() < 0.5, lease_ttl_ms=dice.choice([0, 500]))
    if kind == 3:
        return pool.set_quotas_in_steps([Quota("tenant:acme", dice.choice([5, 15, 1_000]) * CHUNK)])
    if kind == 4:
        return pool.removals.complete(name, runs)
    if kind == 5:
        return _get(rig, runs)
    return _put(rig, runs, dice.random() < 0.8)


def _get(rig: Rig, runs: list[BlockRun]) -> Steps[object]:
    """What is leased lies where the get says, until its last step."""
    found = yield from rig.pool.lookups.find(rig.name, runs, prefix_only=True, lease_ttl_ms=500)
    if found.lease_id:
        located = yield from rig.pool.lookups.get(found.lease_id, rig.name, runs, ONE)
        lease = rig.pool.leases.live(found.lease_id, NOBODY, rig.pool.expire())
        owners = [rig.pool.arena.owner(offset) for offset in located.offsets]
        assert all(owner is not None and lease.covers(owner) for owner in owners)


def _put(rig: Rig, runs: list[BlockRun], ends: bool) -> Steps[object]:
    grant = yield from rig.pool.put_start_in_steps(rig.name, runs, ONE)
    if grant.ticket_id and ends:
        yield
        yield from rig.pool.put_end_in_steps(grant.ticket_id, [0] * len(grant.offsets))
    elif grant.ticket_id:
        rig.pool.put_revoke(grant.ticket_id)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(effort(15)))
def test_the_pool_is_consistent_between_any_two_steps(policy: str, seed: int) -> None:
    dice, rig = random.Random(seed), Rig(policy)
    running: list[Iterator[None]] = []
    for _ in range(300):
        if len(running) < 4:
            running.append(_start(rig, dice))
        nth = dice.randrange(len(running))
        try:
            next(running[nth])
        except (StopIteration, KVPoolError):
            del running[nth]
        if dice.random() < 0.1:
            rig.clock.advance(dice.choice([0.05, 0.3]))
            rig.pool.expire()
        check_integrity(rig.pool)
    for steps in running:
        try:
            for _ in steps:
                check_integrity(rig.pool)
        except KVPoolError:
            pass
    rig.clock.advance(10)
    rig.settle()
    finish(rig.pool.removals.clear())
    rig.clock.advance(10)
    rig.settle()
    stats = rig.pool.stats()
    assert stats.free_bytes == stats.arena_bytes and not stats.num_incomplete and not stats.num_quarantined
    assert rig.pool.open_namespaces()[0].held_blocks == 0
    assert not rig.leading(block_hash("any"))
