"""The engines that report, the sums of what they have counted, and the metrics of these sums.

Invariants:
- A report counts once, however often it is sent: of each reporter the newest counted number is remembered, far longer
  than the engine is shown.
- Totals outlive their engines. They end with the server; `usage_ledger.py` keeps what is to outlive it.
- An engine spoils only the figures of its own tenant, and pushes out only engines of the tenant with most of them.

Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.reports import (
    MAX_AMOUNT,
    MAX_CAUSES,
    MAX_ENGINE_CHARS,
    MAX_STAGES,
    REPORTER_BYTES,
    Cause,
    ReportRequest,
)
from kvpool.protocol.text import printable
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.observability.metrics import family
from kvpool_server.observability.usage import Pair, Pairs

MAX_ENGINES = 256
"""Shown at once."""
SILENT_S = 60.0
"""An engine that has not reported for so long is not shown any more."""
MAX_REPORTERS = 4_096
"""Whose newest number is remembered; the least recent of the tenant with most of them is forgotten for another."""
MAX_NAMESPACES = 1_024
"""With totals of their own; the one with the oldest report is forgotten for another. Totals by model stay."""
MAX_MODEL_CHARS = 200
MAX_COUNT = 1 << 40
"""Tokens or requests of one report: more than an engine computes in a day."""
MAX_SECONDS = 1e7
"""Of one report, over all of its requests."""
MAX_DEVICES = 4_096
OTHER_CAUSE = "other"
"""Of tokens whose cause this release of the server does not know."""
CAUSES = frozenset(cause.label for cause in Cause)
MAX_TOTAL = 1 << 56
"""Counts stop there, so that an engine that makes up its figures breaks no message with the others'. The counts of all
causes together are a number of 64 bits all the same."""
TEXTS = ("engine", "version", "vllm_version", "transport")
SECONDS = {
    "load_seconds": "Time that requests have waited for loads, as engines report, by model and tenant.",
    "saved_seconds": "Estimated time that loads were faster than computing, as engines report, by model and tenant.",
    "lost_seconds": "Estimated time that loads were slower than computing, as engines report, by model and tenant.",
}
COUNTS = {
    "loaded_tokens": "Prompt tokens that engines loaded from the pool, as they report, by model and tenant.",
    "num_requests": "Requests whose prompts engines have loaded or computed, as they report, by model and tenant.",
}
"""Fields of a report; those that are summed with the HELP of their metric."""

Totals = ReportRequest
"""Sums over reports, of one namespace or of all engines with one model and tenant; no other field is set."""


@dataclass(slots=True)
class _Reporter:
    sequence: int
    reported_at: float
    shown: pb.EngineState | None = None  # By the newest report; None once the engine is not shown any more.


class EngineReports:
    """The reporters of one server, and what they have counted.

    Args:
        clock: monotonic seconds.
        pairs: folds models and tenants to few.

    Attributes:
        totals: by model and tenant.
        listener: called with the model and tenant that a report counts for, its tenant, and the report, checked.
    """

    def __init__(self, clock: Callable[[], float], pairs: Pairs | None = None):
        self._clock = clock
        self._pairs = pairs or Pairs()
        self._reporters: OrderedDict[tuple[str, bytes], _Reporter] = OrderedDict()  # The oldest report first.
        self._by_namespace: OrderedDict[bytes, Totals] = OrderedDict()
        self.totals: defaultdict[Pair, Totals] = defaultdict(Totals)
        self.listener: Callable[[Pair, str, ReportRequest], None] | None = None

    def report(self, report: ReportRequest, tenant: str, model: str) -> bool:
        """Counts a report; False if it was counted before.

        Args:
            tenant, model: of the report's first namespace, which the caller may use.

        Raises InvalidRequestError if the report breaks a bound; nothing has changed then.
        """
        check(report)
        key, now = (tenant, report.reporter), self._clock()
        known = self._reporters.pop(key, None)
        if known is None and len(self._reporters) >= MAX_REPORTERS:
            self._forget_one()
        reporter = self._reporters[key] = known or _Reporter(0, now)
        reporter.reported_at = now
        model = printable(model[:MAX_MODEL_CHARS])
        if is_new := report.sequence > reporter.sequence:
            reporter.sequence, reporter.shown = report.sequence, _shown(report, tenant, model)
            self._count(report, tenant, self._pairs.of(model, tenant))
        if report.last:
            reporter.shown = None
        return is_new

    def _count(self, report: ReportRequest, tenant: str, pair: Pair) -> None:
        fingerprint = report.namespaces[0]
        of_namespace = self._by_namespace.pop(fingerprint, None) or Totals()
        self._by_namespace[fingerprint] = of_namespace
        if len(self._by_namespace) > MAX_NAMESPACES:
            self._by_namespace.popitem(last=False)
        figures = {name: getattr(report, name) for name in (*COUNTS, *SECONDS)}
        for totals in (of_namespace, self.totals[pair]):
            add(totals, report.computed_tokens, **figures)
        if self.listener is not None:
            self.listener(pair, tenant, report)

    def _forget_one(self) -> None:
        """Forgets the reporter that has been silent longest of the tenant with most reporters."""
        ((most, _),) = Counter(tenant for tenant, _ in self._reporters).most_common(1)
        del self._reporters[next(key for key in self._reporters if key[0] == most)]

    def remembers(self, tenant: str, reporter: bytes) -> bool:
        """Whether a reporter's newest number is remembered."""
        return (tenant, reporter) in self._reporters

    def restore(self, tenant: str, reporter: bytes, sequence: int) -> None:
        """A reporter's newest number, counted before the server's start."""
        self._reporters[tenant, reporter] = _Reporter(sequence, self._clock())

    def of_namespace(self, fingerprint: bytes) -> Totals | None:
        """What engines have counted in a namespace; None if nothing is known."""
        return self._by_namespace.get(fingerprint)

    def snapshot(self) -> dict[Pair, Totals]:
        """Copies of the totals, for other threads."""
        return copy.deepcopy(self.totals)

    def engines(self) -> list[pb.EngineState]:
        """The engines that have reported lately, by name: at most `MAX_ENGINES`, the newest of each tenant in turn.

        The next report or call may change the messages: copy what is to stay.
        """
        now = self._clock()
        by_tenant: defaultdict[str, list[pb.EngineState]] = defaultdict(list)
        for (tenant, _), each in reversed(self._reporters.items()):
            if each.shown is not None and now - each.reported_at <= SILENT_S:
                each.shown.age_seconds = max(0.0, now - each.reported_at)
                by_tenant[tenant].append(each.shown)
        in_turn = chain.from_iterable(zip_longest(*by_tenant.values()))
        lately = islice(filter(None, in_turn), MAX_ENGINES)
        return sorted(lately, key=lambda state: (state.engine, state.tenant))


