"""Extents are zeroed for another tenant, while puts of several tenants wait for them in turns, and some give up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import PutGrant, ShardRange
from kvpool_server.cache import arena as arena_module
from kvpool_server.cache import pool as pool_module
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.steps import Steps, finish
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.integrity import check_integrity
from tests.support.values import group_spec, namespace_spec, run_of

EXTENT_BYTES, NUM_EXTENTS = 64, 3
TENANTS = ("acme", "umbra", "third")
SIZES = (16, 24)
STEP_BYTES = 24
WHOLE = ShardRange(0, 1)


class Puts:
    """A pool with memory, whose puts are done in steps. A byte is the number of the tenant that wrote it, plus 1."""

    def __init__(self) -> None:
        ids = itertools.count(1)
        self.memory = np.zeros(EXTENT_BYTES * NUM_EXTENTS, np.uint8)
        arena = Arena(self.memory.nbytes, EXTENT_BYTES, zero=self.zero)
        self.clock = FakeClock()
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids))
        self.num_zeroed = 0
        self.names = itertools.count()
        self.under_way: list[tuple[int, int, Steps[PutGrant]]] = []
        self.fingerprints = {
            (tenant, size): self.pool.open_namespace(
                namespace_spec(group_spec(chunk_bytes=size), tenant=TENANTS[tenant])
            )[0].fingerprint
            for tenant in range(len(TENANTS))
            for size in SIZES
        }

    def zero(self, start: int, nbytes: int) -> None:
        assert nbytes <= STEP_BYTES
        self.memory[start : start + nbytes] = 0
        self.num_zeroed += nbytes

    def start(self, tenant: int, size: int, count: int) -> None:
        run = run_of(*(next(self.names) for _ in range(count)))
        steps = self.pool.put_start_in_steps(self.fingerprints[tenant, size], [run], WHOLE)
        self.under_way.append((tenant, size, steps))
        self.step(len(self.under_way) - 1)

    def step(self, nth: int) -> None:
        tenant, size, steps = self.under_way[nth]
        try:
            next(steps)
        except StopIteration as end:
            del self.under_way[nth]
            for offset in end.value.offsets:
                there = set(self.memory[offset : offset + size].tolist())
                assert there <= {0, tenant + 1}, f"{TENANTS[tenant]} sees {there}"
                self.memory[offset : offset + size] = tenant + 1
            self.pool.put_end(end.value.ticket_id, [0] * len(end.value.offsets))
        except KVPoolError:
            del self.under_way[nth]

    def give_up(self, nth: int) -> None:
        *_, steps = self.under_way.pop(nth)
        steps.close()


class ZeroingMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.puts = Puts()

    @rule(tenant=st.sampled_from(range(len(TENANTS))), size=st.sampled_from(SIZES), count=st.integers(1, 6))
    def start(self, tenant: int, size: int, count: int) -> None:
        self.puts.start(tenant, size, count)

    @precondition(lambda self: self.puts.under_way)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.puts.step(data.draw(st.integers(0, len(self.puts.under_way) - 1)))

    @precondition(lambda self: self.puts.under_way)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.puts.give_up(data.draw(st.integers(0, len(self.puts.under_way) - 1)))

    @rule(tenant=st.sampled_from(range(len(TENANTS))), size=st.sampled_from(SIZES))
    def clear(self, tenant: int, size: int) -> None:
        self.puts.pool.clear(self.puts.fingerprints[tenant, size])

    @invariant()
    def holds(self) -> None:
        check_integrity(self.puts.pool)

    def teardown(self) -> None:
        for _ in range(1_000):
            if not self.puts.under_way:
                break
            self.puts.step(0)
        assert not self.puts.under_way, "puts wait for each other for ever"
        self.puts.pool.clear()
        assert len(self.puts.pool.arena.unused_extents()) == NUM_EXTENTS
        assert not self.puts.pool.arena.tenants()


@pytest.fixture(autouse=True, scope="module")
def _small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(arena_module, "ZEROED_AT_ONCE", STEP_BYTES)
        yield


TestZeroing = ZeroingMachine.TestCase
TestZeroing.settings = settings(max_examples=effort(60), stateful_step_count=40)


def _finish(puts: Puts) -> None:
    while puts.under_way:
        puts.step(0)


def _used_up() -> Puts:
    """A tenant has had all extents, and has no block any more."""
    puts = Puts()
    puts.start(0, 16, 12)
    _finish(puts)
    puts.pool.clear()
    return puts


def test_two_puts_of_a_tenant_share_the_extent_that_is_zeroed_for_them() -> None:
    puts = _used_up()
    puts.start(1, 16, 1)
    puts.start(1, 16, 1)
    assert len(puts.under_way) == 2
    _finish(puts)
    assert puts.num_zeroed == EXTENT_BYTES
    assert puts.pool.arena.tenants() == {"umbra": 1}


def test_its_own_extents_come_first_and_are_not_zeroed() -> None:
    puts = Puts()
    for tenant in (0, 1):
        puts.start(tenant, 16, 4)
    puts.pool.clear()
    for tenant in (1, 0):
        puts.start(tenant, 24, 2)
        assert not puts.under_way and not puts.num_zeroed
    puts.start(2, 24, 2)
    assert not puts.under_way and not puts.num_zeroed, "nobody has used the third extent"


def test_a_put_that_has_waited_for_an_extent_has_all_of_its_time() -> None:
    puts = _used_up()
    steps = puts.pool.put_start_in_steps(puts.fingerprints[1, 16], [run_of("block")], WHOLE, ttl_ms=10_000)
    next(steps)
    puts.clock.advance(60)
    grant = finish(steps)
    assert grant.ticket_ttl_ms == 10_000
    puts.clock.advance(9)
    (offset,) = grant.offsets
    puts.pool.writable(grant.ticket_id, offset, 16)
    assert puts.pool.put_end(grant.ticket_id, [0]).num_complete == 1
    check_integrity(puts.pool)


def test_a_put_of_several_parts_may_be_zeroed_for_longer_than_a_ticket_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "STEP_BLOCKS", 4)
    puts = _used_up()
    puts.start(1, 16, 12)
    while puts.under_way:
        puts.clock.advance(0.4 * puts.pool.limits.max_ttl_ms / 1000)
        puts.step(0)
    assert puts.num_zeroed == NUM_EXTENTS * EXTENT_BYTES and puts.pool.stats().num_entries == 12


def test_an_arena_of_one_tenant_is_never_zeroed() -> None:
    arena = Arena(EXTENT_BYTES, EXTENT_BYTES)
    for offset in arena.allocate(16, 4) or []:
        arena.free(offset)
    assert arena.claim(24, 2) and arena.allocate(24, 2) == [0, 24]
