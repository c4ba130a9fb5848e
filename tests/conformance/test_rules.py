"""Each rule catches the connector that breaks it, under its name; and each scenario is what its name says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# Each scenario reaches what its name says; else no rule of it could fail


def _notes(what: str, **wanted: object) -> Callable[[Recording], int]:
    def count(recording: Recording) -> int:
        return sum(all(note.facts[key] == value for key, value in wanted.items()) for note in recording.notes(what))

    return count


def _failures(recording: Recording) -> int:
    return sum(len(call.answer["failed_recving"]) for call in recording.calls("get_transfer_results"))


def _held_while_freed(recording: Recording) -> int:
    return sum(note.facts["pins"] for note in recording.notes("holds"))


REACHED: dict[str, Sequence[Callable[[Recording], int]]] = {
    "warm": [_notes("load", is_async=True), _notes("warm")],
    "warm-ahead": [_notes("load", is_async=True)],
    "warm-ranks": [_notes("load", is_async=True)],
    "chunked-prefill": [_notes("load", is_async=True), _held_while_freed],
    "preemption": [_notes("preempted"), _notes("load", is_async=True)],
    "preemption-ahead": [_notes("preempted")],
    "abort-at-each-stage": [_notes("aborted", loading=True), _notes("aborted", loading=False)],
    "readmission": [_notes("aborted", loading=True)],
    "shared-blocks": [_notes("aborted"), _held_while_freed],
    "small-cache": [_notes("load", is_async=True)],
    "reset-of-own-cache": [_notes("preempted")],
    "reset-of-connector": [_notes("after-reset")],
    "failed-loads": [_failures, _notes("aborted")],
    "stalled-storage": [_notes("preempted"), _notes("aborted")],
}


def test_every_scenario_but_the_cold_one_reaches_something() -> None:
    assert REACHED.keys() | {"cold"} == scenarios.SCENARIOS.keys()


@pytest.mark.parametrize("scenario", REACHED)
def test_a_scenario_reaches_what_its_name_says(scenario: str, vllm_config: MakeConfig) -> None:
    bench = scenarios.Bench(reference(), vllm_config)
    scenarios.SCENARIOS[scenario](bench)
    for reached in REACHED[scenario]:
        assert sum(map(reached, bench.recordings)) > 0
