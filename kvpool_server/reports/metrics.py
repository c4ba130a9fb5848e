"""Prometheus metrics of what engines report, by model and tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvpool_server.observability.pairs import Pair
from kvpool_server.reports.totals import Totals

SECONDS = {
    "load_seconds": "Time that requests have waited for loads, as engines report, by model and tenant.",
    "saved_seconds": "Estimated time that loads were faster than computing, as engines report, by model and tenant.",
    "lost_seconds": "Estimated time that loads were slower than computing, as engines report, by model and tenant.",
}
COUNTS = {
    "loaded_tokens": "Prompt tokens that engines loaded from the pool, as they report, by model and tenant.",
    "num_requests": "Requests whose prompts engines have loaded or computed, as they report, by model and tenant.",
}


class ReportCollector(Collector):
    """Exports the totals of reports. The thread of the scrape calls `totals`."""

    def __init__(self, totals: Callable[[], Mapping[Pair, Totals]]):
        self._totals = totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        totals = self._totals()
        text = "Prompt tokens that engines computed, as they report, by model, tenant and cause."
        computed = CounterMetricFamily("kvpool_computed_tokens", text, labels=["model", "tenant", "cause"])
        for pair, each in totals.items():
            for cause, tokens in sorted(each.computed_tokens.items()):
                computed.add_metric([*pair, cause], tokens)
        yield computed
        for name, text in {**SECONDS, **COUNTS}.items():
            exported = {"loaded_tokens": "loaded_tokens", "num_requests": "reported_requests"}.get(name, name)
            family = CounterMetricFamily(f"kvpool_{exported}", text, labels=["model", "tenant"])
            for pair, each in totals.items():
                family.add_metric(list(pair), getattr(each, name))
            yield family
