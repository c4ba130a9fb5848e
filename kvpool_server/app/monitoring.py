"""What a server shows of itself: the series of /metrics, and the snapshot that `Stats` and the page show.

The lag of the event loop is how long a request may wait because the loop does something else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, GCCollector, Histogram, PlatformCollector, ProcessCollector

from kvpool.protocol import wire
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from kvpool_server.access.control import AccessControl, ends_of
from kvpool_server.app.arena_memory import ArenaMemory
from kvpool_server.observability.http import on_loop
from kvpool_server.observability.metrics import (
    FamilyCollector,
    RpcMetrics,
    certificate_families,
    memory_families,
    pin_families,
    pool_families,
    quota_families,
    refused_file_families,
    usage_families,
)
from kvpool_server.observability.usage import Pair, Usage
from kvpool_server.process.runtime import FLOW, own_bytes
from kvpool_server.reports.engines import EngineReports, report_families
from kvpool_server.tiering.tiered_pool import TieredPool

PROBE_EVERY_S = 0.01
WINDOW_S = 60.0
PROBED_S = 10.0
"""Time that probes must cover before their 99th percentile says something."""
_BUCKETS = (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 1.0, 5.0)


class Monitoring:
    """What one server shows. Make it on the event loop, and run `lag`.

    Args:
        access: None if callers are not authenticated.
        tcp_bytes: that the data workers have moved, by direction.

    Attributes:
        http_port: of /metrics and the page; 0 if HTTP is off.
    """

    def __init__(
        self,
        tiered: TieredPool,
        memory: ArenaMemory,
        reports: EngineReports,
        usage: Usage,
        access: AccessControl | None,
        tcp_bytes: Callable[[], dict[str, int]],
        boot_token: int,
    ):
        self._started = time.monotonic()
        self._boot_token = boot_token
        self.http_port = 0
        self._tiered = tiered
        self._pool = pool = tiered.pool
        self._memory = memory
        self._reports = reports
        self._usage = usage
        self._access = access
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        loop = asyncio.get_running_loop()
        FamilyCollector(registry, pool_families, on_loop(loop, self.stats))
        FamilyCollector(registry, usage_families, on_loop(loop, usage.by_model_and_tenant))
        FamilyCollector(registry, quota_families, on_loop(loop, pool.quotas))
        FamilyCollector(registry, pin_families, on_loop(loop, pool.pins.budgets))
        FamilyCollector(registry, report_families, on_loop(loop, reports.snapshot))
        FamilyCollector(registry, memory_families, own_bytes)
        if access is not None:
            FamilyCollector(registry, certificate_families, lambda: ends_of(access.credentials.value.tls))
            FamilyCollector(registry, refused_file_families, access.refused_files)
        self.lag = LoopLag(registry)
        self.rpcs = RpcMetrics(registry, tcp_bytes)

    def stats(self) -> pb.StatsResponse:
        """A snapshot of the server: the answer to `Stats`. Call it on the event loop."""
        stats = self._tiered.stats(self._memory.backed_bytes)
        stats.boot_token = self._boot_token
        stats.engines.extend(self._reports.engines())
        fullest = sorted(self._pool.quotas(), key=lambda each: each.used_bytes / max(1, each.limit_bytes), reverse=True)
        stats.quotas.extend(wire.encode_quotas(fullest))
        stats.server.CopyFrom(self._server_stats())
        return stats

    def _server_stats(self) -> pb.ServerStats:
        p50, p99, longest = self.lag.last_minute()
        bounds, rpcs = self.rpcs.rpcs()
        access = self._access
        ends = {} if access is None else ends_of(access.credentials.value.tls)
        refused: Mapping[str, bool] = {} if access is None else access.refused_files()
        return pb.ServerStats(
            version=__version__,
            uptime_seconds=time.monotonic() - self._started,
            unix_seconds=time.time(),
            loop_lag_p50_seconds=p50,
            loop_lag_p99_seconds=p99,
            loop_lag_max_seconds=longest,
            rpc_seconds_bounds=bounds,
            rpcs=rpcs,
            transfers=self.rpcs.transfers(),
            usage=self._used_and_reported(),
            http_port=self.http_port,
            certificate_ends={name: ends_at.timestamp() for name, ends_at in ends.items()},
            refused_files=[name for name, is_refused in refused.items() if is_refused],
        )

    def _used_and_reported(self) -> Iterable[pb.UsageStats]:
        """What the pool has counted by model and tenant, with what engines have reported."""
        usage = {Pair(each.model, each.tenant): each for each in self._usage.by_model_and_tenant()}
        for pair, totals in self._reports.totals.items():
            used = usage.setdefault(pair, pb.UsageStats(tenant=pair.tenant, model=pair.model))
            used.saved_seconds, used.lost_seconds = totals.saved_seconds, totals.lost_seconds
            used.computed_tokens.update(totals.computed_tokens)
        return usage.values()


class LoopLag:
    """Asks the loop every `PROBE_EVERY_S` to wake a task, and observes how late it does so.

    A pause of the loop that begins between two probes counts from the next probe on, so up to `PROBE_EVERY_S` of a
    pause may go unseen.
    """

    def __init__(self, registry: CollectorRegistry):
        self._seconds = Histogram(
            "kvpool_loop_lag_seconds",
            "How late the event loop woke a task that was due, probed every 10 ms: what a request waits before it is "
            "looked at. Alert if it is often above 0.01.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._probes = np.full((2, int(2 * WINDOW_S / PROBE_EVERY_S)), -np.inf)
        """When the probes of two minutes were made, and their lags: float64 [2, probes], a ring."""
        self._count = 0
        longest = Gauge(
            "kvpool_loop_lag_max_seconds",
            "The longest kvpool_loop_lag_seconds of the last two minutes.",
            registry=registry,
        )
        longest.set_function(lambda: self._lags(2 * WINDOW_S).max(initial=0.0))

    def _lags(self, seconds: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        probed_at, lags = self._probes
        return lags[probed_at >= time.monotonic() - seconds]

    def last_minute(self) -> tuple[float, float, float]:
        """The lag of the last minute, seconds: the median, the 99th percentile (0 until the probes cover `PROBED_S`),
        and the longest. Takes a fraction of a millisecond."""
        lags = self._lags(WINDOW_S)
        if not len(lags):
            return 0.0, 0.0, 0.0
        p50, p99 = np.quantile(lags, (0.5, 0.99))
        is_known = lags.sum() + len(lags) * PROBE_EVERY_S >= PROBED_S  # A late loop makes few probes.
        return float(p50), float(p99) if is_known else 0.0, float(lags.max())

    async def run(self) -> None:
        """Probes until it is cancelled, as a caller of its own."""
        FLOW.set("probe")
        while True:
            due = time.monotonic() + PROBE_EVERY_S
            await asyncio.sleep(PROBE_EVERY_S)
            now = time.monotonic()
            self._observe(max(0.0, now - due), now)

    def _observe(self, seconds: float, now: float) -> None:
        self._seconds.observe(seconds)
        self._probes[:, self._count % self._probes.shape[1]] = now, seconds
        self._count += 1
