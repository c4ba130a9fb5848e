"""Prometheus metrics of the server.

Counters of the pool are in `cache/counters.py`, those of a tier in `tiers/tier.py`, gauges here: a name with its unit
last, and a HELP text that can be read alone in a dashboard. `python -m tests.support.metrics_page` writes the tables of
docs/reference/metrics.md.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.quota import Quota
from kvpool.protocol.wire import status_of
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.counters import COUNTERS
from kvpool_server.cache.pins import PinBudget
from kvpool_server.observability.pairs import MAX_PAIRS, OTHER, label_of
from kvpool_server.tiers.tier import COUNTERS as TIER_COUNTERS

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


_OF_PAIRS = f"The first {MAX_PAIRS} pairs in use have labels of their own, the rest is model={OTHER}, tenant={OTHER}."
USAGE_COUNTERS = {
    "lookup_tokens": "Prompt tokens that lookups asked for, beyond what engines had themselves, by model and tenant. "
    + _OF_PAIRS,
    "hit_tokens": "Prompt tokens that lookups found in the pool, by model and tenant. Divided by "
    "kvpool_lookup_tokens_total: the hit ratio.",
    "stored_bytes": "Bytes that engines stored in the pool, by model and tenant.",
    "loaded_bytes": "Bytes of found blocks whose place engines were told, to load them, by model and tenant. An engine "
    "may load fewer: vllm:kvpool_loaded_bytes_total counts what it has loaded.",
}
_USAGE_NAMES = {"loaded_bytes": "located_bytes"}
"""Fields whose metric has another name: an engine may load fewer bytes than were located for it."""
USAGE_GAUGES = {
    "held_bytes": "Bytes of the arena that blocks of a model and tenant occupy.",
    "held_blocks": "Complete (readable) blocks of a model and tenant in the arena.",
}


class PoolCollector(Collector):
    """Exports the pool's own numbers, under the names that `kvpool stats` prints: kvpool_NAME, counters with _total.

    The thread of the scrape calls `stats`.
    """

    def __init__(self, stats: Callable[[], pb.StatsResponse]):
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvpool_{name.removeprefix('num_')}", text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvpool_{name}", text, value=stats.counters.get(name, 0))
        for name, text in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvpool_tier_{name.removeprefix('num_')}", text, labels=["tier"])
            for tier in stats.tiers:
                gauge.add_metric([tier.name], getattr(tier, name))
            yield gauge
        for name, text in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"kvpool_tier_{name}", text, labels=["tier"])
            for tier in stats.tiers:
                counter.add_metric([tier.name], tier.counters.get(name, 0))
            yield counter


class UsageCollector(Collector):
    """Exports what each model and tenant have used; the thread of the scrape calls `usage`."""

    def __init__(self, usage: Callable[[], Sequence[pb.UsageStats]]):
        self._usage = usage

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        usage = self._usage()
        for families, kind in ((USAGE_COUNTERS, CounterMetricFamily), (USAGE_GAUGES, GaugeMetricFamily)):
            for name, text in families.items():
                family = kind(f"kvpool_{_USAGE_NAMES.get(name, name)}", text, labels=["model", "tenant"])
                for pair in usage:
                    family.add_metric([pair.model, pair.tenant], getattr(pair, name))
                yield family


class QuotaCollector(Collector):
    """Exports each quota and the bytes in use; the thread of the scrape calls `quotas`."""

    def __init__(self, quotas: Callable[[], Sequence[Quota]]):
        self._quotas = quotas

    def collect(self) -> Iterator[GaugeMetricFamily]:
        quotas = self._quotas()
        of = "by subject (tenant:NAME or namespace:FINGERPRINT)."
        limit = GaugeMetricFamily(
            "kvpool_quota_limit_bytes", f"Most bytes that a quota allows, {of}", labels=["subject"]
        )
        text = f"Bytes that count towards a quota, {of} At the limit the subject's own blocks are evicted."
        used = GaugeMetricFamily("kvpool_quota_used_bytes", text, labels=["subject"])
        for quota in quotas:
            limit.add_metric([label_of(quota.subject)], quota.limit_bytes)
            used.add_metric([label_of(quota.subject)], quota.used_bytes)
        yield from (limit, used)


class PinCollector(Collector):
    """Exports what tenants have pinned; the thread of the scrape calls `budgets`."""

    def __init__(self, budgets: Callable[[], Sequence[PinBudget]]):
        self._budgets = budgets

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = (
            "Bytes of the arena in pinned blocks, which are evicted last, by tenant. Pins beyond --pin-budget are "
            f"refused. {MAX_PAIRS} tenants at most have labels of their own, the rest is tenant={OTHER}."
        )
        family = GaugeMetricFamily("kvpool_tenant_pinned_bytes", text, labels=["tenant"])
        by_label: Counter[str] = Counter()
        budgets = sorted(self._budgets(), key=lambda budget: -budget.used_bytes)
        for nth, budget in enumerate(budgets):
            by_label[label_of(budget.tenant) if nth < MAX_PAIRS else OTHER] += budget.used_bytes
        for label, nbytes in by_label.items():
            family.add_metric([label], nbytes)
        yield family


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

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Payload bytes that the server moved, by transport (grpc, tcp) and direction (read, write)."
        family = CounterMetricFamily("kvpool_transferred_bytes", text, labels=["transport", "direction"])
        for moved in self.transfers():
            family.add_metric([moved.transport, moved.direction], moved.nbytes)
        yield family

    def transfers(self) -> list[pb.TransferStats]:
        """Payload bytes by transport and direction."""
        by_transport = (("grpc", self._grpc_bytes), ("tcp", self._tcp_bytes()))
        return [
            pb.TransferStats(transport=name, direction=way, nbytes=nbytes)
            for name, moved in by_transport
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
        """Counts one RPC."""
        key = method, status
        series = self._by_status.get(key)
        if series is None:
            series = self._by_status[key] = self._seconds.labels(method, status)
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


class CertificateExpiry(Collector):
    """When the server's certificates end, by what they are for; `ends` is called by the thread of the scrape."""

    def __init__(self, ends: Callable[[], Mapping[str, dt.datetime]]):
        self._ends = ends

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = (
            "When a certificate ends, in seconds since 1970: the server's own (server), or the first authority of its "
            "clients' to end (client_ca). Alert 14 days before."
        )
        name = "kvpool_certificate_expiry_timestamp_seconds"
        family = GaugeMetricFamily(name, text, labels=["certificate"])
        for certificate, ends_at in self._ends().items():
            family.add_metric([certificate], ends_at.timestamp())
        yield family


class RefusedFiles(Collector):
    """Whether watched files cannot be used as they are; `refused` is called by the thread of the scrape."""

    def __init__(self, refused: Callable[[], Mapping[str, bool]]):
        self._refused = refused

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = (
            "1 while a watched file cannot be used as it is, so that what it held before stays in force, else 0: "
            "certificates, deny list, tokens, issuer's keys. Alert at once: a revocation may wait."
        )
        family = GaugeMetricFamily("kvpool_refused_file", text, labels=["file"])
        for file, is_refused in self._refused().items():
            family.add_metric([file], is_refused)
        yield family


class OwnMemory(Collector):
    """Memory of this process beside the arena.

    RSS includes the arena. For PSS the kernel would walk all pages of the arena at each scrape.
    """

    def collect(self) -> Iterator[GaugeMetricFamily]:
        status = Path("/proc/self/status").read_text()
        (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        text = "Memory of the server process without the arena and program files; RSS includes them."
        yield GaugeMetricFamily("kvpool_own_memory_bytes", text, value=int(kib) << 10)
