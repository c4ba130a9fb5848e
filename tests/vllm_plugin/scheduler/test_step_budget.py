"""What may wait, and what is computed instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpool.protocol.errors import UnavailableError
from tests.support.clock import FakeClock
from tests.support.processes import wait_for
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, blocks, fill, stored
from tests.vllm_plugin.tier import Tier
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler import step_budget
from vllm_plugin.scheduler.load_policy import Stage
from vllm_plugin.scheduler.step_budget import (
    LONG_STEP_S,
    MAX_LOOKUP_WALKS_S,
    MAX_WAIT_SHARE,
    MAX_WALKS_S,
    MIN_WAIT_S,
    WALK_S,
    StepBudget,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(step_budget, "time", SimpleNamespace(monotonic=clock))
    return clock


def num_waiting(budget: StepBudget, local_tokens: int, is_lookup: bool = False) -> int:
    return sum(budget.may_wait(local_tokens, is_lookup) for _ in range(1_000))


def test_few_may_wait_whose_prefix_is_long_and_many_whose_is_not() -> None:
    assert num_waiting(StepBudget(Recorder()), 131_072) == 1, "one always may"
    assert num_waiting(StepBudget(Recorder()), 32_768) == 1
    assert num_waiting(StepBudget(Recorder()), 32_768, is_lookup=True) == 5
    assert num_waiting(StepBudget(Recorder()), 0) == int(MAX_WALKS_S / WALK_S)
    assert num_waiting(StepBudget(Recorder()), 0, is_lookup=True) == int(MAX_LOOKUP_WALKS_S / WALK_S)


@pytest.mark.parametrize(("step_s", "times"), [(0.001, 1), (0.05, 1), (0.1, 2), (0.25, 5), (60.0, 5)])
def test_a_longer_step_has_more_in_proportion(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, step_s: float, times: int
) -> None:
    monkeypatch.setattr(step_budget, "MAX_BEGIN_S", 1e-3)
    budget = StepBudget(Recorder())
    with budget:
        clock.advance(step_s)
    assert budget.may_wait(32_768) and not budget.may_wait(32_768)
    budget.waited(1.0)
    budget.new_step()
    assert budget.may_wait(32_768), "each step has a budget of its own"
    assert budget.wait_s(clock()) == pytest.approx(max(MIN_WAIT_S, MAX_WAIT_SHARE * min(step_s, LONG_STEP_S)))
    with budget:
        clock.advance(0.9 * times * step_budget.MAX_BEGIN_S)
    assert budget.may_begin
    with budget:
        clock.advance(0.2 * times * step_budget.MAX_BEGIN_S)
    assert not budget.may_begin


def test_looking_ahead_ends_with_the_budget_of_the_step(
    alone: Core, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests wait, and however few tokens are looked up for them."""
    monkeypatch.setattr(alone.side.admission, "look_up", lambda *_: clock.advance(2 * step_budget.MAX_BEGIN_S))
    for nth in range(10):
        alone.side.queue.put(make_request(f"r{nth}", tokens(100, nth)), Stage.WAITING)
    alone.step()
    assert len(alone.side.queue._new) == 9


def test_the_last_step_counts_or_the_time_since_if_it_is_longer(clock: FakeClock) -> None:
    budget = StepBudget(Recorder())
    for lasted_s, wait_s in ((0.1, 0.01), (0.02, 0.002), (0.01, 0.001)):
        clock.advance(lasted_s)
        budget.new_step()
        assert budget.wait_s(clock()) == pytest.approx(wait_s)
    clock.advance(0.2)
    assert budget.wait_s(clock()) == pytest.approx(0.02), "the step that is being scheduled was behind an idle time"


@pytest.mark.parametrize(("step_s", "wait_s"), [(0.012, 0.003), (0.05, 0.0125), (0.1, 0.0125), (0.2, 0.02), (9, 0.025)])
def test_a_short_step_waits_longer_where_the_device_works_meanwhile(
    clock: FakeClock, step_s: float, wait_s: float
) -> None:
    budget = StepBudget(Recorder(), is_async=True)
    clock.advance(step_s)
    budget.new_step()
    assert budget.wait_s(clock()) == pytest.approx(wait_s)


