"""Where each number with a unit in the pages comes from.

A measured number names its result in a comment behind it, which no reader of the rendered page sees:

    102 ms<!-- gpu: warm TTFT, kvpool, another process -->

`refresh` writes the result's figure there, with as many digits as the number has, and computes the tables between
`<!-- begin NAME -->` and `<!-- end NAME -->`. `loose` finds the numbers that name no result. Numbers in code and in
links are not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path

from benchmarks.harness.measuring import RESULTS

ROOT = Path(__file__).parents[2]
FACTORS = {
    ("ms", "s"): 1e-3,
    ("", "%"): 100.0,
    ("ratio", "%"): 100.0,
    ("x", "times"): 1.0,
    ("ratio", "times"): 1.0,
    ("B", "bytes"): 1.0,
}
"""(Unit of a result, unit on a page) -> what the figure is multiplied with."""

_NUMBER = r"(?P<number>\d[\d,]*(?:\.\d+)?)"
_UNIT = r"(?P<unit>ms|µs|s|seconds?|minutes?|hours?|[KMGT]iB|[KMGT]?B/s|[KMGT]B|bytes|%|x|times)"
NUMBER = re.compile(rf"(?<![\w.,-]){_NUMBER}(?: |-)?{_UNIT}(?![\w/])")
MEASURED = re.compile(
    rf"{_NUMBER}(?: {_UNIT}(?!\w)|[^\d<>]{{0,30}}?)\s*<!-- (?!run: )(?P<result>[\w-]+): (?P<row>.+?) -->"
)
_TABLE = re.compile(r"^<!-- begin (?P<name>\w+) -->\n.*?^<!-- end (?P=name) -->", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"<!-- run first.*?-->|^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Every page that is written by hand."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *(page for page in pages if page.name != "benchmarks.md")]


def refresh(text: str, tables: Mapping[str, Callable[[], str]] | None = None) -> str:
    """The text with the figure of its result in each place that names one, and with its tables computed.

    Args:
        tables: by name.

    Raises:
        LookupError: there is no such result, row or table, or the page gives the figure in another unit.
    """
    if tables is not None:
        text = _TABLE.sub(
            lambda found: f"<!-- begin {found['name']} -->\n{tables[found['name']]()}\n<!-- end {found['name']} -->",
            text,
        )
    return MEASURED.sub(lambda found: _written(found) + found[0][len(found["number"]) :], text)


def loose(text: str, settings: Collection[str]) -> list[str]:
    """Numbers with units that name no result and are in none of the phrases `settings`, with the words around them."""
    for phrase in settings:
        text = re.sub(r"\s+".join(re.escape(word) for word in phrase.split()), "", text)
    for pattern in (_TABLE, _CODE, MEASURED):
        text = pattern.sub("", text)
    text = " ".join(text.split())
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
