"""Each scenario reaches what its name says; else no rule of it could fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.conformance import scenarios
from tests.conformance.recorder import Recording
from tests.conformance.subject import reference
from tests.support.toy.fixtures import MakeConfig


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
