"""Ghosts: the latest are remembered, whatever their places are."""

from __future__ import annotations

import random

from kvpool_server.cache.eviction.ghosts import MAX_OF_PLACE, NUM_PLACES, Ghosts


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
    ghosts.add(1, "other", 5)
    for block in range(MAX_OF_PLACE + 10):
        ghosts.add(7, block, block)
    assert len(ghosts) == MAX_OF_PLACE + 1
    assert ghosts.pop(7, 9) is None and ghosts.pop(7, 10) == 10 and ghosts.pop(1, "other") == 5
