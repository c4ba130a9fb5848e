"""The composition root: builds the parts of a server from its settings, and opens them in the order of their use."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from contextvars import Context
from typing import Any

import structlog

from kvpool.client.config import split_address
from kvpool.client.tracing import SERVER_SERVICE, Tracing
from kvpool.protocol.errors import ConfigError, InvalidRequestError, TransferError
from kvpool.protocol.text import beyond_memory, parse_quota
from kvpool.transport.mooncake_engine import Engine
from kvpool_server.access.audit import AuditLog
from kvpool_server.access.control import AccessControl
from kvpool_server.app.arena_memory import ArenaMemory
from kvpool_server.app.monitoring import Monitoring
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import STEP_BLOCKS, Steps, finish
from kvpool_server.data_plane.admission import MAX_SEATS
from kvpool_server.data_plane.permits import PermitTable
from kvpool_server.data_plane.workers import DataWorkers, default_count
from kvpool_server.events.messages import Encoder
from kvpool_server.events.publisher import EventStreams
from kvpool_server.events.sockets import Gate
from kvpool_server.keeping.adoption import TableFollower, restore
from kvpool_server.keeping.store import ENDED
from kvpool_server.observability.http import OperatorHttp, on_loop
from kvpool_server.observability.metrics import FamilyCollector, value_families
from kvpool_server.observability.site import Site
from kvpool_server.observability.usage import Pairs, Usage
from kvpool_server.process.addresses import EVERYWHERE, listening
from kvpool_server.process.logs import LogEvents
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.ledger_file import LedgerFile
from kvpool_server.reports.usage_ledger import UsageLedger
from kvpool_server.rpc.drain import Drain
from kvpool_server.rpc.grpc_server import GrpcServer, PoolService
from kvpool_server.rpc.handlers import own_sampling
from kvpool_server.rpc.turns import Turns
from kvpool_server.settings.config import ServerConfig
from kvpool_server.settings.loading import check_exposure, event_keys, plaintext_ports, tls_files
from kvpool_server.sharing import Limits, default_limits
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.calls import traced
from kvpool_server.tiers.peers.handover import hand_over
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import Tier, TierContext, TierOptions
from kvpool_server.value.curve import ValueFeed
from kvpool_server.value.recorder import Recorder

log = structlog.get_logger()

HOUR_S = 3_600.0
HANDOVER_S = 5.0
"""How long a predecessor may take to stop, beyond `drain_ms`, until it releases a tier's directory."""


