"""Text from outside for logs, terminals and errors, and durations as text."""

from __future__ import annotations

import re


def without_passwords(text: str) -> str:
    """A text about settings, without what stands before the @ of a URL."""
    return re.sub(r"(:/+)[^\s'\"]*@", r"\1...@", text)


def printable(text: object) -> str:
    """Text from outside, or a path, made safe for logs and terminals: without control characters and line ends."""
    return "".join(char for char in str(text) if char.isprintable())


def escaped(text: str, most: int) -> str:
    """Text from outside for logs, terminals and errors: at most `most` characters of it, others than printable ones
    as escapes."""
    shown = text if len(text) <= most else f"{text[:most]}..."
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


def duration_text(seconds: float) -> str:
    """A duration in the largest unit that it holds at least twice: "3 min"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def opened_text(opened_by: str, age_seconds: float) -> str:
    """When a namespace was opened, and by which host: "opened by HOST, 3 min ago"."""
    whose = f"opened by {opened_by}" if opened_by else "found in a tier, or opened by an unknown host"
    return f"{whose}, {duration_text(age_seconds)} ago"
