"""The composition root: builds the server from its settings, starts it, drains it, stops it."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
import time
from collections.abc import Coroutine, Set
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from kvpool.errors import ConfigError, InvalidRequestError, TransferError
from kvpool.mooncake import Engine
from kvpool.namespace import NamespaceSpec
from kvpool.quotas import beyond_memory, fullest, parse_quota
from kvpool.tracing import SERVER_SERVICE, Tracing
from kvpool.types import PoolStats
from kvpool.version import __version__
from kvpool_server.access.audit import AuditLog
from kvpool_server.access.control import AccessControl
from kvpool_server.access.reminders import HOUR_S, ends_of, repeat, warn_of_plaintext
from kvpool_server.addresses import EVERYWHERE, cannot_listen, split_address
from kvpool_server.arena_memory import ArenaMemory
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.cache.limits import Limits, default_limits
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Steps
from kvpool_server.cache.transfers import NoTransfers
from kvpool_server.config import ServerConfig
from kvpool_server.data_plane.admission import MAX_SEATS
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.data_plane.workers import DataWorkers, default_count
from kvpool_server.drain import Drain
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.gate import Gate
from kvpool_server.events.streams import EventStreams
from kvpool_server.exposure import (
    check_exposure,
    check_tenant_memory,
    check_unix_mode,
    event_keys,
    plaintext_ports,
    tls_files,
)
from kvpool_server.grpc_server import GrpcServer
from kvpool_server.history import History
from kvpool_server.http import DRAINING, SERVING, STARTING, OperatorHttp, on_loop
from kvpool_server.log_events import LogEvents
from kvpool_server.lookup_streams import LookupStreams
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
from kvpool_server.page.site import Site
from kvpool_server.pairs import Pairs
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.metrics import ReportCollector
from kvpool_server.reports.usage_ledger import open_ledger
from kvpool_server.request_traces import RequestTraces
from kvpool_server.server_stats import server_stats
from kvpool_server.service import PoolService
from kvpool_server.services.chunks import ChunkService
from kvpool_server.services.drain import DrainService
from kvpool_server.services.explanations import ExplanationService
from kvpool_server.services.hints import HintService
from kvpool_server.services.leases import LeaseService
from kvpool_server.services.listings import ListingService
from kvpool_server.services.puts import PutService
from kvpool_server.services.quotas import QuotaService
from kvpool_server.services.region_permits import RegionPermits
from kvpool_server.services.removals import RemovalService
from kvpool_server.services.reports import ReportService
from kvpool_server.services.routing import RoutingService
from kvpool_server.services.served_pool import ServedPool
from kvpool_server.services.sessions import SessionService
from kvpool_server.services.transfers import TransferService
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import TierContext
from kvpool_server.tiers.traced import SpansOfBlocks, TracedTier
from kvpool_server.traced_service import TracedLeaseService, trace_calls
from kvpool_server.turns import Turns
from kvpool_server.usage import Usage
from kvpool_server.value.instruments import ValueCollector, ValueInstruments
from kvpool_server.value.recorder import Recorder
from kvpool_server.verifier import Verifier

log = structlog.get_logger()

EXPIRE_EVERY_S = 0.5
HANDOVER_S = 5.0
"""How long a predecessor may take to stop, beyond `drain_ms`, until it releases a tier's directory."""


