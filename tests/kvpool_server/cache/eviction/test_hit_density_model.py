"""Densities beside what can be counted by hand."""

import random

from kvpool_server.cache.eviction.hit_density_model import EDGES, HitDensityModel

OFTEN, LATE, NEVER = 0, 1, 2


def _learned(num_blocks: int = 4_000) -> tuple[HitDensityModel, int]:
    """Half of OFTEN's blocks are asked for after 10 to 50 calls, half of LATE's after 900 to 1,100, none of NEVER's."""
    model, picks = HitDensityModel(3), random.Random(0)
    events: list[tuple[int, int, int]] = []
    for now in range(num_blocks):
        for kind, (soonest, latest) in ((OFTEN, (10, 50)), (LATE, (900, 1_100))):
            if picks.random() < 0.5:
                events.append((now + picks.randint(soonest, latest), kind, now))
    events.sort(reverse=True)
    for now in range(num_blocks):
        for kind in (OFTEN, LATE, NEVER):
            model.start(kind, now, 1)
        while events and events[-1][0] <= now:
            _, kind, since = events.pop()
            model.hit(kind, since, now, 1)
        if now % 256 == 0:
            model.learn(now)
    model.learn(num_blocks)
    return model, num_blocks


def test_what_comes_back_soon_is_worth_more_than_late_and_that_more_than_never() -> None:
    model, now = _learned()
    densities = [model.density(kind, now, now) for kind in (OFTEN, LATE, NEVER)]
    assert densities[0] > 5 * densities[1] > 10 * densities[2]


def test_a_block_is_worth_more_the_nearer_its_time_and_little_after_it() -> None:
    model, now = _learned()
    young, near, past = (model.density(LATE, now - age, now) for age in (0, 800, 1_700))
    assert near > 1.5 * young
    assert past < young / 3


def test_blocks_that_have_not_had_the_time_say_nothing_against_their_kind() -> None:
    model, now = _learned()
    before = model.density(LATE, now - 800, now)
    for _ in range(5_000):
        model.start(LATE, now, 1)
    model.learn(now + 1)
    assert model.density(LATE, now - 800, now + 1) > before / 2


def test_a_crowd_of_which_none_has_come_back_is_worth_less_than_its_kind() -> None:
    model, now = _learned()
    for _ in range(5_000):
        model.start(OFTEN, now, 1)
    later = now + 60
    ordinary = model.density(OFTEN, now - 200, now - 140)
    assert model.density(OFTEN, now, later) < ordinary / 3


def test_whatever_the_age_there_is_an_answer() -> None:
    model = HitDensityModel(1)
    for age in (0, 1, int(EDGES[-1]) - 1, int(EDGES[-1]) + 1, 10**12):
        model.hit(0, 0, age, 1)
        assert model.density(0, 0, age) >= 0
