"""Ghosts: the latest are remembered, whatever their places are."""

from __future__ import annotations

import gc
import random
from collections import OrderedDict

from kvpool_server.cache.eviction.hit_density_model import MAX_OF_PLACE, NUM_PLACES, Ghosts


def test_they_are_what_was_added_and_not_popped_or_forgotten() -> None:
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


def test_the_oldest_are_forgotten_first_but_for_the_chance_of_their_places() -> None:
    dice, ghosts = random.Random(0), Ghosts()
    places = [dice.randrange(NUM_PLACES) for _ in range(100_000)]
    for block, place in enumerate(places):
        ghosts.add(place, block, block)
        if len(ghosts) > 50_000:
            ghosts.forget_one()
    assert len(ghosts) == 50_000
    known = [block for block, place in enumerate(places) if ghosts.pop(place, block) is not None]
    assert len(ghosts) == 0
    assert sum(block >= 50_000 for block in known) > 0.95 * len(known)


def test_names_that_end_alike_forget_each_other_and_no_others() -> None:
    ghosts = Ghosts()
    ghosts.add(1, -1, 5)
    for block in range(MAX_OF_PLACE + 10):
        ghosts.add(7, block, block)
    assert len(ghosts) == MAX_OF_PLACE + 1
    assert ghosts.pop(7, 9) is None and ghosts.pop(7, 10) == 10 and ghosts.pop(1, -1) == 5


def test_those_of_one_place_are_forgotten_in_the_order_in_which_they_came() -> None:
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
