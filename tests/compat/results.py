"""`results.json`: what `python -m tests.compat` has found, by lane."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a lane.

    Args:
        lane: its name.
        date: YYYY-MM-DD.
        versions: of Python and of packages, by name.
        passed, skipped: counts of tests.
        failed: names of tests that failed, or of files that could not be run.
        refusal: why the connector refuses to start with this vLLM; empty if it does not.
    """

    lane: str
    date: str
    versions: dict[str, str]
    passed: int
    skipped: int
    failed: list[str] = field(default_factory=list)
    refusal: str = ""


def read() -> dict[str, Result]:
    """Results by lane; none if there is no file."""
    if not RESULTS.exists():
        return {}
    return {name: Result(lane=name, **fields) for name, fields in json.loads(RESULTS.read_text()).items()}


def write(result: Result) -> None:
    """Replaces the result of one lane."""
    results = {**read(), result.lane: result}
    fields = {name: asdict(each) for name, each in sorted(results.items())}
    for each in fields.values():
        del each["lane"]
    RESULTS.write_text(json.dumps(fields, indent=2) + "\n")