class Server:
    """One kvpool server. `start`, then `wait`, then `stop`, all on one event loop, which owns the pool.

    What `start` opens goes onto one exit stack in the order of use, so that a stop, or a start that fails, closes it in
    the reverse order: first what lets clients in, last the memory.

    Args:
        events: the last warnings and errors of the log, which the dashboard shows; None: it shows none.

    Attributes:
        port: of gRPC, once started. The settings may have asked for any free port.
        http_port: of /metrics and /healthz; 0 if HTTP is off.
        engine: Mooncake's Transfer Engine, once started; None if it is off.
        data: the data port's workers, once started; None if it is off.
    """

    def __init__(self, config: ServerConfig, events: LogEvents | None = None):
        self.config = config
        self._events = events or LogEvents()
        self._started = time.monotonic()
        self.port = self.http_port = 0
        self.boot_token = secrets.randbits(63) | 1
        self.engine: Engine | None = None
        self.data: DataWorkers | None = None
        self._access: AccessControl | None = None
        self._audit: AuditLog | None = None
        self._tracing: Tracing | None = None
        self._drain: Drain | None = None
        self._events_of_blocks: EventStreams | None = None
        self._signals: set[asyncio.Task[Any]] = set()  # asyncio keeps no reference to its tasks.
        self._state = STARTING
        self._stopping = asyncio.Event()
        self._failure = ""
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Returns when clients are served. Raises ConfigError if the settings cannot be met; all is closed then."""
        try:
            await self._start()
        except BaseException as error:
            await self._open.aclose()
            if isinstance(error, MemoryError):
                raise ConfigError(f"{error}; lower --memory") from None
            raise
        if self._state == STARTING:  # Else a first call has drained the server already.
            self._state = SERVING
        log.info(
            "listening", version=__version__, grpc=f"{split_address(self.config.listen)[0]}:{self.port}",
            http_port=self.http_port or None, data_port=self.data.info.port if self.data else None,
            unix=self.config.unix_listen or None, arena_bytes=self.pool.arena.arena_bytes,
        )  # fmt: skip

    async def _start(self) -> None:
        config = self.config
        if config.kv_events_replay and not config.kv_events:
            raise ConfigError(
                f"kv_events_replay = {config.kv_events_replay} replays nothing without events; give --kv-events, too"
            )
        if config.otel:
            self._tracing = Tracing(SERVER_SERVICE, _own_sampling if config.tls_cert else None)
            self._open.push_async_callback(asyncio.to_thread, self._tracing.close)
        check_exposure(config)
        check_unix_mode(config)
        check_tenant_memory(config)
        if config.audit_log:
            self._audit = AuditLog(config.audit_log)
            self._open.push_async_callback(asyncio.to_thread, self._audit.close)
        if (files := tls_files(config)) is not None:
            self._access = access = AccessControl(config, files, self._audit, self._expire_owned)
            self._open.push_async_callback(asyncio.to_thread, access.close)
            self._in_background(access.run())
            self._in_background(access.warn())
        if plaintext := plaintext_ports(config):
            self._in_background(repeat(lambda: warn_of_plaintext(plaintext), HOUR_S))
        self._permits = self._make_permits() if config.data_listen else None
        self._memory = ArenaMemory(config, has_tenants=self._access is not None)
        self.pool = self._make_pool()
        self.usage = Usage(self.pool)
        options = [parse(text) for text in config.tier]
        handover_s = config.drain_ms / 1000 + HANDOVER_S
        context = TierContext(split_address(config.listen), POLICIES[config.policy], handover_s)
        tiers = [each.make(context) for each in options]
        if (tracing := self._tracing) is not None:
            spans = SpansOfBlocks(tracing)
            self.pool.observe(spans)
            tiers = [TracedTier(tier, tracing, spans) for tier in tiers]
        await self._memory.create(self._open)
        self._turns = Turns()
        pairs = Pairs(has_tenants=self._access is not None)
        self._reports = EngineReports(time.monotonic, pairs)
        usage = self.usage.by_model_and_tenant
        self._ledger = await open_ledger(config.ledger, self._reports, pairs, usage, time.time, time.monotonic)
        self._open.push_async_callback(self._ledger.close)
        self._in_background(self._ledger.run())
        write_back = [each.write == "back" for each in options]
        self._tiered = TieredPool(self.pool, self._memory.segment.bytes, tiers, write_back, run=self._turns.run)
        self._drain = drain = Drain(self._tiered, config.drain_ms, self._announce_drain)
        self._memory.hand_out(self._open)
        registry = CollectorRegistry()
        metrics = self._serve_http(registry)
        if self._permits is not None:
            self.data = self._start_workers(self._permits)
        await self._memory.prefault.step()
        if config.event_streams or config.prefix_streams:
            self._publish_events()
        self._open.push_async_callback(self._tiered.close)
        await self._tiered.open()
        self._value = self._watch_traffic(registry)
        if config.mooncake != "off":
            self.engine = await self._start_engine()
        if self.data is not None and not await self.data.ready():
            log.warning("no data worker is ready yet; clients that connect before one is ready use gRPC")
        await self._serve_grpc(metrics, drain)
        self._in_background(self._expire())
        self._in_background(self._stop_once_drained(drain))
        self._in_background(self._prefault_rest())
        self._in_background(self._memory.free_strays())
        if self.data is not None:
            self._in_background(self.data.watch())

    async def _expire_owned(self, principals: Set[str]) -> None:
        await self._turns.run(self.pool.expire_owned(principals))

    def look_at_credentials(self) -> None:
        """Reads files of credentials that have changed, at once; for signal handlers."""
        if self._access is not None:
            self._access.look_at_once()

    @property
    def _limits(self) -> Limits:
        config = self.config
        return Limits(max_ttl_ms=config.max_ttl_ms, grace_ms=config.grace_ms, pin_share=config.pin_share)

    def _make_permits(self) -> PermitTable:
        limits, num_workers = self._limits, self.config.data_workers or default_count()
        most, sealed = limits.max_leases + limits.max_tickets, self._access is not None
        permits = PermitTable(secrets.token_bytes(32), most, num_workers, MAX_SEATS, sealed=sealed)
        self._open.callback(permits.close)
        return permits

    def _make_pool(self) -> Pool:
        config = self.config
        new_id, policy = lambda: secrets.randbits(63) | 1, POLICIES[config.policy]
        limits_of = default_limits if self._access is None else self._access.limits_of
        arena, permits = self._memory.arena, self._permits or NoTransfers()
        pool = Pool(arena, time.monotonic, new_id, self._limits, policy, permits, limits_of)
        try:
            pool.set_quotas([parse_quota(text) for text in config.quota])
        except InvalidRequestError as error:
            raise ConfigError(f"{error}; see --quota") from None
        if warning := beyond_memory(pool.quotas(), arena.arena_bytes):
            log.warning(warning)
        return pool

    def _serve_http(self, registry: CollectorRegistry) -> RpcMetrics:
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        loop = asyncio.get_running_loop()
        registry.register(PoolCollector(on_loop(loop, self._stats)))
        registry.register(UsageCollector(on_loop(loop, self.usage.by_model_and_tenant)))
        registry.register(QuotaCollector(on_loop(loop, self.pool.quotas)))
        registry.register(PinCollector(on_loop(loop, self.pool.pins.budgets)))
        registry.register(ReportCollector(on_loop(loop, self._reports.snapshot)))
        registry.register(OwnMemory())
        if (access := self._access) is not None:
            registry.register(CertificateExpiry(lambda: ends_of(access.credentials.value.tls)))
            registry.register(RefusedFiles(access.refused_files))
        self._lag = LoopLag(registry)
        self._in_background(self._lag.run())
        metrics = RpcMetrics(registry, lambda: self.data.nbytes() if self.data is not None else {})
        if self.config.http_listen:
            host, port = split_address(self.config.http_listen)
            tls = None if access is None else access.credentials.for_http
            gate = None if access is None else access.check_scrape
            try:
                instruments, history = self._instruments(metrics), History(boot=f"{self.boot_token:016x}")
                site = Site(instruments, history, self._turns, loop, lambda: self._value.report_of_all())
                http = OperatorHttp(host, port, registry, on_loop(loop, lambda: self._state), tls, gate, site)
            except OSError as error:
                raise cannot_listen(self.config.http_listen, "/metrics", "--http-listen", error) from None
            self._open.push_async_callback(asyncio.to_thread, http.close)
            self.http_port = http.port
            self._in_background(site.run())
        return metrics

    def _instruments(self, metrics: RpcMetrics) -> Instruments:
        """What the dashboard reads."""
        access = self._access
        return Instruments(
            state=lambda: self._state,
            stats=lambda: self._tiered.stats(self._memory.prefault.backed_bytes),
            lookup_seconds=lambda: metrics.buckets("Lookup"),
            loop_lag_seconds=self._lag.buckets,
            loop_lag=self._lag.last_minute,
            moved_bytes=lambda: {(each.transport, each.direction): each.nbytes for each in metrics.transfers()},
            usage=self.usage.by_model_and_tenant,
            reported=self._reports.snapshot,
            engines=self._reports.engines,
            quotas=self.pool.quotas,
            ends=lambda: {} if access is None else ends_of(access.credentials.value.tls),
            refused_files=lambda: {} if access is None else access.refused_files(),
            events=self._events,
            uptime_s=lambda: time.monotonic() - self._started,
        )

    def _start_workers(self, permits: PermitTable) -> DataWorkers:
        config = self.config
        host, port = split_address(config.data_listen)
        told = "" if host in EVERYWHERE or host == split_address(config.listen)[0] else host
        try:
            workers = DataWorkers(host, port, told, self._memory.segment, permits, self._memory.extent_files)
        except OSError as error:
            raise cannot_listen(config.data_listen, "the data port", "--data-listen", error) from None
        self._open.push_async_callback(asyncio.to_thread, workers.stop)
        return workers

    def _publish_events(self) -> None:
        config, keys = self.config, event_keys(self.config)
        encoder = Encoder(config.kv_events_topic, config.kv_events_medium, config.kv_events_hashes == "bytes")
        streams = EventStreams(
            config.event_streams,
            None if keys is None else Gate(*keys),
            encoder,
            self.pool.counters,
            config.kv_events_buffer,
            asyncio.get_running_loop().call_soon,
            config.prefix_streams,
            self._spec_of,
        )
        self._open.push_async_callback(asyncio.to_thread, streams.close)
        self.pool.observe(streams)
        self._events_of_blocks = streams

    def _spec_of(self, fingerprint: bytes) -> NamespaceSpec | None:
        namespace = self.pool.namespace(fingerprint)
        return None if namespace is None else namespace.spec

    def _watch_traffic(self, registry: CollectorRegistry) -> ValueInstruments:
        """Starts what is told of lookups and puts: the simulation of other arena sizes, and the recorder."""
        config = self.config
        recorder = Recorder(config.record, config.record_bytes, config.record_names) if config.record else None
        if recorder is not None:
            self._open.push_async_callback(asyncio.to_thread, recorder.close)
        value = ValueInstruments(self.pool, config.policy, config.value_sample, self._tiered.stats().tiers, recorder)
        registry.register(ValueCollector(on_loop(asyncio.get_running_loop(), value.total), recorder))
        return value

    async def _start_engine(self) -> Engine:
        config = self.config
        host = config.mooncake_host or split_address(config.listen)[0]
        if host in EVERYWHERE:
            host = socket.gethostname()
        engine = await asyncio.to_thread(Engine.start, host, config.mooncake, config.mooncake_device)
        self._open.callback(self._drop_engine)
        if config.mooncake == "rdma":
            # RDMA pins the memory; a failure there would not say that memory is short.
            await self._memory.prefault.all()
        try:
            await asyncio.to_thread(engine.register, self._memory.segment.whole)
        except TransferError as error:
            raise ConfigError(f"{error}; see --mooncake") from None
        log.info("Transfer Engine listens", session=engine.session, protocol=engine.protocol)
        return engine

    def _drop_engine(self) -> None:
        self.engine = None  # Its threads end with the last reference, before the memory that they write to.

    def _make_service(self, metrics: RpcMetrics, drain: Drain) -> PoolService:
        pool, memory, access = self.pool, self._memory.segment.bytes, self._access
        served = ServedPool(self._tiered, self.boot_token, drain, self._turns.run)
        permits = None if self._permits is None else RegionPermits(pool, self._permits)
        streams = LookupStreams(pool.limits.max_streams)
        verifier = Verifier(pool, memory, self._turns.run)
        traces, events, started = RequestTraces(time.monotonic), self._events_of_blocks, time.monotonic()
        offer = self._memory.offer(self.engine, self.data.info if self.data is not None else None)
        lease_service = LeaseService if self._tracing is None else partial(TracedLeaseService, self._tracing)
        groups = (
            SessionService(served, offer, self._memory.of_tenant, None if access is None else access.who, events),
            lease_service(served, streams, permits, metrics, self._ledger),
            PutService(served, permits),
            TransferService(served, memory, metrics),
            ChunkService(served, memory, metrics, verifier),
            HintService(served),
            RemovalService(served, verifier),
            ExplanationService(served, traces),
            RoutingService(served, self._reports, events),
            ReportService(served, self._reports, traces, self._ledger),
            ListingService(served, lambda: self._told_stats(started, metrics), self._reports, self._value.report),
            QuotaService(served),
            DrainService(served),
        )
        service = PoolService(pool.limits, streams, groups)
        if self._tracing is not None:
            trace_calls(service, self._tracing)
        return service

    async def _serve_grpc(self, metrics: RpcMetrics, drain: Drain) -> None:
        config, access = self.config, self._access
        who = None if access is None else access.who
        service = self._make_service(metrics, drain)
        credentials = None if access is None else access.credentials.for_grpc
        running = None if access is None else access.running
        unix = config.unix_listen, config.unix_mode_bits
        self._grpc = GrpcServer(config.listen, service, metrics, *unix, credentials, who, running, self._audit)
        self._open.push_async_callback(self._grpc.stop)
        self.port = self._grpc.port
        await self._grpc.start()

    def _stats(self) -> PoolStats:
        return dataclasses.replace(
            self._tiered.stats(self._memory.prefault.backed_bytes), engines=self._reports.engines()
        )

    def _told_stats(self, started: float, metrics: RpcMetrics) -> PoolStats:
        """What `Stats` answers."""
        access = self._access
        ends = {} if access is None else ends_of(access.credentials.value.tls)
        refused = {} if access is None else access.refused_files()
        server = server_stats(started, metrics, self._lag, self.usage, self.http_port, ends, refused)
        return dataclasses.replace(self._stats(), server=server, quotas=fullest(self.pool.quotas()))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait((task,))

        self._open.push_async_callback(end)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            try:
                await self._turns.run(self._settle())
            except Exception:
                log.exception("expiring leases and tickets failed; the next call of a client expires them")

    def _settle(self) -> Steps[None]:
        while self.pool.settle() or self.pool.rebalance():
            yield

    async def _prefault_rest(self) -> None:
        started = time.monotonic()
        try:
            await self._memory.prefault.all()
        except MemoryError as error:
            self._failure = f"{error}; lower --memory"
            self._stopping.set()
            return
        seconds = round(time.monotonic() - started, 2)
        log.info("arena prefaulted", nbytes=self._memory.prefault.backed_bytes, seconds=seconds)

    def request_stop(self) -> None:
        """Ends `wait`; for signal handlers. A drain under way goes on, for `drain_ms` at most."""
        if self._drain is not None and self._drain.is_draining:
            self._begin_drain(self._drain, self.config.drain_ms)
        else:
            self._stopping.set()

    def request_drain(self) -> None:
        """Begins a drain, which ends `wait`; for signal handlers. A server that does not serve yet stops at once."""
        if self._drain is not None and self._state == SERVING:
            self._begin_drain(self._drain, 0)
        else:
            self.request_stop()

    def _begin_drain(self, drain: Drain, deadline_ms: int) -> None:
        task = asyncio.create_task(drain.begin(deadline_ms))
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    async def _announce_drain(self) -> None:
        """Has load balancers, probes and routers send nothing more to this server."""
        self._state = DRAINING
        await self._grpc.announce_end()
        if self._events_of_blocks is not None:
            self._events_of_blocks.withdraw()

    async def _stop_once_drained(self, drain: Drain) -> None:
        await drain.run()
        self._stopping.set()

    async def wait(self) -> None:
        """Returns when the server is to stop. Raises ConfigError if it cannot go on."""
        await self._stopping.wait()
        if self._failure:
            raise ConfigError(self._failure)

    async def stop(self) -> None:
        """Drains and stops. Every thread, task, process and file of the server is gone afterwards."""
        self._state = DRAINING
        ends_at = time.monotonic() + self.config.drain_ms / 1000
        if self._drain is not None and self._drain.is_draining:
            await self._grpc.stop(min(self._drain.left_s, self.config.drain_ms / 1000))
        else:
            log.info("draining", tickets=self.pool.stats().num_tickets, leases=self.pool.stats().num_leases)
            await self._grpc.stop(self.config.drain_ms / 1000)
            await self._tiered.drain(max(0.0, ends_at - time.monotonic()))
        await self._open.aclose()
        log.info("stopped")


def _own_sampling(sampler: Any) -> Any:
    """The sampler of a server whose callers are authenticated, made from that of the environment."""
    from kvpool_server.span_sampling import OwnSampling  # OpenTelemetry is installed where there is tracing alone.

    return OwnSampling(sampler)
