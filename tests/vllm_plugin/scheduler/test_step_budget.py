"""What one step may cost; `test_scheduler.py` shows what is computed beyond that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.clock import FakeClock
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler import lookups
from vllm_plugin.scheduler.lookups import LONG_STEP_S, MAX_WAIT_SHARE, MAX_WALKS_S, MIN_WAIT_S, WALK_S, StepBudget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(lookups, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(lookups, "MAX_BEGIN_S", 1e-3)
    return clock


@pytest.mark.parametrize(
    ("local_tokens", "is_lookup", "most"),
    [(131_072, False, 1), (32_768, False, 1), (32_768, True, 5), (0, False, int(MAX_WALKS_S / WALK_S))],
)
def test_few_may_wait_whose_prefix_is_long(local_tokens: int, is_lookup: bool, most: int) -> None:
    budget = StepBudget(Recorder())
    assert sum(budget.may_wait(local_tokens, is_lookup) for _ in range(1_000)) == most


@pytest.mark.parametrize(("step_s", "times"), [(0.001, 1), (0.05, 1), (0.1, 2), (0.25, 5), (60.0, 5)])
def test_a_longer_step_has_more_in_proportion(clock: FakeClock, step_s: float, times: int) -> None:
    budget = StepBudget(Recorder())
    with budget:
        clock.advance(step_s)
    assert budget.may_wait(32_768) and not budget.may_wait(32_768)
    budget.waited(1.0)
    budget.new_step()
    assert budget.may_wait(32_768), "each step has a budget of its own"
    assert budget.wait_s(clock()) == pytest.approx(max(MIN_WAIT_S, MAX_WAIT_SHARE * min(step_s, LONG_STEP_S)))
    for spent_s, waited_s, may_begin in ((1.9e-3, 1e-3, True), (0.2e-3, 0.0, False)):
        with budget:
            clock.advance(times * spent_s)
            budget.waited(times * waited_s)  # Which is no work.
        assert budget.may_begin == may_begin


def test_a_step_waits_only_where_the_pool_usually_answers_in_time(clock: FakeClock) -> None:
    budget, ahead, sent_at = StepBudget(Recorder()), StepBudget(Recorder(), is_async=True), clock()
    clock.advance(0.1)
    budget.new_step()
    assert budget.wait_s(clock()) == pytest.approx(0.01), "nothing is known"
    assert ahead.wait_s(clock()) == pytest.approx(0.0125), "the device works meanwhile"
    for _ in range(100):
        budget.answered(0.015)
    assert budget.wait_s(clock()) == MIN_WAIT_S
    assert budget.wait_s(sent_at) == pytest.approx(0.01), "the answer is due"
    clock.advance(0.2)
    assert budget.wait_s(clock()) == pytest.approx(0.02), "a longer step"
