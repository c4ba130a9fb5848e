"""What is known of blocks that have left: for whom, how long ago, how long after their last use, and how far back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvpool.protocol.types import MissCause
from kvpool_server.cache import departures as module
from kvpool_server.cache.departures import UNKNOWN, Departure, Departures, EvictedFor, UseTimes
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.steps import finish
from tests.support.clock import FakeClock
from tests.support.values import block_hash, group_spec


def group_of(tenant: str, model: str = "m") -> Group:
    return Group(group_spec(), 0, f"{'0' * 64}@{model}", tenant.encode(), declared_tenant=tenant)


def entries_of(group: Group, *names: object, used: int = 0) -> list[Entry]:
    return [Entry(group, block_hash(name), None, 0, used) for name in names]


def test_for_whom_when_and_how_long_after_its_last_use_a_block_was_evicted(clock: FakeClock) -> None:
    departures, group, other = Departures(clock), group_of("a"), group_of("b", "other/model@x")
    departures.use_times.mark(clock(), 0)
    clock.now += 150
    departures.left(entries_of(group, *range(7, 10), used=65), MissCause.EVICTED, other)
    clock.now += 92
    found = departures.departure(group, block_hash(9))
    assert found is not None and found.unused_seconds is not None
    assert found[:2] == (MissCause.EVICTED, 92)
    assert found.unused_seconds == pytest.approx(150, rel=0.1)
    assert found.evicted_for == EvictedFor("b", "other/model@x")
    assert departures.departure(group, block_hash("x")) is None
    names = [block_hash(nth) for nth in range(7, 12)]
    assert departures.departures(group, names, is_prefix=True) == [(found, 3), (None, 2)]
    assert departures.charge(group, names, "b") == ({}, False), "a tenant pays nothing to itself"
    assert departures.charge(group, names[1:], "a") == ({EvictedFor("b", "other/model@x"): 2}, True)
    assert departures.charge(group, names, "a") == ({EvictedFor("b", "other/model@x"): 1}, True)
    assert departures.charge(group, names, "a") == ({}, True), "each departure is charged once"
    assert departures.departure(group, block_hash(9)) == found


def test_a_block_that_leaves_again_is_charged_again_and_unknown_blocks_are_charged_to_nobody(clock: FakeClock) -> None:
    departures, group, other = Departures(clock), group_of("a"), group_of("b", "model")
    unknown = [block_hash(nth) for nth in range(2, 500)]
    assert departures.charge(group, unknown, "a") == ({}, False)
    for _ in range(2):
        departures.left(entries_of(group, 1, 500), MissCause.EVICTED, other)
        charged, _ = departures.charge(group, [block_hash(1), *unknown, block_hash(500)], "a")
        assert charged == {EvictedFor("b", "model"): 2}


def test_a_tenant_of_many_models_takes_few_names_and_a_full_table_of_names_forgets_none(clock: FakeClock) -> None:
    departures = Departures(clock)
    group, first = group_of("a"), group_of("greedy", "first")
    departures.left(entries_of(group, "first"), MissCause.EVICTED, first)
    for nth in range(module.MAX_MODELS_PER_TENANT + 10):
        departures.left(entries_of(group, nth), MissCause.EVICTED, group_of("greedy", f"model {nth}"))
    last = departures.departure(group, block_hash(nth))
    assert last is not None and last.evicted_for == EvictedFor("greedy", "")
    for nth in range(5_000):
        departures.left(entries_of(group, (nth, "t")), MissCause.EVICTED, group_of(f"tenant {nth}"))
    late = departures.departure(group, block_hash((4_999, "t")))
    assert late is not None and late.evicted_for is None
    early = departures.departure(group, block_hash("first"))
    assert early is not None and early.evicted_for == EvictedFor("greedy", "first")


def test_the_table_tells_how_far_back_it_reaches_and_takes_thirteen_bytes_a_slot(clock: FakeClock) -> None:
    departures, group = Departures(clock), group_of("a")
    assert finish(departures.memory_in_steps()) == (0, 0, 0)
    clock.now += 5
    departures.left(entries_of(group, *range(100)), MissCause.REMOVED)
    clock.now += 60
    assert finish(departures.memory_in_steps()) == (100, 60, 60)
    assert departures.departure(group, block_hash(1)) == Departure(MissCause.REMOVED, 60)
    assert departures.charge(group, [block_hash(1)], "b") == ({}, False), "it made room for nobody"
    arrays = [each for each in vars(departures).values() if isinstance(each, np.ndarray)]
    assert sum(each.nbytes for each in arrays) == 13 * module.NUM_SLOTS == 13 << 20


def test_ages_of_stamps_are_right_to_three_percent_and_one_second() -> None:
    rng = random.Random(2)
    clock = FakeClock()
    times, stamp = UseTimes(clock()), 0
    given: list[tuple[int, float]] = []
    for _ in range(20_000):
        clock.now += rng.choice([0.001, 0.1, 1, 30, 3_600])
        if clock.now >= times.next_mark:
            times.mark(clock.now, stamp)
        stamp += 64
        given.append((stamp | rng.randrange(64), clock.now))
    found = times.ages([each for each, _ in given], clock.now)
    for (_, given_at), age in itertools.islice(zip(given, found, strict=True), None, None, 37):
        real = clock.now - given_at
        assert real - 1e-6 <= age <= real * 1.04 + 1.1
    assert UseTimes(0.0).ages([1], 5.0).tolist() == [UNKNOWN]