def add(total: Totals | pb.LedgerRow, computed_tokens: Mapping[str, int], **figures: float) -> None:
    """Adds to the fields of a sum, which stop at `MAX_TOTAL` (counts) or `MAX_AMOUNT` (seconds, GiB hours)."""
    for name, value in figures.items():
        known = getattr(total, name)
        setattr(total, name, min(MAX_AMOUNT if isinstance(known, float) else MAX_TOTAL, known + value))
    for cause, tokens in computed_tokens.items():
        total.computed_tokens[cause] = min(MAX_TOTAL, total.computed_tokens[cause] + tokens)


def _shown(report: ReportRequest, tenant: str, model: str) -> pb.EngineState:
    """What is kept of a report: a copy, because a message keeps all the memory that it was parsed into."""
    state = pb.EngineState(tenant=tenant, model=model, breaker_open=report.breaker_open, namespaces=report.namespaces)
    for name in TEXTS:
        setattr(state, name, printable(getattr(report, name)[:MAX_ENGINE_CHARS]))
    return state


def check(report: ReportRequest) -> None:
    """Raises InvalidRequestError for a report that breaks a bound; makes unknown causes `OTHER_CAUSE`."""
    if len(report.reporter) != REPORTER_BYTES:
        raise InvalidRequestError(f"reporter has {len(report.reporter)} bytes; give {REPORTER_BYTES}")
    if not report.sequence:
        raise InvalidRequestError("sequence is 0; count reports from 1")
    _within("number of namespaces", len(report.namespaces), MAX_STAGES, low=1)
    _within("number of causes", len(report.computed_tokens), MAX_CAUSES)
    bounds = {"num_devices": MAX_DEVICES, **dict.fromkeys(COUNTS, MAX_COUNT), **dict.fromkeys(SECONDS, MAX_SECONDS)}
    for name, most in bounds.items():
        _within(name, getattr(report, name), most)
    known: Counter[str] = Counter()
    for cause, tokens in report.computed_tokens.items():
        known[cause if cause in CAUSES else OTHER_CAUSE] += tokens
    _within("computed_tokens", known.total(), MAX_COUNT)
    report.computed_tokens.clear()
    report.computed_tokens.update(known)


def _within(name: str, value: float, most: float, low: float = 0) -> None:
    if not (math.isfinite(value) and low <= value <= most):
        raise InvalidRequestError(f"{name} of the report is {value}; give {low} to {most:g}")


def report_families(totals: Mapping[Pair, Totals]) -> Iterator[Metric]:
    """The totals of reports, by model and tenant."""
    text = "Prompt tokens that engines computed, as they report, by model, tenant and cause."
    by_cause = [
        ([*pair, cause], tokens)
        for pair, each in totals.items()
        for cause, tokens in sorted(each.computed_tokens.items())
    ]
    yield family(CounterMetricFamily, "computed_tokens", text, ["model", "tenant", "cause"], by_cause)
    for name, text in {**SECONDS, **COUNTS}.items():
        exported = {"num_requests": "reported_requests"}.get(name, name)
        series = [(pair, getattr(each, name)) for pair, each in totals.items()]
        yield family(CounterMetricFamily, exported, text, ["model", "tenant"], series)