class Composition:
    """The parts of one server. `open` makes them; nothing here waits for, drains or stops the server.

    What `open` opens goes onto the exit stack in the order of use, so that a stop, or a start that fails, closes it in
    the reverse order: first what lets clients in, last the memory.

    Args:
        stack: closes what was opened.
        state: the server's, as /healthz tells it.
        log_events: the last warnings and errors of the log, which the dashboard shows.

    Attributes:
        http_port: of /metrics and /healthz; 0 if HTTP is off.
        data: the data port's workers; None if it is off.
        drain: None until there is something to drain.
        events: None if nobody may subscribe.
    """

    def __init__(
        self,
        config: ServerConfig,
        stack: AsyncExitStack,
        state: Callable[[], str],
        announce_drain: Callable[[], Awaitable[None]],
        log_events: LogEvents,
    ):
        self._config = config
        self._stack = stack
        self._state = state
        self._announce_drain = announce_drain
        self._log_events = log_events
        self._boot_token = secrets.randbits(63) | 1
        self.port = self.http_port = 0
        self.data: DataWorkers | None = None
        self._engine: Engine | None = None
        self.drain: Drain | None = None
        self.events: EventStreams | None = None
        self._audit: AuditLog | None = None
        self._tracing: Tracing | None = None
        self._access: AccessControl | None = None
        self._limits = Limits(max_ttl_ms=config.max_ttl_ms, grace_ms=config.grace_ms, pin_share=config.pin_share)
        self.turns = Turns()

    async def open(self) -> None:
        """Returns when clients are served. Raises ConfigError if the settings cannot be met."""
        config = self._config
        self._check_settings()
        if config.otel:
            self._tracing = Tracing(SERVER_SERVICE, own_sampling if config.tls_cert else None)
            self._stack.push_async_callback(asyncio.to_thread, self._tracing.close)
        self._control_access()
        self._permits = self._make_permits() if config.data_listen else None
        self.memory = ArenaMemory(config, has_tenants=self._access is not None)
        self.pool = self._make_pool()
        pairs = Pairs(has_tenants=self._access is not None)
        usage = Usage(self.pool, pairs)
        options = [parse(text) for text in config.tier]
        tiers = self._make_tiers(options)
        await self.memory.create(self._stack)
        if self._permits is not None:
            self.data = self._start_workers(self._permits)  # They get ready meanwhile.
        adopted = self._keep_memory()
        self._reports = EngineReports(time.monotonic, pairs)
        file = await asyncio.to_thread(LedgerFile, config.ledger, int(time.time()))
        by_pair = usage.by_model_and_tenant
        self._ledger = UsageLedger(file, self._reports, pairs, by_pair, time.time, time.monotonic)
        self._stack.push_async_callback(self._ledger.close)
        in_background(self._stack, self._ledger.run())
        write_back = [each.write == "back" for each in options]
        self.tiered = TieredPool(self.pool, self.memory.segment.bytes, tiers, write_back, run=self.turns.run)
        handing = functools.partial(hand_over, self.pool, tiers) if any(tier.hands_over for tier in tiers) else None
        self.drain = drain = Drain(self.tiered, config.drain_ms, self._announce_drain, hand_over=handing)
        self.memory.hand_out(self._stack)
        self._monitoring = Monitoring(
            self.tiered, self.memory, self._reports, usage, self._access, self._tcp_bytes, self._boot_token
        )
        in_background(self._stack, self._monitoring.lag.run())
        self._value = self._watch_traffic()
        if config.http_listen:
            self.http_port = self._monitoring.http_port = self._serve_http(config.http_listen)
        await self.memory.back_step()
        if config.event_streams:
            self.events = self._publish_events()
            await self.turns.run(_announce(adopted, self.events))  # Before anything can remove them.
        self._stack.push_async_callback(self.tiered.close)
        await self.tiered.open()
        if tiers:
            await self.turns.run(_announce(adopted, self.tiered))
        if config.mooncake != "off":
            self._engine = await self._start_engine()
        if self.data is not None and not await self.data.ready():
            log.warning("no data worker is ready yet; clients that connect before one is ready use gRPC")
        await self._serve_grpc(self._make_service(drain))
        if self.memory.table is not None:
            self.memory.table.has_begun()

    def _check_settings(self) -> None:
        config = self._config
        if config.kv_events_replay and not config.kv_events:
            raise ConfigError(
                f"kv_events_replay = {config.kv_events_replay} replays nothing without events; give --kv-events, too"
            )
        check_exposure(config)
        if "unix_mode" in config.model_fields_set and not config.unix_listen:
            raise ConfigError(
                f"--unix-mode {config.unix_mode} has no effect without a Unix socket; give --unix-listen PATH, too, or "
                "leave it out"
            )

    def _control_access(self) -> None:
        config = self._config
        if config.audit_log:
            self._audit = AuditLog(config.audit_log)
            self._stack.push_async_callback(asyncio.to_thread, self._audit.close)
        if (files := tls_files(config)) is not None:
            self._access = access = AccessControl(
                config, files, self._audit, lambda principals: self.turns.run(self.pool.expire_owned(principals))
            )
            self._stack.push_async_callback(asyncio.to_thread, access.close)
            in_background(self._stack, access.watch())
            in_background(self._stack, access.warn())
        if plaintext := plaintext_ports(config):
            in_background(self._stack, warn_of_plaintext(plaintext))

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Of the server's certificate; none without TLS."""
        return () if self._access is None else self._access.credentials.value.names

    def look_at_credentials(self) -> None:
        """Reads files of credentials that have changed, at once."""
        if self._access is not None:
            self._access.woken.set()

    def _make_permits(self) -> PermitTable:
        limits, num_workers = self._limits, self._config.data_workers or default_count()
        most, sealed = limits.max_leases + limits.max_tickets, self._access is not None
        permits = PermitTable(secrets.token_bytes(32), most, num_workers, MAX_SEATS, sealed=sealed)
        self._stack.callback(permits.close)
        return permits

    def _make_pool(self) -> Pool:
        config = self._config
        new_id, policy = lambda: secrets.randbits(63) | 1, POLICIES[config.policy]
        limits_of = default_limits if self._access is None else self._access.limits_of
        arena = self.memory.arena
        pool = Pool(arena, time.monotonic, new_id, self._limits, policy, self._permits, limits_of)
        try:
            finish(pool.set_quotas_in_steps([parse_quota(text) for text in config.quota]))
        except InvalidRequestError as error:
            raise ConfigError(f"{error}; see --quota") from None
        if warning := beyond_memory(pool.quotas(), arena.arena_bytes):
            log.warning(warning)
        return pool

    def _keep_memory(self) -> list[Entry]:
        """Has the table of the memory follow the pool. Returns the entries that the server before has left."""
        if (table := self.memory.table) is None:
            return []
        began, entries = time.monotonic(), list[Entry]()
        named = {parse_quota(text).subject for text in self._config.quota}
        if self.memory.is_adopted:
            adoption, follower = restore(self.pool, table, named)
            entries = list(adoption.parents_first()) if self._config.event_streams or self._config.tier else []
            log.info(
                "adopted the memory of the server before", ended_by=os.environ.pop(ENDED, "") or "restart",
                entries=len(adoption.entries), nbytes=sum(each.complete_bytes for each in self.pool.open_namespaces()),
                seconds=round(time.monotonic() - began, 2),
            )  # fmt: skip
        else:
            follower = TableFollower(self.pool, table, named_quotas=named)
        self._stack.callback(table.has_begun)  # A start that fails, or is ended, says nothing of the memory.
        self._stack.callback(lambda: finish(follower.mark()))
        in_background(self._stack, follower.run(self.turns.run))
        return entries

    def _make_tiers(self, options: Sequence[TierOptions]) -> list[Tier]:
        config = self._config
        handover_s = config.drain_ms / 1000 + HANDOVER_S
        context = TierContext(
            split_address(config.listen),
            POLICIES[config.policy],
            handover_s,
            insecure_network=config.insecure_network,
            port=lambda: self.port,
            boot_token=self._boot_token,
            arena=lambda: self.memory.segment,
            run=self.turns.run,
        )
        tiers = [each.make(context) for each in options]
        return tiers if (tracing := self._tracing) is None else [traced(tier, tracing) for tier in tiers]

    def _tcp_bytes(self) -> dict[str, int]:
        return {} if self.data is None else self.data.nbytes()

    def _serve_http(self, address: str) -> int:
        """Returns the port."""
        host, port = split_address(address)
        loop, access = asyncio.get_running_loop(), self._access
        tls = None if access is None else access.credentials.for_http
        gate = None if access is None else access.check_scrape
        with listening(address, "/metrics", "--http-listen"):
            site = Site(loop, self._state, self._monitoring.stats, self._value.report, self._log_events)
            health = on_loop(loop, self._state)
            names = [split_address(each)[0].lower() for each in (address, self._config.listen)]
            http = OperatorHttp(host, port, self._monitoring.registry, health, tls, gate, site.answer, names)
        self._stack.push_async_callback(asyncio.to_thread, http.close)
        in_background(self._stack, site.run())
        return http.port

    def _start_workers(self, permits: PermitTable) -> DataWorkers:
        config = self._config
        host, port = split_address(config.data_listen)
        told = "" if host in EVERYWHERE or host == split_address(config.listen)[0] else host
        with listening(config.data_listen, "the data port", "--data-listen"):
            workers = DataWorkers(host, port, told, self.memory.segment, permits)
        self._stack.push_async_callback(asyncio.to_thread, workers.stop)
        return workers

    def _publish_events(self) -> EventStreams:
        config, keys, access = self._config, event_keys(self._config), self._access
        encoder = Encoder(config.kv_events_topic, config.kv_events_medium, config.kv_events_hashes == "bytes")
        streams = EventStreams(
            config.event_streams,
            None if keys is None else Gate(*keys, *(access.event_lists if access else (None, None))),
            encoder,
            self.pool.counters,
            config.kv_events_buffer,
            functools.partial(asyncio.get_running_loop().call_soon, context=Context()),  # Changes of all callers.
        )
        self._stack.push_async_callback(asyncio.to_thread, streams.close)
        self.pool.observe(streams)
        return streams

    def _watch_traffic(self) -> ValueFeed:
        """Starts the observers of lookups and puts: the recorder, and the histogram of `kvpool value`."""
        config = self._config
        recorder = Recorder(config.record, config.record_bytes, config.record_names) if config.record else None
        if recorder is not None:
            self._stack.push_async_callback(asyncio.to_thread, recorder.close)
            self.pool.traffic.append(recorder.observe)
        loop = asyncio.get_running_loop()
        value = ValueFeed(self.pool, config.policy, config.value_sample, bool(config.tier), loop.call_later)
        families = functools.partial(value_families, recorder=recorder)
        FamilyCollector(self._monitoring.registry, families, on_loop(loop, value.report))
        return value

    async def _start_engine(self) -> Engine:
        config = self._config
        host = config.mooncake_host or split_address(config.listen)[0]
        if host in EVERYWHERE:
            host = socket.gethostname()
        engine = await asyncio.to_thread(Engine, host, config.mooncake, config.mooncake_device)
        # Its threads end with the last reference, before the memory that they write to.
        self._stack.callback(setattr, self, "_engine", None)
        if config.mooncake == "rdma":
            # RDMA pins the memory; a failure there would not say that memory is short.
            await self.memory.back_all()
        try:
            await asyncio.to_thread(engine.register, self.memory.segment.whole)
        except TransferError as error:
            raise ConfigError(f"{error}; see --mooncake") from None
        log.info("Transfer Engine listens", session=engine.session, protocol=engine.protocol)
        return engine

    def _make_service(self, drain: Drain) -> PoolService:
        return PoolService(
            tiered=self.tiered,
            memory=self.memory.segment.bytes,
            boot_token=self._boot_token,
            drain=drain,
            turns=self.turns,
            metrics=self._monitoring.rpcs,
            offer=self.memory.offer(self._engine, self.data),
            stats=self._monitoring.stats,
            reports=self._reports,
            value=self._value.report,
            ledger=self._ledger,
            permits=self._permits,
            who=None if self._access is None else self._access.who,
            tracing=self._tracing,
        )

    async def _serve_grpc(self, service: PoolService) -> None:
        config, access = self._config, self._access
        credentials = None if access is None else access.credentials.for_grpc
        running, unix = None if access is None else access.running, (config.unix_listen, config.unix_mode_bits)
        self.grpc = GrpcServer(config.listen, service, *unix, credentials, running, self._audit)
        self._stack.push_async_callback(self.grpc.stop)
        self.port = self.grpc.port
        await self.grpc.start()


def _announce(entries: Sequence[Entry], observer: Observer) -> Steps[None]:
    """Tells an observer of entries that were there before it."""
    for nth, entry in enumerate(entries):
        if nth % STEP_BLOCKS == 0:
            yield
        if entry.live:
            observer.stored([entry])


async def warn_of_plaintext(ports: Sequence[str]) -> None:
    """Logs every hour what --insecure-network means for a server's plaintext ports, until cancelled."""
    while True:
        log.warning(
            "--insecure-network: any host that reaches these ports can read and change what they serve; give "
            "--tls-cert, --tls-key and --tls-client-ca (or --tokens) instead, or close the ports to all hosts but your "
            "engines",
            ports=ports,
        )
        await asyncio.sleep(HOUR_S)


def in_background(stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Starts work, which the stack cancels and awaits."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait((task,))

    stack.push_async_callback(end)
