"""What `python -m tests.compat` has found: the table in docs/reference/compatibility.md, one row a lane."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.compat.environment import ROOT
from tests.compat.lanes import LANES

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
REFUSED = "refused at start: "
_BEGIN, _END = "<!-- lanes of tests/compat begin -->\n", "<!-- lanes of tests/compat end -->\n"
_HEAD = "| run | with | result |\n|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a lane.

    Args:
        lane: its name.
        versions: of Python and of packages, by name.
        outcome: counts of tests, the names of those that failed, and the date; or why the connector refuses this vLLM.
    """

    lane: str
    versions: dict[str, str]
    outcome: str

    @property
    def has_passed(self) -> bool:
        return re.fullmatch(r"[1-9]\d* tests passed(, \d+ skipped)? \(\d{4}-\d\d-\d\d\)", self.outcome) is not None


def outcome(passed: int, skipped: int, failed: list[str], date: str) -> str:
    """The counts of a run in words."""
    told = f", **{len(failed)} failed**: {', '.join(failed)}" if failed else ""
    return f"{passed} tests passed{f', {skipped} skipped' if skipped else ''}{told} ({date})"


def read() -> dict[str, Result]:
    """Results by lane."""
    found = {}
    for lane, versions, said in re.findall(r"^\| (\S+) \| (.+) \| (.+) \|$", _parts()[1], re.MULTILINE):
        found[lane] = Result(lane, dict(each.split(" ") for each in versions.split(", ")), said)
    return found


def write(result: Result) -> None:
    """Replaces the row of one lane. Rows are in the order of the lanes."""
    results = {**read(), result.lane: result}
    rows = ""
    for each in (results[lane.name] for lane in LANES if lane.name in results):
        versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
        rows += f"| {each.lane} | {versions} | {each.outcome} |\n"
    before, _, after = _parts()
    PAGE.write_text(f"{before}{_BEGIN}{_HEAD}{rows}{_END}{after}")


def _parts() -> tuple[str, str, str]:
    """The page before its table, the table's rows, and the page behind them."""
    before, begin, rest = PAGE.read_text().partition(f"{_BEGIN}{_HEAD}")
    rows, end, after = rest.partition(_END)
    assert begin and end, f"{PAGE.name} has no place for the table: {_BEGIN.strip()} and {_END.strip()}"
    return before, rows, after
