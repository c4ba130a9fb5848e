"""Prometheus metrics of what engines report, by model and tenant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from kvpool_server.observability.metrics import family
from kvpool_server.observability.pairs import Pair
from kvpool_server.reports.engines import Totals

SECONDS = {
    "load_seconds": "Time that requests have waited for loads, as engines report, by model and tenant.",
    "saved_seconds": "Estimated time that loads were faster than computing, as engines report, by model and tenant.",
    "lost_seconds": "Estimated time that loads were slower than computing, as engines report, by model and tenant.",
}
COUNTS = {
    "loaded_tokens": "Prompt tokens that engines loaded from the pool, as they report, by model and tenant.",
    "num_requests": "Requests whose prompts engines have loaded or computed, as they report, by model and tenant.",
}


def report_families(totals: Mapping[Pair, Totals]) -> Iterator[Metric]:
    """The totals of reports."""
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
