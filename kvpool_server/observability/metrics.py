"""Prometheus metrics of the server.

Counters of the pool are in `cache/counters.py`, those of a tier in `tiers/tier.py`, gauges here: a name with its unit
last, and a HELP text that can be read alone in a dashboard. `python -m tests.support.metrics_page` writes the tables of
docs/reference/metrics.md.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.messages import fields_of
from kvpool.protocol.types import Quota
from kvpool.protocol.wire import status_of
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.cache.hints import PinBudget
from kvpool_server.observability.usage import MAX_PAIRS, OTHER, label_of
from kvpool_server.tiers.tier import COUNTERS as TIER_COUNTERS
from kvpool_server.value.recorder import Recorder

_T = TypeVar("_T")
_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 5e-1, 1.0, 5.0)

GAUGES = {
    "arena_bytes": "Size of the arena.",
    "free_bytes": "Bytes of the arena that no slot occupies.",
    "prefaulted_bytes": "Bytes of the arena backed by memory so far; equals kvpool_arena_bytes soon after the start.",
    "num_entries": "Complete (readable) blocks in the arena.",
    "num_incomplete": "Blocks in the arena that miss a shard; stays above 0 if a rank cannot store.",
    "num_quarantined": "Slots that wait for late writers or readers before they are free.",
    "num_leases": "Live leases: loads under way.",
    "num_tickets": "Live put tickets: stores under way.",
    "pinned_bytes": "Bytes of the arena in pinned blocks, which are evicted last.",
}

TIER_GAUGES = {
    "up": "1 if the last call to the tier succeeded; 0 if the call failed or the tier does not answer.",
    "size_bytes": "Most bytes that this server may keep in the tier; 0 if the server sets no bound.",
    "used_bytes": "Bytes that this server has written to the tier and not removed since.",
    "num_entries": "Blocks that this server has written to the tier and not removed since.",
}
TIER_SERVERS = {
    "up": "1 if a server that a tier reads from, or their directory, has answered last, or was never asked; else 0.",
    "read_bytes": "Bytes read from another server whose checksums matched.",
}
_OF_PAIRS = f"The first {MAX_PAIRS} pairs in use have labels of their own, the rest is model={OTHER}, tenant={OTHER}."
USAGE_COUNTERS = {
    "lookup_tokens": "Prompt tokens that lookups asked for, beyond what engines had themselves, by model and tenant; "
    f"without lookups given up because a tier was slow. {_OF_PAIRS}",
    "hit_tokens": "Prompt tokens that lookups found in the pool, by model and tenant. Divided by "
    "kvpool_lookup_tokens_total: the hit ratio.",
    "stored_bytes": "Bytes that engines stored in the pool, by model and tenant.",
    "loaded_bytes": "Bytes of found blocks whose place engines were told, to load them, by model and tenant. An engine "
    "may load fewer: vllm:kvpool_loaded_bytes_total counts what it has loaded.",
}
_USAGE_NAMES = {"loaded_bytes": "located_bytes"}
"""Metrics that have another name than their field: an engine may load fewer bytes than were located for it."""
USAGE_GAUGES = {
    "held_bytes": "Bytes of the arena that blocks of a model and tenant occupy.",
    "held_blocks": "Complete (readable) blocks of a model and tenant in the arena.",
}


class FamilyCollector(Collector, Generic[_T]):
    """Exports the families that a function makes of numbers; the thread of the scrape calls `read` for the numbers."""

    def __init__(self, registry: CollectorRegistry, families: Callable[[_T], Iterable[Metric]], read: Callable[[], _T]):
        self._families, self._read = families, read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return self._families(self._read())


def family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    series: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """The family kvpool_NAME; each of its series has the values of the labels, and a value."""
    found = kind(f"kvpool_{name}", text, labels=labels)
    for values, value in series:
        found.add_metric(values, value)
    return found


def pool_families(stats: pb.StatsResponse) -> Iterator[Metric]:
    """The pool's own numbers, under the names that `kvpool stats` prints: kvpool_NAME, counters with _total."""
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(f"kvpool_{name.removeprefix('num_')}", text, value=getattr(stats, name))
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(f"kvpool_{name}", text, value=stats.counters.get(name, 0))
    for name, text in TIER_GAUGES.items():
        series = [([tier.name], getattr(tier, name)) for tier in stats.tiers]
        yield family(GaugeMetricFamily, f"tier_{name.removeprefix('num_')}", text, ["tier"], series)
    for name, text in TIER_COUNTERS.items():
        series = [([tier.name], tier.counters.get(name, 0)) for tier in stats.tiers]
        yield family(CounterMetricFamily, f"tier_{name}", text, ["tier"], series)
    servers = [([tier.name, server.name], fields_of(server)) for tier in stats.tiers for server in tier.servers]
    for name, text in TIER_SERVERS.items():
        kind = GaugeMetricFamily if name == "up" else CounterMetricFamily
        series = [(labels, server[name]) for labels, server in servers if server[name] is not None]
        yield family(kind, f"tier_server_{name}", text, ["tier", "server"], series)


