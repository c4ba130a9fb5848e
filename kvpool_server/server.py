"""The composition root: builds the server from its settings, starts it, drains it, stops it."""

from __future__ import annotations

import asyncio
import datetime as dt
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from kvpool.errors import ConfigError, InvalidRequestError, KVPoolError, TransferError
from kvpool.mooncake import Engine
from kvpool.quotas import parse_quota
from kvpool.tls import TlsFiles
from kvpool.tokens import TokenRecord, read_records
from kvpool.types import PoolStats
from kvpool.version import __version__
from kvpool.watched_files import WatchedFiles
from kvpool.wire import status_of
from kvpool_server.access.audit import AuditLog
from kvpool_server.access.caller import Certificates, Tokens, Who, check_scrape
from kvpool_server.access.credentials import ServerCredentials
from kvpool_server.access.deny_list import DenyList
from kvpool_server.access.identity_limits import IdentityLimitsFile
from kvpool_server.access.jwks import IssuerKeys, read_keys
from kvpool_server.access.oidc import IssuedTokens, OidcRules, check_installed
from kvpool_server.access.reminders import DAY_S, HOUR_S, ends_of, repeat, warn_of_ends, warn_of_plaintext
from kvpool_server.access.running_calls import RunningCalls
from kvpool_server.access.watch import AccessWatch
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
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.gate import Gate
from kvpool_server.events.streams import EventStreams
from kvpool_server.exposure import check_exposure, event_keys, plaintext_ports, tls_files
from kvpool_server.grpc_server import GrpcServer
from kvpool_server.http import SERVING, OperatorHttp, on_loop
from kvpool_server.loop_lag import LoopLag
from kvpool_server.metrics import CertificateExpiry, OwnMemory, PoolCollector, RpcMetrics
from kvpool_server.service import PoolService
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.registry import parse
from kvpool_server.tiers.tier import TierContext
from kvpool_server.turns import Turns

log = structlog.get_logger()

EXPIRE_EVERY_S = 0.5
HANDOVER_S = 5.0
"""How long a predecessor may take to stop, beyond `drain_ms`, until it releases a tier's directory."""


