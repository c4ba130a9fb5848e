"""Densities beside what can be counted by hand; of the ghosts, the latest are remembered, whatever their places are."""

import gc
import random
from collections import OrderedDict

import pytest

from kvpool_server.cache.eviction import hit_density_model
from kvpool_server.cache.eviction.hit_density_model import EDGES, MAX_OF_PLACE, NUM_PLACES, Ghosts, HitDensityModel

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


def test_ghosts_are_what_was_added_and_not_popped_or_forgotten() -> None:
    dice, ghosts, model = random.Random(0), Ghosts(), dict[int, int]()
    for stamp in range(20_000):
        block = dice.randrange(2_000)
        place = block % NUM_PLACES
        if dice.random() < 0.6:
            ghosts.add(place, block, stamp)
            model[block] = stamp
        else:
            assert ghosts.pop(place, block) == model.pop(block, None)
        assert len(ghosts) == len(model)


def test_the_oldest_ghosts_are_forgotten_first_but_for_the_chance_of_their_places() -> None:
    dice, ghosts = random.Random(0), Ghosts()
    places = [dice.randrange(NUM_PLACES) for _ in range(100_000)]
    for block, place in enumerate(places):
        ghosts.add(place, block, block)
        if len(ghosts) > 50_000:
            ghosts.forget_one()
    assert len(ghosts) == 50_000
    known = [block for block, place in enumerate(places) if ghosts.pop(place, block) is not None]
    assert len(ghosts) == 0
    assert sum(block >= 50_000 for block in known) > 0.9 * len(known)


def test_names_that_end_alike_forget_each_other_and_no_others() -> None:
    ghosts = Ghosts()
    ghosts.add(1, -1, 5)
    for block in range(MAX_OF_PLACE + 10):
        ghosts.add(7, block, block)
    assert len(ghosts) == MAX_OF_PLACE + 1
    assert ghosts.pop(7, 9) is None and ghosts.pop(7, 10) == 10 and ghosts.pop(1, -1) == 5


def test_ghosts_of_one_place_are_forgotten_in_the_order_in_which_they_came() -> None:
    dice, ghosts, model = random.Random(0), Ghosts(), OrderedDict[int, int]()
    for stamp in range(50_000):
        block = dice.randrange(500)
        match dice.randrange(4):
            case 0 | 1:
                ghosts.add(0, block, stamp)
                model[block] = stamp
                model.move_to_end(block)
            case 2:
                assert ghosts.pop(0, block) == model.pop(block, None)
            case 3 if model:
                ghosts.forget_one()
                model.popitem(last=False)
        assert len(ghosts) == len(model)
    assert {block: ghosts.pop(0, block) for block in range(500)} == {block: model.get(block) for block in range(500)}


def test_the_garbage_collector_has_next_to_nothing_to_examine() -> None:
    gc.collect()
    before = {id(each) for each in gc.get_objects()}
    ghosts = Ghosts()
    for block in range(100_000):
        ghosts.add(block % NUM_PLACES, block << 32, block << 32)
        if len(ghosts) > 50_000:
            ghosts.forget_one()
    made = [each for each in gc.get_objects() if id(each) not in before and each is not before]
    assert len(ghosts) == 50_000
    assert len(made) + sum(len(gc.get_referents(each)) for each in made) < 20 * NUM_PLACES


def test_a_model_that_is_made_late_learns_the_same_and_pays_for_no_estimate_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early, late = HitDensityModel(2), HitDensityModel(2)
    with monkeypatch.context() as patched:
        patched.setattr(hit_density_model, "_estimate", lambda *_: pytest.fail("it has observed nothing"))
        assert not late.learn_if_due(1_000_000) and HitDensityModel(2)
    for model, first in ((early, 0), (late, 1_000_000)):
        for now in range(first, first + 1_000):
            model.start(0, now, 1)
            if now - first >= 100:
                model.hit(0, now - 100, now, 1)
            model.learn_if_due(now)
    ages = [0, 50, 150, 900]
    assert [early.density(0, 1_000 - age, 1_000) for age in ages] == pytest.approx(
        [late.density(0, 1_001_000 - age, 1_001_000) for age in ages]
    )