def usage_families(usage: Sequence[pb.UsageStats]) -> Iterator[Metric]:
    """What each model and tenant have used."""
    for families, kind in ((USAGE_COUNTERS, CounterMetricFamily), (USAGE_GAUGES, GaugeMetricFamily)):
        for name, text in families.items():
            series = [([pair.model, pair.tenant], getattr(pair, name)) for pair in usage]
            yield family(kind, _USAGE_NAMES.get(name, name), text, ["model", "tenant"], series)


def quota_families(quotas: Sequence[Quota]) -> Iterator[Metric]:
    """Each quota and the bytes in use."""
    of = "by subject (tenant:NAME or namespace:FINGERPRINT)."
    limits = [([label_of(quota.subject)], quota.limit_bytes) for quota in quotas]
    text = f"Most bytes that a quota allows, {of}"
    yield family(GaugeMetricFamily, "quota_limit_bytes", text, ["subject"], limits)
    used = [([label_of(quota.subject)], quota.used_bytes) for quota in quotas]
    text = f"Bytes that count towards a quota, {of} At the limit the subject's own blocks are evicted."
    yield family(GaugeMetricFamily, "quota_used_bytes", text, ["subject"], used)


def pin_families(budgets: Sequence[PinBudget]) -> Iterator[Metric]:
    """What tenants have pinned."""
    text = (
        "Bytes of the arena in pinned blocks, which are evicted last, by tenant. Pins beyond --pin-budget are "
        f"refused. {MAX_PAIRS} tenants at most have labels of their own, the rest is tenant={OTHER}."
    )
    by_label: Counter[str] = Counter()
    for nth, budget in enumerate(sorted(budgets, key=lambda budget: -budget.used_bytes)):
        by_label[label_of(budget.tenant) if nth < MAX_PAIRS else OTHER] += budget.used_bytes
    series = [([label], nbytes) for label, nbytes in by_label.items()]
    yield family(GaugeMetricFamily, "tenant_pinned_bytes", text, ["tenant"], series)


def certificate_families(ends: Mapping[str, dt.datetime]) -> Iterator[Metric]:
    """When the server's certificates end, by what they are for."""
    text = (
        "When a certificate ends, in seconds since 1970: the server's own (server), or the first authority of its "
        "clients' to end (client_ca). Alert 14 days before."
    )
    series = [([certificate], ends_at.timestamp()) for certificate, ends_at in ends.items()]
    yield family(GaugeMetricFamily, "certificate_expiry_timestamp_seconds", text, ["certificate"], series)


def refused_file_families(refused: Mapping[str, bool]) -> Iterator[Metric]:
    """Whether watched files cannot be used as they are."""
    text = (
        "1 while a watched file cannot be used as it is, so that what it held before stays in force, else 0: "
        "certificates, deny list, tokens, issuer's keys, subscribers. Alert at once: a revocation may wait."
    )
    series = [([file], is_refused) for file, is_refused in refused.items()]
    yield family(GaugeMetricFamily, "refused_file", text, ["file"], series)


def memory_families(own_bytes: int) -> Iterator[Metric]:
    """Memory of this process beside the arena: RSS includes it.

    For PSS the kernel would walk all pages of the arena at each scrape.
    """
    text = "Memory of the server process without the arena and program files; RSS includes them."
    yield GaugeMetricFamily("kvpool_own_memory_bytes", text, value=own_bytes)