class Server:
    """One kvpool server. `start`, then `wait`, then `stop`, all on one event loop, which owns the pool.

    What `start` opens goes onto one exit stack in the order of use, so that a stop, or a start that fails, closes it in
    the reverse order: first what lets clients in, last the memory.

    Attributes:
        port: of gRPC, once started. The settings may have asked for any free port.
        http_port: of /metrics and /healthz; 0 if HTTP is off.
        engine: Mooncake's Transfer Engine, once started; None if it is off.
        data: the data port's workers, once started; None if it is off.
    """

    def __init__(self, config: ServerConfig):
        self.config = config
        self.port = self.http_port = 0
        self.boot_token = secrets.randbits(63) | 1
        self.engine: Engine | None = None
        self.data: DataWorkers | None = None
        self._credentials: ServerCredentials | None = None
        self._who: Who | None = None
        self._running: RunningCalls | None = None
        self._watch: AccessWatch | None = None
        self._audit: AuditLog | None = None
        self._state = "starting"
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
        check_exposure(config)
        if config.audit_log:
            self._audit = AuditLog(config.audit_log)
            self._open.push_async_callback(asyncio.to_thread, self._audit.close)
        if (files := tls_files(config)) is not None:
            self._ask_who_calls(files)
        if plaintext := plaintext_ports(config):
            self._in_background(repeat(lambda: warn_of_plaintext(plaintext), HOUR_S))
        if config.identity_limits and self._who is None:
            raise ConfigError("identity_limits bounds nobody where callers prove nothing; give --tls-cert, too")
        self._permits = self._make_permits() if config.data_listen else None
        self._memory = ArenaMemory(config, has_tenants=self._who is not None)
        self.pool = self._make_pool()
        options = [parse(text) for text in config.tier]
        handover_s = config.drain_ms / 1000 + HANDOVER_S
        context = TierContext(split_address(config.listen), POLICIES[config.policy], handover_s)
        tiers = [each.make(context) for each in options]
        await self._memory.create(self._open)
        self._turns = Turns()
        write_back = [each.write == "back" for each in options]
        self._tiered = TieredPool(self.pool, self._memory.segment.bytes, tiers, write_back, run=self._turns.run)
        self._memory.hand_out(self._open)
        metrics = self._serve_http()
        if self._permits is not None:
            self.data = self._start_workers(self._permits)
        await self._memory.prefault.step()
        if config.event_streams:
            self._publish_events()
        self._open.push_async_callback(self._tiered.close)
        await self._tiered.open()
        if config.mooncake != "off":
            self.engine = await self._start_engine()
        if self.data is not None and not await self.data.ready():
            log.warning("no data worker is ready yet; clients that connect before one is ready use gRPC")
        await self._serve_grpc(metrics)
        self._in_background(self._expire())
        self._in_background(self._prefault_rest())
        if self.data is not None:
            self._in_background(self.data.watch())

    def _ask_who_calls(self, files: TlsFiles) -> None:
        """Reads the credentials of the server and of its callers, and watches them from now on."""
        config = self.config
        credentials = ServerCredentials(files, self._when_read("certificates", _named(files)))
        denied = DenyList(config.deny, self._when_read("deny list", [config.deny])) if config.deny else None
        watched: list[WatchedFiles[Any]] = [credentials.identity, *([] if denied is None else [denied])]
        who: Who
        if path := config.tokens:
            read = self._when_read("tokens", [path])
            tokens = WatchedFiles([path], lambda: _read_tokens(path), when_read=read)
            who = Tokens(tokens, denied)
            watched.append(tokens)
        elif config.oidc_issuer:
            who = self._of_issuer(denied, watched)
        else:
            who = Certificates(denied, config.trust_domain)
        log.info("the server's certificate", names=credentials.names, ends_at=str(credentials.identity.value.ends_at))
        self._credentials, self._who = credentials, who
        self._running = RunningCalls(who.checked, config.max_ttl_ms / 1_000)
        self._watch = AccessWatch(watched, self._running, self._expire_owned)
        self._in_background(self._watch.run())
        self._in_background(repeat(lambda: warn_of_ends(credentials.identity.value, dt.datetime.now(dt.UTC)), DAY_S))

    def _of_issuer(self, denied: DenyList | None, watched: list[WatchedFiles[Any]]) -> Who:
        """Callers with tokens of an OpenID Connect issuer; adds its file of keys to those that are watched."""
        config = self.config
        check_installed()
        rules = OidcRules(config.oidc_issuer, config.oidc_audience, config.oidc_tenant_claim, config.oidc_role_claim)
        if path := config.oidc_jwks:
            file = WatchedFiles([path], lambda: read_keys(path), when_read=self._when_read("issuer's keys", [path]))
            watched.append(file)
            return IssuedTokens(rules, file, denied=denied)
        keys = IssuerKeys(config.oidc_issuer, self._when_read("issuer's keys", [config.oidc_issuer]))
        self._open.push_async_callback(asyncio.to_thread, keys.close)
        return IssuedTokens(rules, keys, keys.refetch, denied)

    def _when_read(self, what: str, paths: Sequence[str]) -> Callable[[ConfigError | None], None]:
        audit = self._audit
        return lambda error: audit.read(what, paths, error) if audit is not None else None

    async def _expire_owned(self, principals: Set[str]) -> None:
        await self._turns.run(self.pool.expire_owned(principals))

    def look_at_credentials(self) -> None:
        """Reads files of credentials that have changed, at once; for signal handlers."""
        if self._watch is not None:
            self._watch.look_at_once()

    @property
    def _limits(self) -> Limits:
        return Limits(max_ttl_ms=self.config.max_ttl_ms, grace_ms=self.config.grace_ms)

    def _make_permits(self) -> PermitTable:
        limits, num_workers = self._limits, self.config.data_workers or default_count()
        most, sealed = limits.max_leases + limits.max_tickets, self._credentials is not None
        permits = PermitTable(secrets.token_bytes(32), most, num_workers, MAX_SEATS, sealed=sealed)
        self._open.callback(permits.close)
        return permits

    def _make_pool(self) -> Pool:
        config = self.config
        new_id, policy = lambda: secrets.randbits(63) | 1, POLICIES[config.policy]
        limits_of = IdentityLimitsFile(config.identity_limits) if config.identity_limits else default_limits
        arena, permits = self._memory.arena, self._permits or NoTransfers()
        pool = Pool(arena, time.monotonic, new_id, self._limits, policy, permits, limits_of)
        try:
            pool.set_quotas([parse_quota(text) for text in config.quota])
        except InvalidRequestError as error:
            raise ConfigError(f"{error}; see --quota") from None
        return pool

    def _serve_http(self) -> RpcMetrics:
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        loop = asyncio.get_running_loop()
        registry.register(PoolCollector(on_loop(loop, self._stats)))
        registry.register(OwnMemory())
        if (credentials := self._credentials) is not None:
            registry.register(CertificateExpiry(lambda: ends_of(credentials.identity.value)))
        self._in_background(LoopLag(registry).run())
        metrics = RpcMetrics(registry, lambda: self.data.nbytes() if self.data is not None else {})
        if self.config.http_listen:
            host, port = split_address(self.config.http_listen)
            tls = None if self._credentials is None else self._credentials.for_http
            gate = None if self._who is None else self._may_scrape
            try:
                http = OperatorHttp(host, port, registry, on_loop(loop, lambda: self._state), tls, gate)
            except OSError as error:
                raise cannot_listen(self.config.http_listen, "/metrics", "--http-listen", error) from None
            self._open.push_async_callback(asyncio.to_thread, http.close)
            self.http_port = http.port
        return metrics

    def _may_scrape(self, address: str, certificate: bytes | None, authorization: Sequence[str]) -> None:
        """Raises UnauthenticatedError and PermissionDeniedError. Called by HTTP's threads."""
        assert self._who is not None
        caller = None
        try:
            caller = self._who.of_request(certificate, authorization).principal
            check_scrape(caller)
        except KVPoolError as error:
            if self._audit is not None:
                status = status_of(error).name
                self._audit.write("/metrics", status, caller=caller, peer=address, why=str(error))
            raise

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
        )
        self._open.push_async_callback(asyncio.to_thread, streams.close)
        self.pool.observe(streams)

    async def _start_engine(self) -> Engine:
        config = self.config
        host = config.mooncake_host or split_address(config.listen)[0]
        if host in EVERYWHERE:
            host = socket.gethostname()
        engine = await asyncio.to_thread(Engine.start, host, config.mooncake, config.mooncake_device)
        self._open.callback(self._drop_engine)
        if config.mooncake == "rdma":
            await (
                self._memory.prefault.all()
            )  # RDMA pins the memory; a failure there would not say that memory is short.
        try:
            await asyncio.to_thread(engine.register, self._memory.segment.whole)
        except TransferError as error:
            raise ConfigError(f"{error}; see --mooncake") from None
        log.info("Transfer Engine listens", session=engine.session, protocol=engine.protocol)
        return engine

    def _drop_engine(self) -> None:
        self.engine = None  # Its threads end with the last reference, before the memory that they write to.

    async def _serve_grpc(self, metrics: RpcMetrics) -> None:
        service = PoolService(
            self._tiered,
            self._memory.segment.bytes,
            self._memory.offer(self.engine, self.data.info if self.data is not None else None),
            self.boot_token,
            metrics,
            self._stats,
            self._permits,
            self._who,
            self._turns,
            self._memory.of_tenant,
        )
        config = self.config
        credentials = None if self._credentials is None else self._credentials.for_grpc
        unix = config.unix_listen, config.unix_mode_bits
        self._grpc = GrpcServer(
            config.listen, service, metrics, *unix, credentials, self._who, self._running, self._audit
        )
        self._open.push_async_callback(self._grpc.stop)
        self.port = self._grpc.port
        await self._grpc.start()

    def _stats(self) -> PoolStats:
        return self._tiered.stats(self._memory.prefault.backed_bytes)

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
        """Ends `wait`; for signal handlers."""
        self._stopping.set()

    async def wait(self) -> None:
        """Returns when the server is to stop. Raises ConfigError if it cannot go on."""
        await self._stopping.wait()
        if self._failure:
            raise ConfigError(self._failure)

    async def stop(self) -> None:
        """Drains and stops. Every thread, task, process and file of the server is gone afterwards."""
        self._state = "draining"
        log.info("draining", tickets=self.pool.stats().num_tickets, leases=self.pool.stats().num_leases)
        ends_at = time.monotonic() + self.config.drain_ms / 1000
        await self._grpc.stop(self.config.drain_ms / 1000)
        await self._tiered.drain(max(0.0, ends_at - time.monotonic()))
        await self._open.aclose()
        log.info("stopped")


def _read_tokens(path: str) -> dict[str, TokenRecord]:
    records = read_records(Path(path))
    if not records:
        log.warning("the file of tokens has no token, so nobody can call; make one: kvpool token create", path=path)
    return records


def _named(files: TlsFiles) -> list[str]:
    return [path for path in (files.ca, files.cert, files.key) if path]
