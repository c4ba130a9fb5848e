"""Hits that are held out: chosen at random, counted by their cause, measured, and compared."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from kvpool.causes import Cause
from kvpool.types import BlockRun
from tests.support.clock import FakeClock
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler import holdout as holdout_module
from vllm_plugin.scheduler.holdout import Holdout, prompt_digest
from vllm_plugin.scheduler.load_policy import Verdict

LENGTH = 100
HIT = blocks(6)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Always:
    """Draws what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.value = 0.0
        monkeypatch.setattr(holdout_module, "_draw", lambda _: self.value)

    def hold_out(self, is_held_out: bool) -> None:
        self.value = 0.0 if is_held_out else 0.99


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Always:
    return Always(monkeypatch)


def named(name: str, prompt: str = "prompt", **options: Any) -> Request:
    return make_request(name, tokens(LENGTH, prompt), **options)


def test_the_share_is_the_one_that_was_asked_for(recorder: Recorder) -> None:
    one = Holdout(0.2, recorder)
    held = Counter[bool]()
    for nth in range(2_000):
        request: Any = SimpleNamespace(
            request_id=f"cmpl-{nth}", num_output_tokens=0, sampling_params=None, prompt_token_ids=None
        )
        one.asked(request)
        held[one.holds_out(request, 1_000)] += 1
        one.finished(request)
    assert 330 < held[True] < 470  # 0.2 of them, and five standard deviations.
    assert len(one) == 0


def test_engines_agree_on_a_request(recorder: Recorder) -> None:
    one, other = Holdout(0.5, recorder), Holdout(0.5, recorder)
    requests = [named(f"r{nth}") for nth in range(64)]
    for each in (one, other):
        for request in requests:
            each.asked(request)
    drawn = [one.holds_out(request, 64) for request in requests]
    assert drawn == [other.holds_out(request, 64) for request in requests]
    assert {True, False} == set(drawn)


def test_nothing_is_kept_or_held_out_without_a_fraction(recorder: Recorder) -> None:
    one, request = Holdout(0.0, recorder), named("r")
    one.asked(request)
    assert len(one) == 0 and not one.holds_out(request, 64)
    assert len(one) == 0 and recorder.totals() == {}


def run(one: Holdout, clock: FakeClock, request: Request, seconds: float, token: int, hit_tokens: int = 64) -> None:
    one.asked(request)
    clock.advance(seconds / 2)
    one.asked(request)  # Asking again begins nothing anew.
    one.holds_out(request, hit_tokens)
    one.admitted(request.request_id)
    clock.advance(seconds / 2)
    one.step_ended()
    request.append_output_token_ids([token])
    one.step_ended()
    clock.advance(100)
    one.step_ended()
    one.finished(request)
    assert len(one) == 0


def test_times_are_from_the_first_question_to_the_first_token(
    recorder: Recorder, clock: FakeClock, draw: Always
) -> None:
    one = Holdout(0.5, recorder, clock)
    run(one, clock, named("a", "a"), 2.0, 7)
    run(one, clock, named("b", "b"), 4.0, 7, hit_tokens=127)
    draw.hold_out(False)
    run(one, clock, named("c", "c"), 1.0, 7, hit_tokens=128)
    assert recorder.totals() == {
        "first_token_times:6:1:count": 2,
        "first_token_times:6:1:sum": 6.0,
        "first_token_times:6:1:squares": 20.0,
        "first_token_times:7:0:count": 1,
        "first_token_times:7:0:sum": 1.0,
        "first_token_times:7:0:squares": 1.0,
    }


def test_a_request_that_ends_with_its_first_token_is_measured(
    recorder: Recorder, clock: FakeClock, draw: Always
) -> None:
    one, request = Holdout(0.5, recorder, clock), named("r")
    one.asked(request)
    one.holds_out(request, 64)
    clock.advance(3)
    request.append_output_token_ids([1])
    one.finished(request)
    assert recorder.totals()["first_token_times:6:1:sum"] == 3.0


def test_a_request_without_a_token_is_not(recorder: Recorder, clock: FakeClock, draw: Always) -> None:
    one, request = Holdout(0.5, recorder, clock), named("r")
    one.asked(request)
    one.holds_out(request, 64)
    one.finished(request)
    assert recorder.totals() == {} and len(one) == 0


def agreement(recorder: Recorder) -> tuple[float, ...]:
    """Mixed comparisons and those that are equal, held-out comparisons and those that are equal."""
    names = ("num_mixed", "num_mixed_equal", "num_held_out", "num_held_out_equal")
    return tuple(recorder.totals().get(f"agreement:{name}", 0) for name in names)


