"""What a server shows of itself: the series of /metrics, and the snapshot that `Stats` and the page show."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import Collector

from kvpool.protocol import wire
from kvpool.report.quotas import fullest
from kvpool.v1 import pool_pb2 as pb
from kvpool.version import __version__
from kvpool_server.access.control import AccessControl
from kvpool_server.access.credentials import ends_of
from kvpool_server.memory.arena_memory import ArenaMemory
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
from kvpool_server.process.loop_lag import LoopLag
from kvpool_server.process.process_memory import own_bytes
from kvpool_server.reports.engines import EngineReports, report_families
from kvpool_server.tiering.tiered_pool import TieredPool


class Monitoring:
    """One server's. Make it on the event loop.

    Args:
        access: None if callers are not authenticated.
        tcp_bytes: that the data workers have moved, by direction.
        boot_token: of this start of the server.

    Attributes:
        http_port: of /metrics and the page; 0 if HTTP is off.
        lag: run it.
        rpcs: gets the calls.
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
        collectors: list[Collector] = [
            FamilyCollector(pool_families, on_loop(loop, self.stats)),
            FamilyCollector(usage_families, on_loop(loop, usage.by_model_and_tenant)),
            FamilyCollector(quota_families, on_loop(loop, pool.quotas)),
            FamilyCollector(pin_families, on_loop(loop, pool.pins.budgets)),
            FamilyCollector(report_families, on_loop(loop, reports.snapshot)),
            FamilyCollector(memory_families, own_bytes),
        ]
        if access is not None:
            ends = FamilyCollector(certificate_families, lambda: ends_of(access.credentials.value.tls))
            collectors += [ends, FamilyCollector(refused_file_families, access.refused_files)]
        for each in collectors:
            registry.register(each)
        self.lag = LoopLag(registry)
        self.rpcs = RpcMetrics(registry, tcp_bytes)

    def stats(self) -> pb.StatsResponse:
        """A snapshot of the server: the answer to `Stats`. Call it on the event loop."""
        stats = self._tiered.stats(self._memory.prefault.backed_bytes)
        stats.boot_token = self._boot_token
        stats.engines.extend(self._reports.engines())
        stats.quotas.extend(wire.encode_quotas(fullest(self._pool.quotas())))
        stats.server.CopyFrom(self._server_stats())
        return stats

    def _server_stats(self) -> pb.ServerStats:
        late = self.lag.last_minute()
        bounds, rpcs = self.rpcs.rpcs()
        access = self._access
        ends = {} if access is None else ends_of(access.credentials.value.tls)
        refused: Mapping[str, bool] = {} if access is None else access.refused_files()
        return pb.ServerStats(
            version=__version__,
            uptime_seconds=time.monotonic() - self._started,
            unix_seconds=time.time(),
            loop_lag_p50_seconds=late.p50,
            loop_lag_p99_seconds=late.p99,
            loop_lag_max_seconds=late.longest,
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