def value_families(report: pb.ValueResponse, recorder: Recorder | None) -> Iterator[Metric]:
    """The curve of all tenants, for autoscalers, and what the recorder has written."""
    estimates = report.curves[0].estimates if report.curves else ()
    text = "Share of looked-up tokens that an arena of size times the present one would hit under LRU."
    ratios = [([f"{each.size:g}"], each.hit_ratio) for each in estimates]
    yield family(GaugeMetricFamily, "value_hit_ratio", text, ["size"], ratios)
    text = "Share of looked-up tokens that an arena of size times the present one or a tier would hit."
    ratios = [([f"{each.size:g}"], each.hit_ratio_with_tiers) for each in estimates]
    yield family(GaugeMetricFamily, "value_with_tiers_hit_ratio", text, ["size"], ratios)
    text = "CPU time spent on the histogram that estimates the hits of other arena sizes."
    yield CounterMetricFamily("kvpool_value_cpu_seconds", text, value=report.cpu_seconds)
    text = "Lookups and puts left out of the estimates of other arena sizes because too many came at once."
    yield CounterMetricFamily("kvpool_value_left_out", text, value=report.left_out)
    text = "Size of the file of --record; 0 without one."
    yield GaugeMetricFamily("kvpool_recording_bytes", text, value=recorder.nbytes if recorder else 0)
    text = "Lookups and puts not recorded because the recorder's queue or its file was full."
    yield CounterMetricFamily("kvpool_recording_dropped", text, value=recorder.num_dropped if recorder else 0)


class RpcMetrics(Collector):
    """RPCs by method and status, and payload bytes by transport; `tcp_bytes` returns those of the data workers."""

    def __init__(self, registry: CollectorRegistry, tcp_bytes: Callable[[], dict[str, int]] = dict):
        self._seconds = Histogram(
            "kvpool_rpc_seconds",
            "Time that the server took to answer an RPC, by method and gRPC status; LookupWait waits for a tier.",
            ["method", "status"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._by_status: dict[tuple[str, str], Histogram] = {}
        self._grpc_bytes = {"read": 0, "write": 0}
        self._tcp_bytes = tcp_bytes
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        text = "Payload bytes that the server moved, by transport (grpc, tcp) and direction (read, write)."
        series = [([moved.transport, moved.direction], moved.nbytes) for moved in self.transfers()]
        yield family(CounterMetricFamily, "transferred_bytes", text, ["transport", "direction"], series)

    def transfers(self) -> list[pb.TransferStats]:
        return [
            pb.TransferStats(transport=name, direction=way, nbytes=nbytes)
            for name, moved in (("grpc", self._grpc_bytes), ("tcp", self._tcp_bytes()))
            for way, nbytes in moved.items()
        ]

    def rpcs(self) -> tuple[tuple[float, ...], list[pb.RpcStats]]:
        """What kvpool_rpc_seconds holds: the finite bounds of its buckets, and its series."""
        # Its samples would take the event loop 70 microseconds a series, which callers can make many of.
        return _BUCKETS, [
            pb.RpcStats(
                method=method,
                status=status,
                sum_seconds=series._sum.get(),
                buckets=[int(bucket.get()) for bucket in series._buckets],
            )
            for (method, status), series in sorted(self._by_status.items())
        ]

    def add_bytes(self, direction: str, nbytes: int) -> None:
        """Counts payload bytes that passed through gRPC."""
        self._grpc_bytes[direction] += nbytes

    def timed(self, method: str, was_answered: Callable[[], bool] = lambda: False) -> _Timer:
        """Observes the time that the body takes, with the status that the body's outcome has as an RPC.

        A call that was cancelled counts as OK if it `was_answered` in full.
        """
        return _Timer(self, method, was_answered)

    def observe(self, method: str, status: str, seconds: float) -> None:
        if (series := self._by_status.get((method, status))) is None:
            series = self._by_status[method, status] = self._seconds.labels(method, status)
        series.observe(seconds)


class _Timer:
    """The context manager of `RpcMetrics.timed`: a class, because a generator would take four times as long."""

    __slots__ = ("_metrics", "_started", "_was_answered", "method")

    def __init__(self, metrics: RpcMetrics, method: str, was_answered: Callable[[], bool]):
        self._metrics, self.method, self._was_answered = metrics, method, was_answered

    def __enter__(self) -> _Timer:
        self._started = time.perf_counter()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        status = "OK" if error is None else self._status_of(error)
        self._metrics.observe(self.method, status, time.perf_counter() - self._started)

    def _status_of(self, error: BaseException) -> str:
        if isinstance(error, KVPoolError):
            return status_of(error).name
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return "OK" if self._was_answered() else "CANCELLED"
        return "UNKNOWN"