def test_a_step_waits_only_where_the_pool_usually_answers_in_time(clock: FakeClock) -> None:
    budget, sent_at = StepBudget(Recorder()), clock()
    clock.advance(0.1)
    budget.new_step()
    assert budget.wait_s(clock()) == pytest.approx(0.01), "nothing is known"
    for _ in range(100):
        budget.answered(0.015)
    assert budget.wait_s(clock()) == MIN_WAIT_S
    assert budget.wait_s(sent_at) == pytest.approx(0.01), "the answer is due"
    clock.advance(0.2)
    assert budget.wait_s(clock()) == pytest.approx(0.02), "a longer step"


def test_a_call_that_fails_counts_for_its_deadline_at_most(alone: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks about a request that was looked up ahead when it comes to it, which may be much later."""
    tier, request = Tier(alone.side.stages.sessions[0], up=6, coming=0), make_request("a", tokens(100, "a"))
    tier.is_slow = True
    assert alone.side.matched_tokens(request, 0) == (None, False)
    told: list[float] = []
    monkeypatch.setattr(alone.side.budget, "answered", told.append)
    alone.side.admission.candidates["a"].lookup.sent_at -= 60.0
    tier.error = UnavailableError("away")
    alone.step()
    assert alone.side.matched_tokens(request, 0) == (0, False)
    (told_s,) = told
    assert told_s == pytest.approx(alone.side.lookups._config.lookup_timeout_ms / 1000)


def test_waiting_for_an_answer_is_no_work(clock: FakeClock) -> None:
    budget = StepBudget(Recorder())
    with budget:
        clock.advance(step_budget.MAX_BEGIN_S)
        budget.waited(step_budget.MAX_BEGIN_S / 2)
    assert budget.may_begin


@pytest.fixture
def one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "MAX_WALKS_S", 0.0)
    monkeypatch.setattr(step_budget, "MAX_LOOKUP_WALKS_S", 0.0)


@pytest.mark.usefixtures("one_waits")
def test_beyond_the_bound_a_request_takes_what_is_up_instead_of_waiting_for_a_tier(alone: Core) -> None:
    first, second = (make_request(name, tokens(100, name)) for name in "ab")
    for request in (first, second):
        fill(alone, request.block_hashes)
    Tier(alone.side.stages.sessions[0], up=2, coming=4, retry_ms=500)
    for request in (first, second):  # Alone in its step, each waits.
        wait_for(lambda request=request: _is_waiting(alone, request), "a lookup that waits for the tier")
    alone.step()
    assert alone.side.matched_tokens(first, 0) == (None, False)
    assert alone.side.matched_tokens(second, 0) == (blocks(2), True)
    assert alone.counted()["declined_waits"] == 1


def _is_waiting(core: Core, request: object) -> bool:
    core.step()
    core.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    candidate = core.side.admission.candidates.get(request.request_id)  # type: ignore[attr-defined]
    return candidate is not None and candidate.is_waiting


@pytest.mark.usefixtures("one_waits")
def test_beyond_the_bound_a_request_is_computed_instead_of_waiting_for_its_lookup(alone: Core) -> None:
    Tier(alone.side.stages.sessions[0], up=6, coming=0).is_slow = True
    first, second = (make_request(name, tokens(100, name)) for name in "ab")
    assert alone.side.matched_tokens(first, 0) == (None, False)
    assert alone.side.matched_tokens(second, 0) == (0, False)
    alone.step()
    assert alone.side.matched_tokens(second, 0) == (None, False), "it was not admitted, and may wait now"


@pytest.mark.usefixtures("one_waits")
def test_beyond_the_bound_a_request_is_computed_instead_of_waiting_for_room(alone: Core) -> None:
    large, second, third = (make_request(name, tokens(800, name)) for name in "abc")
    for request in (large, second, third):
        fill(alone, request.block_hashes)
        assert alone.ask(request) == blocks(49)
    alone.allocate(large, blocks(49))
    alone.step()
    assert alone.side.matched_tokens(second, 0) == (None, False)
    assert alone.side.matched_tokens(third, 0) == (0, False)


def test_what_comes_late_in_a_long_step_begins_with_the_next(alone: Core, clock: FakeClock) -> None:
    request = stored(alone)
    with alone.side.budget:
        clock.advance(2 * step_budget.MAX_BEGIN_S)
    assert alone.side.matched_tokens(request, 0) == (None, False)
    assert not alone.side.admission.candidates
    alone.step()
    assert alone.ask(request) == blocks(6)
