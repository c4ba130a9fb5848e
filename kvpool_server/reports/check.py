"""What a report may say. An engine can make up its own figures, so bounds keep them finite and few, not true."""

from __future__ import annotations

import math
from collections import Counter

from kvpool.protocol.causes import Cause
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.reports import MAX_CAUSES, MAX_ENGINE_CHARS, MAX_STAGES, REPORTER_BYTES, ReportRequest
from kvpool.protocol.text import printable

MAX_COUNT = 1 << 40
"""Tokens or requests of one report: more than an engine computes in a day."""
MAX_SECONDS = 1e7
"""Of one report, over all of its requests."""
MAX_DEVICES = 4_096
OTHER_CAUSE = "other"
"""Of tokens whose cause this release of the server does not know."""
CAUSES = frozenset(cause.label for cause in Cause)

_TEXTS = ("engine", "version", "vllm_version", "transport")
_COUNTS = ("loaded_tokens", "num_requests")
_SECONDS = ("load_seconds", "saved_seconds", "lost_seconds")


def checked(report: ReportRequest) -> ReportRequest:
    """The same report, whose texts may stand in logs, with unknown causes as `OTHER_CAUSE`.

    Raises InvalidRequestError for one that breaks a bound.
    """
    if len(report.reporter) != REPORTER_BYTES:
        raise InvalidRequestError(f"reporter has {len(report.reporter)} bytes; give {REPORTER_BYTES}")
    if not report.sequence:
        raise InvalidRequestError("sequence is 0; count reports from 1")
    _within("number of namespaces", len(report.namespaces), MAX_STAGES, low=1)
    _within("num_devices", report.num_devices, MAX_DEVICES)
    _within("number of causes", len(report.computed_tokens), MAX_CAUSES)
    for name in _COUNTS:
        _within(name, getattr(report, name), MAX_COUNT)
    for name in _SECONDS:
        _within(name, getattr(report, name), MAX_SECONDS)
    known: Counter[str] = Counter()
    for cause, tokens in report.computed_tokens.items():
        known[cause if cause in CAUSES else OTHER_CAUSE] += tokens
    _within("computed_tokens", known.total(), MAX_COUNT)
    report.computed_tokens.clear()
    report.computed_tokens.update(known)
    for name in _TEXTS:
        setattr(report, name, printable(getattr(report, name)[:MAX_ENGINE_CHARS]))
    return report


def _within(name: str, value: float, most: float, low: float = 0) -> None:
    if not (math.isfinite(value) and low <= value <= most):
        raise InvalidRequestError(f"{name} of the report is {value}; give {low} to {most:g}")
