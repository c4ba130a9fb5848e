"""What engines have counted, added up: of one namespace, or of all engines with one model and tenant."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from kvpool.protocol.reports import MAX_AMOUNT, ReportRequest

MAX_TOTAL = 1 << 56
"""Counts stop there, so that an engine that makes up its figures breaks no message with the others'. The counts of all
causes together are a number of 64 bits all the same."""


@dataclass(slots=True)
class Totals:
    """Sums over reports; the names are those of `ReportRequest`."""

    computed_tokens: Counter[str] = field(default_factory=Counter)
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    num_requests: int = 0

    def add(self, report: ReportRequest) -> None:
        for cause, tokens in report.computed_tokens.items():
            self.computed_tokens[cause] = min(MAX_TOTAL, self.computed_tokens[cause] + tokens)
        self.loaded_tokens = min(MAX_TOTAL, self.loaded_tokens + report.loaded_tokens)
        self.load_seconds = min(MAX_AMOUNT, self.load_seconds + report.load_seconds)
        self.saved_seconds = min(MAX_AMOUNT, self.saved_seconds + report.saved_seconds)
        self.lost_seconds = min(MAX_AMOUNT, self.lost_seconds + report.lost_seconds)
        self.num_requests = min(MAX_TOTAL, self.num_requests + report.num_requests)

    def copy(self) -> Totals:
        return dataclasses.replace(self, computed_tokens=self.computed_tokens.copy())
