"""What a check has found."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    """Worth knowing, and no problem now."""
    WARNING = "warning"
    """The pool works, and is slower or less useful than it could be."""
    ERROR = "error"
    """The pool, or a part of it, does not work."""


_ORDER = {Level.ERROR: 0, Level.WARNING: 1}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of one check.

    Args:
        check: what was checked, in a few words: "data port".
        text: what was found, a sentence that names the thing and the value.
        fix: what to do about it, a sentence; empty if there is nothing to do.
    """

    level: Level
    check: str
    text: str
    fix: str


ok = functools.partial(Finding, Level.OK, fix="")
info = functools.partial(Finding, Level.INFO)
warning = functools.partial(Finding, Level.WARNING)
error = functools.partial(Finding, Level.ERROR)


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """What is wrong now, errors first."""
    found = [finding for finding in findings if finding.level in _ORDER]
    return sorted(found, key=lambda finding: _ORDER[finding.level])


def notes(findings: Iterable[Finding]) -> list[Finding]:
    """What is worth knowing, and no problem now."""
    return [finding for finding in findings if finding.level is Level.INFO]
