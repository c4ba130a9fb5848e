"""How commands print: findings, widths, units and bars.

A table is as wide as the terminal, and 80 columns where standard output is none. Lines of text are wrapped for a
terminal alone. So what scripts and tests read depends neither on a terminal nor on COLUMNS.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable

import typer
from rich.console import Console

from kvpool.protocol.text import printable
from kvpool.report.judgements import Finding, Level

WIDTH = 80
"""Columns where standard output is no terminal."""


MARKS = {Level.OK: "ok      ", Level.INFO: "info    ", Level.WARNING: "warning ", Level.ERROR: "ERROR   "}


def console() -> Console:
    """A console on standard output."""
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else WIDTH, force_terminal=is_terminal, highlight=False)


def _digits(number: float) -> str:
    """Three significant digits, or more: no exponent."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def count_text(count: float) -> str:
    """A count that people read: 1,234, 1.23 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def rate_text(bytes_per_s: float) -> str:
    """Bytes a second in decimal units, as `kvpool ping --bandwidth` prints them: 1.25 GB/s."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{_digits(bytes_per_s / size)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def seconds_text(seconds: float | None) -> str:
    """A latency: 350 µs, 1.2 ms, 2.5 s; "-" for None."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def share_text(part: float, whole: float) -> str:
    """A share as a percentage; "-" if the whole is 0."""
    return f"{part / whole:.1%}" if whole else "-"


def bar(share: float, width: int) -> str:
    """A bar of `width` characters, of which `share` is filled; a share above 0 shows at least one."""
    filled = min(width, max(round(share * width), 1 if share > 0 else 0))
    return "█" * filled + "░" * (width - filled)


def print_findings(findings: Iterable[Finding]) -> None:
    """Prints each finding on a line, and its fix on the next."""
    for finding in findings:
        say(f"{MARKS[finding.level]}{finding.check}: {finding.text}", indent=8)
        if finding.fix:
            say(f"{'':8}fix: {finding.fix}", indent=8)


def say(line: str, indent: int = 0) -> None:
    """Prints a line of text; on a terminal it is wrapped to the columns, behind `indent` spaces."""
    line = printable(line)
    if sys.stdout.isatty():
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        hanging = " " * min(indent, width // 2)
        line = textwrap.fill(line, max(width, 20), subsequent_indent=hanging, break_on_hyphens=False)
    typer.echo(line)
