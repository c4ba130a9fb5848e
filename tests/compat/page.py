"""Writes the tables of docs/reference/compatibility.md from the results: `python -m tests.compat.page`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.compat import results
from tests.compat.environment import ROOT
from tests.compat.lanes import LANES
from tests.compat.results import Result

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
_BEGIN, _END = "<!-- lanes of tests/compat begin -->\n", "<!-- lanes of tests/compat end -->\n"


def table(found: Mapping[str, Result]) -> str:
    """One row a lane, in the order of the lanes."""
    rows = ["| run | with | result |", "|---|---|---|"]
    for lane in LANES:
        if (result := found.get(lane.name)) is None:
            rows.append(f"| {lane.name} | | not run yet |")
            continue
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        rows.append(f"| {lane.name} | {versions} | {_outcome(result)} |")
    return "\n".join(rows) + "\n"


def _outcome(result: Result) -> str:
    if result.refusal:
        return f"refused at start: {result.refusal}"
    failed = f", **{len(result.failed)} failed**: {', '.join(result.failed)}" if result.failed else ""
    skipped = f", {result.skipped} skipped" if result.skipped else ""
    return f"{result.passed} tests passed{skipped}{failed} ({result.date})"


def refreshed(page: str, found: Mapping[str, Result]) -> str:
    """A page with a current table."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin and end, f"{PAGE.name} has no place for the table: {_BEGIN.strip()} and {_END.strip()}"
    return f"{before}{begin}{table(found)}{end}{after}"


def write() -> None:
    PAGE.write_text(refreshed(PAGE.read_text(), results.read()))


if __name__ == "__main__":
    write()
