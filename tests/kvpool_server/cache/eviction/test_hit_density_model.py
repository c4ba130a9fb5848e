"""Densities beside what can be counted by hand; of the ghosts, the latest are remembered, whatever their places are."""

import gc
import random
from collections import OrderedDict

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


def test_a_block_is_worth_more_the_more_often_its_kind_comes_back_and_the_nearer_its_time_is() -> None:
    model, now = _learned()
    densities = [model.density(kind, now, now) for kind in (OFTEN, LATE, NEVER)]
    assert densities[0] > 5 * densities[1] > 10 * densities[2]
    young, near, past = (model.density(LATE, now - age, now) for age in (0, 800, 1_700))
    assert near > 1.5 * young and past < young / 3
    for kind in (OFTEN, LATE):
        for _ in range(5_000):
            model.start(kind, now, 1)
    model.learn(now + 1)
    assert model.density(LATE, now - 800, now + 1) > near / 2, "blocks that have not had the time count against it"
    ordinary = model.density(OFTEN, now - 200, now - 140)
    assert model.density(OFTEN, now, now + 60) < ordinary / 3, "a crowd of which none has come back is worth as much"


def test_whatever_the_age_there_is_an_answer() -> None:
    model = HitDensityModel(1)
    for age in (0, 1, int(EDGES[-1]) - 1, int(EDGES[-1]) + 1, 10**12):
        model.hit(0, 0, age, 1)
        assert model.density(0, 0, age) >= 0


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
