"""Two sides are compared without what depends on which of them starts first."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from benchmarks.cases.commit import MEASURES, OTHER, THIS, Timed, balanced_speed_ratio, sample


class _Side:
    """Takes `cost`, and 5 % more if it was the first of a pair to start; each start is off by up to 2 %."""

    def __init__(self, cost: float, running: list[int], luck: random.Random):
        self._seconds = cost * (1.05 if not running else 1.0) * luck.uniform(0.98, 1.02)
        self._luck = luck
        running.append(1)

    def seconds(self, measure: str) -> float:
        assert measure in MEASURES
        return self._seconds * self._luck.uniform(0.99, 1.01)


def _ratios(cost: float, starts: int = 16) -> list[tuple[float, float, float]]:
    luck, running = random.Random(0), list[int]()

    def start(cost: float, stack: ExitStack) -> Timed:
        side = _Side(cost, running, luck)
        stack.callback(running.pop)
        return side

    sides = {THIS: lambda stack: start(cost, stack), OTHER: lambda stack: start(1.0, stack)}
    taken = sample(sides, starts, rounds=5)
    assert set(taken) == set(MEASURES) and all(len(each) == starts for each in taken["put"].values())
    ratios = [balanced_speed_ratio(each[THIS], each[OTHER]) for each in taken.values()]
    return [(ratio.low, ratio.figure, ratio.high) for ratio in ratios]


def test_a_commit_is_as_fast_as_itself() -> None:
    for low, figure, high in _ratios(1.0):
        assert low <= 1.0 <= high and figure == pytest.approx(1.0, abs=0.02)


def test_a_slower_commit_is_slower() -> None:
    for low, figure, high in _ratios(1.1):
        assert low <= 1 / 1.1 <= high < 1.0 and figure == pytest.approx(1 / 1.1, abs=0.02)
