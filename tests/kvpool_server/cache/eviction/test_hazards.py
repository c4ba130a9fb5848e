"""Densities beside what can be counted by hand."""

import random

from kvpool_server.cache.eviction.hit_density_model import EDGES, HazardModel

OFTEN, LATE, NEVER = 0, 1, 2


def _learned(num_blocks: int = 4_000) -> tuple[HazardModel, int]:
    """Half of OFTEN's blocks are asked for after 10 to 50 calls, half of LATE's after 900 to 1,100, none of NEVER's."""
    hazards, picks = HazardModel(3), random.Random(0)
    events: list[tuple[int, int, int]] = []
    for now in range(num_blocks):
        for kind, (soonest, latest) in ((OFTEN, (10, 50)), (LATE, (900, 1_100))):
            if picks.random() < 0.5:
                events.append((now + picks.randint(soonest, latest), kind, now))
    events.sort(reverse=True)
    for now in range(num_blocks):
        for kind in (OFTEN, LATE, NEVER):
            hazards.began(kind, now, 1)
        while events and events[-1][0] <= now:
            _, kind, since = events.pop()
            hazards.asked(kind, since, now, 1)
        if now % 256 == 0:
            hazards.learn(now)
    hazards.learn(num_blocks)
    return hazards, num_blocks


def test_what_comes_back_soon_is_worth_more_than_late_and_that_more_than_never() -> None:
    hazards, now = _learned()
    densities = [hazards.density(kind, now, now) for kind in (OFTEN, LATE, NEVER)]
    assert densities[0] > 5 * densities[1] > 10 * densities[2]


def test_a_block_is_worth_more_the_nearer_its_time_and_little_after_it() -> None:
    hazards, now = _learned()
    young, near, past = (hazards.density(LATE, now - age, now) for age in (0, 800, 1_700))
    assert near > 1.5 * young
    assert past < young / 3


def test_blocks_that_have_not_had_the_time_say_nothing_against_their_kind() -> None:
    hazards, now = _learned()
    before = hazards.density(LATE, now - 800, now)
    for _ in range(5_000):
        hazards.began(LATE, now, 1)
    hazards.learn(now + 1)
    assert hazards.density(LATE, now - 800, now + 1) > before / 2


def test_a_crowd_of_which_none_has_come_back_is_worth_less_than_its_kind() -> None:
    hazards, now = _learned()
    for _ in range(5_000):
        hazards.began(OFTEN, now, 1)
    later = now + 60
    ordinary = hazards.density(OFTEN, now - 200, now - 140)
    assert hazards.density(OFTEN, now, later) < ordinary / 3


def test_whatever_the_age_there_is_an_answer() -> None:
    hazards = HazardModel(1)
    for age in (0, 1, int(EDGES[-1]) - 1, int(EDGES[-1]) + 1, 10**12):
        hazards.asked(0, 0, age, 1)
        assert hazards.density(0, 0, age) >= 0
