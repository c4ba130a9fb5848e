"""Each rule catches the connector that breaks it, under its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance import scenarios
from tests.conformance.broken import BROKEN, SLOW_S
from tests.conformance.recorder import SCHEDULER, Call, Recording
from tests.conformance.rules import RULES, violations
from tests.conformance.subject import reference
from tests.support.toy.fixtures import MakeConfig

STUCK_RULES = {"every-request-ends", "an-idle-engine-has-no-pending-push-work"}
OF_THE_DRIVER = {"hooks-on-their-side", "worker-hooks-in-order", "kv-cache-after-constructor"}


def test_every_rule_has_a_connector_that_breaks_it() -> None:
    assert BROKEN.keys() | OF_THE_DRIVER == RULES.keys()


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_connector_is_caught(rule: str, vllm_config: MakeConfig) -> None:
    broken = BROKEN[rule]
    one = reference(broken.connector, "tests.conformance.broken")
    if STUCK_RULES & ({rule} | broken.also):
        one = replace(one, drain_limit_s=0.5)
    if rule == "hooks-do-not-block":
        one = replace(one, hook_limit_s=SLOW_S / 2)
    found = scenarios.run(broken.scenario, one, vllm_config)
    names = {violation.rule for violation in found}
    assert rule in names
    assert names <= {rule} | broken.also, found


@pytest.fixture
def recording(vllm_config: MakeConfig) -> Recording:
    """Of a run in which nothing is wrong."""
    bench = scenarios.Bench(reference(), vllm_config)
    scenarios.SCENARIOS["cold"](bench)
    bench.engines[0].shutdown()
    (kept,) = bench.recordings
    assert violations(kept) == []
    return kept


def test_a_hook_on_the_wrong_side_is_caught(recording: Recording) -> None:
    place = next(idx for idx, event in enumerate(recording.events) if getattr(event, "hook", "") == "take_events")
    call = recording.events[place]
    assert isinstance(call, Call) and call.side == SCHEDULER
    recording.events[place] = replace(call, hook="save_kv_layer")
    assert [violation.rule for violation in violations(recording)] == ["hooks-on-their-side"]


def test_a_worker_hook_out_of_order_is_caught(recording: Recording) -> None:
    first, second = [
        idx
        for idx, event in enumerate(recording.events)
        if event.step == 5 and getattr(event, "hook", "") in ("wait_for_save", "get_transfer_results")
    ]
    recording.events[first], recording.events[second] = recording.events[second], recording.events[first]
    assert [violation.rule for violation in violations(recording)] == ["worker-hooks-in-order"]


def test_a_step_before_the_kv_cache_is_caught(recording: Recording) -> None:
    place = next(
        idx for idx, event in enumerate(recording.events) if getattr(event, "hook", "") == "register_kv_caches"
    )
    del recording.events[place]
    assert {violation.rule for violation in violations(recording)} == {"kv-cache-after-constructor"}
