"""Where each number with a unit in the pages comes from.

A measured number names its result in a comment behind it, which no reader of the rendered page sees:

    102 ms<!-- gpu: warm TTFT, kvpool, another process -->

`refresh` writes the result's figure there, with as many digits as the number has; `loose` finds the numbers that name
none. Numbers in code, in links and in tables of settings are not looked at: other tests compare these with the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from decimal import Decimal
from functools import cache
from pathlib import Path

from benchmarks.harness import RESULTS

ROOT = Path(__file__).parent.parent
FACTORS = {("ms", "s"): 1e-3, ("", "%"): 100.0, ("ratio", "%"): 100.0, ("x", "times"): 1.0, ("ratio", "times"): 1.0}
"""(Unit of a result, unit on a page) -> what the figure is multiplied with."""

_NUMBER = r"(?P<number>\d[\d,]*(?:\.\d+)?)"
_UNIT = r"(?P<unit>ms|µs|s|seconds?|minutes?|hours?|[KMGT]iB|[KMGT]?B(?:/s)?|bytes|%|x|times)"
NUMBER = re.compile(rf"(?<![\w.,-]){_NUMBER}(?: |-)?{_UNIT}(?![\w/])")
MEASURED = re.compile(rf"{_NUMBER}(?: {_UNIT}(?!\w)|[^\d<>]{{0,30}}?)\s*<!-- (?P<result>[\w-]+): (?P<row>.+?) -->")
_CODE = re.compile(
    r"^```.*?^```|`[^`]*`|\]\([^)]*\)|^<!-- begin (\w+) -->.*?^<!-- end \1 -->", re.MULTILINE | re.DOTALL
)


def documents() -> list[Path]:
    """Every page that is written by hand."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *(page for page in pages if page.name != "benchmarks.md")]


def refresh(text: str) -> str:
    """The text with the figure of its result in each place that names one.

    Raises:
        LookupError: there is no such result, or it has no such row.
    """
    return MEASURED.sub(lambda found: _written(found) + found[0][len(found["number"]) :], text)


def loose(text: str, settings: Collection[str]) -> list[str]:
    """Numbers with units that name no result and are in none of the phrases `settings`, with the words around them."""
    for pattern in (_CODE, MEASURED):
        text = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    text = " ".join(text.split())
    for phrase in settings:
        text = text.replace(phrase, "")
    return [text[max(0, found.start() - 30) : found.end() + 20] for found in NUMBER.finditer(text)]


@cache
def rows(result: str) -> dict[str, tuple[float, str]]:
    """Row -> figure and unit of a committed result."""
    path = RESULTS / f"{result}.json"
    if not path.exists():
        raise LookupError(f"there is no result {path.name} in {RESULTS}")
    return {row["what"]: (row["figure"], row["unit"]) for row in json.loads(path.read_text())["rows"]}


def _written(found: re.Match[str]) -> str:
    result, row, unit = found["result"], found["row"], found["unit"]
    if row not in rows(result):
        raise LookupError(f"{result}.json has no row {row!r}; the rows are {', '.join(rows(result))}")
    figure, measured_in = rows(result)[row]
    if unit and unit != measured_in:
        if (measured_in, unit) not in FACTORS:
            raise LookupError(f"{row!r} of {result}.json is in {measured_in!r}, and the page says {unit!r}")
        figure *= FACTORS[measured_in, unit]
    digits = -int(Decimal(found["number"].replace(",", "")).as_tuple().exponent)
    return f"{figure:,.{digits}f}"
