"""The rules by name, and what their checkers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.conformance.recorder import Call, Recording

Check = Callable[[Recording], Iterable[str]]
RULES: dict[str, Check] = {}


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    detail: str


def violations(recording: Recording) -> list[Violation]:
    """What a recording shows to be wrong, rule by rule."""
    return [Violation(name, detail) for name, check in RULES.items() for detail in check(recording)]


def rule(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        assert name not in RULES, f"two rules are called {name}"
        RULES[name] = check
        return check

    return add


def from_notes(name: str, what: str, describe: str) -> None:
    """A rule that the engine's memory or its scheduler judges: each note is a violation."""

    @rule(name)
    def check(recording: Recording) -> Iterator[str]:
        return (f"step {note.step}: {describe.format(**note.facts)}" for note in recording.notes(what))


def matches(recording: Recording) -> Iterator[Call]:
    return answered(recording, "get_num_new_matched_tokens")


def answered(recording: Recording, *hooks: str) -> Iterator[Call]:
    return (call for call in recording.calls(*hooks) if call.error is None)
