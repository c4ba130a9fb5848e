"""The interval of what loading has saved: right where it can be worked out by hand, and 95 % of the time."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import NormalDist

import pytest

from kvpool.reports import MAX_SIZE_CLASS, FirstTokenTimes
from kvpool_server.pairs import Pair
from kvpool_server.reports.saving import MAX_SAVED_S, MIN_REQUESTS, measured, t_quantile
from kvpool_server.reports.totals import MAX_TOTAL, Measurements

PAIR = Pair("model", "acme")


def times(size_class: int, is_held_out: bool, values: list[float]) -> FirstTokenTimes:
    return FirstTokenTimes(size_class, is_held_out, len(values), sum(values), sum(each * each for each in values))


def totals(*classes: FirstTokenTimes) -> Measurements:
    found = Measurements()
    for each in classes:  # As many reports: they add up.
        found.add([each])
    return found


@pytest.mark.parametrize(
    ("freedom", "expected"), [(10, 2.22814), (19, 2.09302), (30, 2.04227), (100, 1.98397), (1e9, 1.95996)]
)
def test_quantiles_are_those_of_the_tables(freedom: float, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-3)


def test_an_example_by_hand() -> None:
    """Means 1.5 and 3.5 of 40 and 20 requests: 40 * 2 seconds, and Welch's 37.5 degrees of freedom."""
    found = measured(PAIR, totals(times(5, False, [1.0, 2.0] * 20), times(5, True, [3.0, 4.0] * 10)))
    assert found is not None
    assert (found.num_loaded, found.num_held_out, found.num_compared) == (40, 20, 40)
    assert found.saved_seconds == pytest.approx(80.0)
    s_loaded, s_held_out = 10 / 39 / 40, 5 / 19 / 20
    freedom = (s_loaded + s_held_out) ** 2 / (s_loaded**2 / 39 + s_held_out**2 / 19)
    assert freedom == pytest.approx(37.5, abs=0.2)
    half = 40 * t_quantile(freedom) * (s_loaded + s_held_out) ** 0.5
    assert found.high_seconds - 80 == pytest.approx(half) == pytest.approx(80 - found.low_seconds)


def test_too_few_requests_give_no_number() -> None:
    few, many = [1.0, 2.0] * (MIN_REQUESTS // 2 - 1), [1.0, 2.0] * MIN_REQUESTS
    found = measured(PAIR, totals(times(5, False, many), times(5, True, few), times(6, False, many)))
    assert found is not None
    assert found.num_compared == 0 and found.saved_seconds == found.low_seconds == found.high_seconds == 0
    assert (found.num_loaded, found.num_held_out) == (4 * MIN_REQUESTS, len(few))
    assert measured(PAIR, Measurements()) is None


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Two size classes, skewed times, unequal variances; the truth is what loaded requests save on average."""
    picks, num_right, trials = random.Random(7), 0, 400
    for _ in range(trials):
        classes, truth = [], 0.0
        for size, loaded_s, held_out_s, count, num_held_out in ((6, 0.1, 0.3, 300, 40), (9, 0.2, 1.5, 100, 25)):
            classes += [
                times(size, False, [picks.gammavariate(4, loaded_s / 4) for _ in range(count)]),
                times(size, True, [picks.gammavariate(2, held_out_s / 2) for _ in range(num_held_out)]),
            ]
            truth += count * (held_out_s - loaded_s)
        found = measured(PAIR, totals(*classes))
        assert found is not None
        num_right += found.low_seconds <= truth <= found.high_seconds
    spread = NormalDist().inv_cdf(0.9999) * (0.95 * 0.05 / trials) ** 0.5
    assert 0.95 - spread - 0.01 < num_right / trials < 0.95 + spread


def test_made_up_figures_give_a_number_all_the_same() -> None:
    found = measured(PAIR, totals(FirstTokenTimes(3, False, 50, 1e7, 0.0), FirstTokenTimes(3, True, 50, 0.0, 1e14)))
    assert found is not None and found.low_seconds <= found.saved_seconds <= found.high_seconds


@pytest.mark.parametrize("square", [5e-324, 1e-300, 1e-200, 1e-100, 1e14])
def test_the_interval_scales_with_its_times(square: float) -> None:
    found = measured(PAIR, totals(*(FirstTokenTimes(3, is_held_out, 20, 0.0, square) for is_held_out in (False, True))))
    assert found is not None
    expected = t_quantile(38) * (2 * 20 * square / 19) ** 0.5
    assert found.high_seconds == pytest.approx(expected, rel=1e-3, abs=1e-150) == -found.low_seconds


def test_a_saving_beyond_belief_is_bounded() -> None:
    """A mean of 5e5 seconds, of more requests than a reply could otherwise tell of."""
    loaded, held_out = FirstTokenTimes(3, False, 1 << 40), FirstTokenTimes(3, True, 20, 1e7, 1e14)
    for one, other, sign in (
        (loaded, held_out, 1),
        (replace(held_out, held_out=False), replace(loaded, held_out=True), -1),
    ):
        found = measured(PAIR, totals(*[one] * 3, other))
        assert found is not None and sign * found.saved_seconds > 0
        assert -MAX_SAVED_S <= found.low_seconds <= found.saved_seconds <= found.high_seconds <= MAX_SAVED_S


def test_counts_of_all_size_classes_together_have_64_bits() -> None:
    added = totals()
    for size_class in range(MAX_SIZE_CLASS + 1):
        for is_held_out in (False, True):
            added.first_token_times[size_class, is_held_out] = FirstTokenTimes(size_class, is_held_out, MAX_TOTAL)
            added.add([FirstTokenTimes(size_class, is_held_out, 1 << 40)])
    found = measured(PAIR, added)
    assert found is not None
    assert found.num_compared == found.num_loaded == found.num_held_out < 1 << 64
