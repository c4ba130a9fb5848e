"""The server's memory of its numbers: what it keeps, for how long, and in how much memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvpool.errors import InvalidRequestError
from kvpool_server.history import INTERVAL_S, MAX_BYTES, MAX_POINTS, MAX_SERIES, SPANS, History
from tests.support.clock import FakeClock

BEGAN = 1_700_000_000.0
HOUR_S, DAY_S = 3_600, 86_400
MIB = 1 << 20


class Kept:
    """A history whose server samples one counter, which is the number of seconds since the start."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        began = self.clock()
        self.history = History(self.clock, lambda: BEGAN)
        self._began = began

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds // INTERVAL_S)):
            self.history.record({("seconds",): self.clock() - self._began})
            self.clock.advance(INTERVAL_S)


@pytest.mark.parametrize(
    ("span", "ran_s", "interval_s", "length_s"),
    [
        ("15m", HOUR_S, 10, 900),
        ("1h", 3 * HOUR_S, 10, HOUR_S),
        ("6h", 8 * HOUR_S, 60, 6 * HOUR_S),
        ("24h", 30 * HOUR_S, 600, DAY_S),
        ("7d", 9 * DAY_S, 1_800, 7 * DAY_S),
    ],
)
def test_a_span_has_a_sample_each_interval(span: str, ran_s: int, interval_s: int, length_s: int) -> None:
    kept = Kept()
    kept.run(ran_s)
    part = kept.history.part(span)
    values = part.values["seconds",]
    assert part.interval_s == interval_s
    assert np.diff(part.times).tolist() == [interval_s] * (len(part.times) - 1)
    assert (part.times - BEGAN).tolist() == values.tolist()
    assert length_s - 2 * interval_s <= part.times[-1] - part.times[0] <= length_s
    assert ran_s - 2 * interval_s <= values[-1] < ran_s
    assert len(part.times) <= MAX_POINTS


@pytest.mark.parametrize("span", SPANS)
def test_asking_since_the_newest_sample_gives_each_sample_once(span: str) -> None:
    kept = Kept()
    kept.run(2 * HOUR_S)
    seen: list[float] = []
    for _ in range(60):
        part = kept.history.part(span, seen[-1] if seen else 0.0)
        seen += part.times.tolist()
        kept.run(90)
    whole = kept.history.part(span).times.tolist()
    assert seen == sorted(set(seen))
    assert [at for at in whole if at <= seen[-1] and at not in seen] == []
    assert kept.history.part(span, seen[-1] + HOUR_S).times.tolist() == []


def test_a_series_that_comes_later_is_nan_before() -> None:
    kept = Kept()
    kept.history.record({("one",): 1})
    kept.clock.advance(INTERVAL_S)
    kept.history.record({("two",): 2})
    values = kept.history.part("1h").values
    np.testing.assert_array_equal(values["one",], [1, np.nan])
    np.testing.assert_array_equal(values["two",], [np.nan, 2])


def test_a_full_history_takes_few_mib_whatever_is_recorded() -> None:
    kept = Kept()
    names = itertools.count()
    for _ in range(100):
        kept.history.record({("hostile", str(next(names))): 1.0 for _ in range(50)})
        kept.clock.advance(INTERVAL_S)
    assert len(kept.history.part("1h").values) == MAX_SERIES
    assert kept.history.nbytes <= MAX_BYTES
    modest = Kept()
    modest.run(HOUR_S)
    assert modest.history.nbytes < MIB


def test_how_much_a_counter_has_grown() -> None:
    kept = Kept()
    kept.run(HOUR_S)
    grown = kept.history.grown(("seconds",), 600, HOUR_S)
    assert 590 <= grown <= 610
    assert kept.history.grown(("seconds",), 2 * HOUR_S, HOUR_S) == HOUR_S
    assert kept.history.grown(("unknown",), 600, 7) == 7
    assert kept.history.grown(("seconds",), 600, 0) == 0


def test_histories_of_two_boots_are_told_apart() -> None:
    assert History(boot="a").part("15m").boot == "a"


def test_times_ascend_although_the_hosts_clock_is_set_back() -> None:
    hosts = iter([BEGAN, BEGAN - DAY_S])
    clock = FakeClock()
    history = History(clock, lambda: next(hosts))
    for _ in range(3):
        history.record({("one",): 1})
        clock.advance(INTERVAL_S)
    assert history.part("1h").times.tolist() == [BEGAN, BEGAN + 10, BEGAN + 20]


def test_an_unknown_span_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidRequestError, match="span '2h' is unknown; give 15m, 1h, 6h, 24h, 7d"):
        History().part("2h")
