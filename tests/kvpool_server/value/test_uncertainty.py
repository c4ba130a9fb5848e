"""How far estimates say that they may be off."""

from __future__ import annotations

import random

import pytest

from kvpool.value import SIZES, USUAL_ERROR
from kvpool_server.value.tally import GROUPS, HITS, MISSES, Tally, groups_of
from kvpool_server.value.uncertainty import slopes, uncertainties

FLAT = [0.5] * len(SIZES)
NO_ERRORS = [0.0] * len(SIZES)
SAMPLES = [(0.1, 640)] * len(SIZES)


def test_a_flat_curve_is_as_good_as_the_self_check_says() -> None:
    assert uncertainties(FLAT, NO_ERRORS, SAMPLES, 0.0) == [USUAL_ERROR] * len(SIZES)
    assert uncertainties(FLAT, NO_ERRORS, SAMPLES, 0.07) == [0.07] * len(SIZES)


def test_a_cliff_makes_the_sizes_on_both_sides_uncertain() -> None:
    found = uncertainties([0.0, 0.0, 0.0, 0.9, 0.9, 0.9], NO_ERRORS, SAMPLES, 0.0)
    assert found[2] == found[3] > 0.05
    assert found[0] == found[1] == found[4] == found[5] == USUAL_ERROR


def test_a_loop_is_taken_to_go_on_beyond_the_largest_size() -> None:
    ratios = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]
    assert slopes(ratios)[-1] == pytest.approx(0.32)
    assert slopes([0.3, 0.4, 0.45, 0.475, 0.4875, 0.49])[-1] == pytest.approx(0.0025)


def test_more_samples_and_a_whole_sample_are_surer() -> None:
    steep, errors = [0.1, 0.2, 0.4, 0.6, 0.8, 0.9], [0.02] * len(SIZES)
    few, many, all_blocks = (
        uncertainties(steep, errors, [(rate, count)] * len(SIZES), 0.0)
        for rate, count in ((0.1, 160), (0.1, 2_560), (1.0, 2_560))
    )
    assert all(less > more > most for less, more, most in zip(few, many, all_blocks, strict=True))


@pytest.mark.parametrize("num_blocks", [100, 1_000])
def test_the_standard_error_is_the_spread_of_other_samples(num_blocks: int) -> None:
    """Of blocks that are looked up very often or seldom, each misses or hits as a whole."""
    picks = random.Random(3)
    weights = [picks.paretovariate(1.5) for _ in range(20 * num_blocks)]
    is_hit = [picks.random() < 0.5 for _ in weights]
    total = sum(weights)
    estimates, errors = [], []
    for _ in range(60):
        tally = Tally()
        for nth in picks.sample(range(len(weights)), num_blocks):
            block = [(0, picks.getrandbits(60))]
            tally.count(block, groups_of(block), int(is_hit[nth]), 0, weights[nth])
        tokens = [0.0, total]
        estimates.append(tally.hit_tokens(tokens) / total)
        errors.append(tally.standard_error(tokens) / total)
    mean = sum(estimates) / len(estimates)
    spread = (sum((each - mean) ** 2 for each in estimates) / len(estimates)) ** 0.5
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.5)


def test_hardly_any_sampled_blocks_know_nothing() -> None:
    tally = Tally()
    assert tally.standard_error([0.0, 1_000.0]) == pytest.approx(500)
    block = [(0, 1 << 40)]
    for _ in range(2):
        tally.count(block, groups_of(block), 0, 0, 1.0)
    assert tally.standard_error([0.0, 1_000.0]) >= 250
    assert (HITS, MISSES) == (0, 1) and len(tally.hits) == 2 * GROUPS
