"""Both sides of the connector under random schedules: whatever happens, in whatever order, no request is answered wrong
or waits for ever, and nothing is left behind.

`TEST_EFFORT` says how many schedules are played (`make soak-sim`: many). One that fails is shortened and
printed with its seed, ready to be added to `COUNTEREXAMPLES` under a name that says what it was.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.simulation.broken import BROKEN, Break
from tests.simulation.schedules import Schedule, Setup, make_schedule, play, shrink
from tests.support.effort import effort

NUM_SCHEDULES = effort(80)
NUM_PARTS = 8
MAX_TO_FIND = 400
"""Schedules in which every broken connector must be found: a fraction of what is played."""

FOUND_BY = {
    "a_failed_load_counts_as_done": 34,
    "a_failed_load_is_looked_up_again": 39,
    "a_hit_covers_the_whole_prompt": 22,
    "a_reset_keeps_what_was_stored": 1,
    "a_restart_goes_unnoticed": 3,
    "blocks_are_free_once_the_first_rank_has_stored": 23,
    "blocks_are_stored_before_they_are_computed": 25,
    "blocks_that_are_gone_count_as_loaded": 77,
    "checksums_say_nothing": 391,
    "drafts_are_stored_under_the_names_that_come_true": 10,
    "dropped_stores_are_free_before_every_rank_has_ended_them": 22,
    "every_rank_stores_the_first_shards": 5,
    "failed_loads_are_never_reported": 34,
    "leases_of_earlier_answers_are_kept": 62,
    "leases_of_late_answers_are_kept": 1,
    "leases_of_loads_are_kept": 9,
    "loads_are_reported_twice": 2,
    "pins_are_leaked_by_failed_stores": 3,
    "states_are_named_by_position": 5,
    "the_first_block_of_a_load_is_left_out": 25,
}
"""Broken connector -> a schedule that finds it, played first: the search for one takes seconds. Where schedules
have changed and a seed here finds nothing any more, the search takes these seconds again."""

pytestmark = [pytest.mark.usefixtures("quiet_engine"), pytest.mark.timeout(3_600)]

COUNTEREXAMPLES: dict[str, Schedule] = {
    # Both ranks die of a lost connection with a block half stored, and nobody calls the pool until all has expired.
    "the pool freed a slot twice": Schedule(
        shape="state, full",
        setups=(Setup(tp_size=2, num_blocks=38, max_batched_tokens=100),),
        num_extents=4,
        shares_memory=False,
        events=(
            ("add", 0, 48, 0, 21, 1), ("step", 0, 798), ("step", 0, 744), ("turn", 433), ("step", 0, 805),
            ("turn", 522), ("turn", 383), ("advance", 10_100),
        ),
    ),
    # Loads of two requests fail; the first needs more blocks to be computed than the second leaves it.
    "requests whose loads failed waited for each other": Schedule(
        shape="chunk, full",
        setups=(Setup(num_blocks=30, max_batched_tokens=100, window_interval_tokens=1),),
        num_extents=60,
        shares_memory=True,
        events=(
            ("others_stored", 0, 1, 150, 0), ("others_stored", 0, 0, 150, 0), ("add", 0, 150, 1, 39, 2),
            ("add", 0, 150, 0, 39, 20), ("step", 0), ("turn_all", 3), ("step", 0), ("restart",),
        ),
    ),
}  # fmt: skip


played: dict[int, Counter[str]] = {}
"""Seed -> what the schedule reached, of those that were played already."""


def outcome(seed: int, config: Any) -> Counter[str]:
    """What the schedule of a seed reached; it is played once."""
    if seed not in played:
        played[seed] = play(make_schedule(seed), config)
    return played[seed]


def complaint(error: Exception) -> str:
    """What is wrong, without what differs from one schedule to another like it."""
    return type(error).__name__ + re.sub(r"\d+|object at \S+|\[.*|\{.*|(?<=block )\w+", "", str(error))[:80]


def failure(schedule: Schedule, config: Any, broken: Break | None = None) -> Exception | None:
    """How a schedule fails, if it does."""
    try:
        play(schedule, config, broken)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_whatever_happens_answers_are_right_and_nothing_is_left(part: int, tiny_config: Any) -> None:
    for seed in range(part, NUM_SCHEDULES, NUM_PARTS):
        try:
            outcome(seed, tiny_config)
        except Exception as error:
            like = complaint(error)

            def fails_alike(other: Schedule, like: str = like) -> bool:
                found = failure(other, tiny_config)
                return found is not None and complaint(found) == like

            shortest = shrink(make_schedule(seed), fails_alike)
            raise AssertionError(f"seed {seed}: {error}\nShortest: {shortest}") from error


@pytest.mark.more
def test_schedules_reach_what_they_are_meant_to_reach(tiny_config: Any) -> None:
    total: Counter[str] = Counter()
    for seed in range(2 * NUM_SCHEDULES):
        total += outcome(seed, tiny_config)
    for name in (
        "loaded_blocks", "stored_blocks", "store_skipped_blocks", "deferred_stores", "evicted_blocks",
        "out_of_space_puts", "load_failures", "store_failures", "lookup_failures", "breaker_openings", "answered",
        "aborted", "promotion_waits", "promotion_missed_tokens", "rejected_drafts", "stale_outcomes",
        "store_dropped_blocks", "drained_calls",
    ):  # fmt: skip
        assert total[name], f"{name}: {total}"


def test_a_schedule_has_one_outcome(tiny_config: Any) -> None:
    for seed in range(10):
        assert play(make_schedule(seed), tiny_config) == outcome(seed, tiny_config)


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_counterexample(name: str, tiny_config: Any) -> None:
    play(COUNTEREXAMPLES[name], tiny_config)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_simulation_finds_a_broken_connector(broken: Break, tiny_config: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)  # An error here is one of the test: the connector does not have what is to be broken.
    seeds = (FOUND_BY.get(broken.__name__, 0), *range(MAX_TO_FIND))
    found = next(filter(None, (failure(make_schedule(seed), tiny_config, broken) for seed in seeds)), None)
    assert found is not None, f"{MAX_TO_FIND} schedules did not find it"
    assert "AttributeError" not in repr(found), found