def test_first_tokens_of_one_prompt_are_compared(recorder: Recorder, clock: FakeClock, draw: Always) -> None:
    one = Holdout(0.5, recorder, clock)
    run(one, clock, named("a"), 1, token=7)
    assert agreement(recorder) == (0, 0, 0, 0)
    run(one, clock, named("b"), 1, token=7)
    assert agreement(recorder) == (0, 0, 1, 1)
    draw.hold_out(False)
    run(one, clock, named("c"), 1, token=8)
    assert agreement(recorder) == (1, 0, 1, 1)
    run(one, clock, named("d"), 1, token=8)  # Two loaded ones are not compared with each other.
    assert agreement(recorder) == (2, 0, 1, 1)
    draw.hold_out(True)
    run(one, clock, named("e"), 1, token=8)
    assert agreement(recorder) == (3, 1, 2, 1)
    run(one, clock, named("f", "another prompt"), 1, token=8)
    assert agreement(recorder) == (3, 1, 2, 1)


def test_prompts_that_are_remembered_are_bounded(
    recorder: Recorder, clock: FakeClock, draw: Always, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdout_module, "MAX_PROMPTS", 3)
    one = Holdout(0.5, recorder, clock)
    for nth in range(4):
        run(one, clock, named(f"r{nth}", f"prompt {nth}"), 1, token=7)
    run(one, clock, named("again"), 1, token=7)
    run(one, clock, named("r0 again", "prompt 0"), 1, token=7)
    assert agreement(recorder) == (0, 0, 0, 0), "the first prompt is forgotten"
    run(one, clock, named("r3 again", "prompt 3"), 1, token=7)
    assert agreement(recorder) == (0, 0, 1, 1)


def test_only_greedy_requests_that_nothing_else_decides_are_compared() -> None:
    plain = prompt_digest(named("a"))
    assert plain is not None and plain == prompt_digest(named("b")) != prompt_digest(named("b", "other"))
    assert plain != prompt_digest(named("b", repetition_penalty=1.5))
    assert prompt_digest(named("b", logit_bias={1: 2.0})) is None
    assert prompt_digest(named("b", min_tokens=2)) is None
    warm = named("b")
    assert warm.sampling_params is not None
    warm.sampling_params.temperature = 1.0
    assert prompt_digest(warm) is None
    with_image = [
        prompt_digest(make_request("b", tokens(LENGTH, "prompt"), images={name: (96, 3)})) for name in ("cat", "dog")
    ]
    assert with_image[0] != with_image[1]


def fill_prompt(one: Core, request: Request) -> None:
    fill(one, BlockRun(0, request.block_hashes[:6]).block_hashes)


def test_a_held_out_hit_is_computed_and_has_a_cause(core: MakeCore, draw: Always) -> None:
    one, request = core(holdout_fraction=0.5).connected(), named("r")
    fill_prompt(one, request)
    assert one.ask(request) == 0
    assert request.prefill_stats is not None
    request.prefill_stats.set(LENGTH, 0, 0)
    one.allocate(request, 0)
    one.step((request, LENGTH))
    request.append_output_token_ids([7])
    stats = one.side.stats()
    assert stats is not None
    found = {cause: stats.data.get(f"computed_tokens:{cause.label}", 0) for cause in Cause}
    assert {cause: count for cause, count in found.items() if count} == {
        Cause.HELD_OUT: HIT,
        Cause.LAST_BLOCK: LENGTH - HIT,
    }
    one.finish(request)
    one.step()
    assert one.side.held()["requests that are measured"] == 0
    assert one.side.lookups.by_request == {}


def test_a_hit_that_is_not_held_out_is_loaded(core: MakeCore, draw: Always) -> None:
    one, request = core(holdout_fraction=0.5).connected(), named("r")
    draw.hold_out(False)
    fill_prompt(one, request)
    assert one.ask(request) == HIT
    one.allocate(request, HIT)
    one.finish(request)


def test_probes_are_not_assigned(core: MakeCore, draw: Always, monkeypatch: pytest.MonkeyPatch) -> None:
    one, request = core(holdout_fraction=0.5).connected(), named("r")
    monkeypatch.setattr(one.side.loads, "verdict", lambda *_: Verdict(True, 1.0, 2.0, is_probe=True))
    fill_prompt(one, request)
    assert one.ask(request) == HIT
    one.finish(request)
    assert one.side.held()["requests that are measured"] == 0
