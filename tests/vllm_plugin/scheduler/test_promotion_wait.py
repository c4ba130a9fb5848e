from __future__ import annotations

import math

import pytest

from vllm_plugin.scheduler.lookups import MAX_ANSWER_S, STUCK_S, PromotionWait

RETRY_S = 0.02


def waited_s(wait: PromotionWait, compute_s: float = math.inf, brings: int = 1, retry_s: float = RETRY_S) -> float:
    """How long it lasts with a pool that answers after `retry_s`, and a tier that brings so many blocks meanwhile."""
    now, num_ready, asked_at = 100.0, 0, None
    while wait.lasts(now, num_ready, compute_s, retry_s, asked_at):
        assert wait.is_due(now)
        assert not wait.has_ended(now + retry_s)
        asked_at = now
        now, num_ready = now + retry_s, num_ready + brings
        assert now < 200
    return now - 100.0


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 1.0, 7.0])
def test_it_lasts_as_long_as_it_may(wait_s: float) -> None:
    assert wait_s - 2 * RETRY_S <= waited_s(PromotionWait(wait_s)) <= wait_s


@pytest.mark.parametrize("compute_s", [0.001, 0.05, 0.5])
def test_it_lasts_no_longer_than_computing_would(compute_s: float) -> None:
    assert waited_s(PromotionWait(1.0), compute_s) <= compute_s
    assert waited_s(PromotionWait(0.1), compute_s) <= 0.1


def test_it_is_never_longer_than_computing_what_is_left() -> None:
    wait = PromotionWait(1.0)
    assert wait.lasts(100.0, 0, 0.5, RETRY_S)
    assert wait.lasts(100.1, 90, 0.05, RETRY_S)
    assert not wait.has_ended(100.14)
    assert wait.has_ended(100.16)


def test_a_slow_tier_has_two_more_answers_to_bring_something() -> None:
    assert waited_s(PromotionWait(60.0), brings=0, retry_s=1.0) == 2.0


def test_a_tier_that_goes_on_after_a_pause_is_waited_for() -> None:
    wait = PromotionWait(60.0)
    assert wait.lasts(100.0, 0, math.inf, RETRY_S)
    assert wait.lasts(100.0 + 0.9 * STUCK_S, 0, math.inf, RETRY_S)
    assert wait.lasts(100.0 + 1.1 * STUCK_S, 1, math.inf, RETRY_S)
    assert wait.lasts(100.0 + 1.9 * STUCK_S, 1, math.inf, RETRY_S)


def test_an_answer_that_would_come_too_late_is_not_waited_for() -> None:
    assert not PromotionWait(1.0).lasts(100.0, 0, math.inf, 1.0)
    assert PromotionWait(1.0).lasts(100.0, 0, math.inf, 0.9)


def test_the_pool_answers_before_the_wait_ends() -> None:
    wait = PromotionWait(1.0)
    assert wait.lasts(100.0, 0, math.inf, RETRY_S)
    assert wait.answer_s(100.0) == MAX_ANSWER_S
    assert 0 < wait.answer_s(100.99) < 0.01
    assert wait.answer_s(101.5) == 0
    assert wait.lasts(100.0, 0, 0.05, RETRY_S)
    assert wait.answer_s(100.0) <= 0.05
