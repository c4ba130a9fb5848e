"""What a server shows of itself: the series of /metrics, the dashboard's instruments, and the reply to `Stats`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from kvpool.quotas import fullest
from kvpool.types import PoolStats
from kvpool_server.access.control import AccessControl
from kvpool_server.access.reminders import ends_of
from kvpool_server.arena_memory import ArenaMemory
from kvpool_server.http import on_loop
from kvpool_server.log_events import LogEvents
from kvpool_server.loop_lag import LoopLag
from kvpool_server.metrics import (
    CertificateExpiry,
    OwnMemory,
    PinCollector,
    PoolCollector,
    QuotaCollector,
    RefusedFiles,
    RpcMetrics,
    UsageCollector,
)
from kvpool_server.page.instruments import Instruments
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.metrics import ReportCollector
from kvpool_server.server_stats import server_stats
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.usage import Usage


class Monitoring:
    """One server's. Make it on the event loop.

    Args:
        access: None if callers are not authenticated.
        tcp_bytes: that the data workers have moved, by direction.

    Attributes:
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
    ):
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
        registry.register(PoolCollector(on_loop(loop, self._stats)))
        registry.register(UsageCollector(on_loop(loop, usage.by_model_and_tenant)))
        registry.register(QuotaCollector(on_loop(loop, pool.quotas)))
        registry.register(PinCollector(on_loop(loop, pool.pins.budgets)))
        registry.register(ReportCollector(on_loop(loop, reports.snapshot)))
        registry.register(OwnMemory())
        if access is not None:
            registry.register(CertificateExpiry(lambda: ends_of(access.credentials.value.tls)))
            registry.register(RefusedFiles(access.refused_files))
        self.lag = LoopLag(registry)
        self.rpcs = RpcMetrics(registry, tcp_bytes)

    def _stats(self) -> PoolStats:
        return dataclasses.replace(
            self._tiered.stats(self._memory.prefault.backed_bytes), engines=self._reports.engines()
        )

    def told_stats(self, started: float, http_port: int) -> PoolStats:
        """What `Stats` answers.

        Args:
            started: `time.monotonic` at the server's start.
            http_port: 0 if HTTP is off.
        """
        access = self._access
        ends = {} if access is None else ends_of(access.credentials.value.tls)
        refused = {} if access is None else access.refused_files()
        server = server_stats(started, self.rpcs, self.lag, self._usage, http_port, ends, refused)
        return dataclasses.replace(self._stats(), server=server, quotas=fullest(self._pool.quotas()))

    def instruments(self, state: Callable[[], str], events: LogEvents, started: float) -> Instruments:
        """What the dashboard reads.

        Args:
            state: the server's, as /healthz tells it.
            events: the last warnings and errors of the log.
            started: `time.monotonic` at the server's start.
        """
        access, rpcs = self._access, self.rpcs
        return Instruments(
            state=state,
            stats=lambda: self._tiered.stats(self._memory.prefault.backed_bytes),
            lookup_seconds=lambda: rpcs.buckets("Lookup"),
            loop_lag_seconds=self.lag.buckets,
            loop_lag=self.lag.last_minute,
            moved_bytes=lambda: {(each.transport, each.direction): each.nbytes for each in rpcs.transfers()},
            usage=self._usage.by_model_and_tenant,
            reported=self._reports.snapshot,
            engines=self._reports.engines,
            quotas=self._pool.quotas,
            ends=lambda: {} if access is None else ends_of(access.credentials.value.tls),
            refused_files=lambda: {} if access is None else access.refused_files(),
            events=events,
            uptime_s=lambda: time.monotonic() - started,
        )
