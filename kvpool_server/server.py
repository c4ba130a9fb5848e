"""The composition root: builds the server from its settings, starts it, drains it, stops it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import re
import secrets
import socket
import threading
import time
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from pydantic import ByteSize

from kvpool.client import MAX_MESSAGE_BYTES
from kvpool.errors import ConfigError, InvalidRequestError, TransferError
from kvpool.mooncake import Engine
from kvpool.quotas import parse_quota
from kvpool.segment import Segment, could_hold, sweep
from kvpool.types import MooncakeInfo, Offer, PoolStats
from kvpool.version import __version__
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.observer import Observer, Observers
from kvpool_server.cache.pool import Pool
from kvpool_server.config import ServerConfig, split_address
from kvpool_server.data_plane.workers import DataWorkers, default_count
from kvpool_server.events.encoder import Encoder
from kvpool_server.events.history import History
from kvpool_server.events.ledger import Ledger
from kvpool_server.events.publisher import Publisher
from kvpool_server.http import OperatorHttp
from kvpool_server.metrics import OwnMemory, PoolCollector, RpcMetrics
from kvpool_server.service import PIECE_BYTES, SERVICE_NAME, PoolService, add_service
from kvpool_server.tiering.tiers import Tiers
from kvpool_server.tiers.options import TierContext
from kvpool_server.tiers.registry import parse

log = structlog.get_logger()

PREFAULT_STEP_BYTES = 32 << 20
EXPIRE_EVERY_S = 0.5
PREDECESSOR_S = 15.0
HANDOVER_S = 5.0
"""How long a predecessor may take to stop, beyond `drain_ms`, until it lets go of a tier's directory."""


class Server:
    """One kvpool server. `start`, then `wait`, then `stop`.

    Attributes:
        port: of gRPC, once started (settings may say 0).
        http_port: of /metrics and /healthz; 0 if there is none.
        engine: Mooncake's, once started; None if it is off.
        data: the data port's workers, once started; None if it is off.
    """

    def __init__(self, config: ServerConfig):
        self.config = config
        self.port = self.http_port = 0
        self.boot_token = secrets.randbits(63) | 1
        self._stopping = asyncio.Event()
        self._failure = ""
        self._draining = False
        self._publisher: Publisher | None = None
        self._tiers: Tiers | None = None
        self._observers: list[Observer] = []
        self.engine: Engine | None = None
        self.data: DataWorkers | None = None
        self._prefaulted_bytes = 0
        self._prefault_stop = threading.Event()

    async def start(self) -> None:
        """Listens. Raises ConfigError where the settings cannot be met; nothing is left behind then."""
        config = self.config
        if config.kv_events_replay and not config.kv_events:
            raise ConfigError(f"nothing to replay at {config.kv_events_replay}: give --kv-events, too")
        for path in sweep(config.shm_dir):
            log.info("removed the memory of a dead server", path=path)
        _check_memory(config.memory)
        arena = Arena(config.memory, backed_bytes=0)
        limits = Limits(max_ttl_ms=config.max_ttl_ms, grace_ms=config.grace_ms)
        policy = POLICIES[config.policy]
        self.pool = Pool(arena, time.monotonic, lambda: secrets.randbits(63) | 1, limits, policy)
        try:
            self.pool.set_quotas([parse_quota(text) for text in config.quota])
        except InvalidRequestError as error:
            raise ConfigError(f"{error}; see --quota") from None
        self._segment = await self._create_segment(arena.arena_bytes)
        try:
            if config.data_listen:
                self.data = self._start_workers()
            arena.back(self._prefault_step())
            if config.kv_events:
                self._publisher = self._publish_events()
            if config.tier:
                self._tiers = await self._open_tiers()
            self.pool.entry_table.observer = Observers(self._observers)
            if config.mooncake != "off":
                self.engine = await self._register_arena(arena)
            if self.data is not None and not await self.data.ready():
                log.warning("no data worker is ready yet; clients that open before one is take gRPC")
            await self._listen()
        except MemoryError as error:
            await self._abandon()
            raise ConfigError(f"{error}; lower --memory") from None
        except BaseException:
            await self._abandon()
            raise
        self._loop = asyncio.get_running_loop()
        self._prefault_thread = threading.Thread(target=self._prefault, name="kvpool-prefault", daemon=True)
        self._prefault_thread.start()
        self._expire_task = asyncio.create_task(self._expire())
        self._watch_task = asyncio.create_task(self.data.watch()) if self.data is not None else None
        log.info(
            "listening", version=__version__, grpc=f"{split_address(config.listen)[0]}:{self.port}",
            http_port=self.http_port or None, data_port=self.data.info.port if self.data else None,
            arena_bytes=arena.arena_bytes, segment=self._segment.path,
        )  # fmt: skip

    def _start_workers(self) -> DataWorkers:
        config = self.config
        host, port = split_address(config.data_listen)
        listens_everywhere = host in ("0.0.0.0", "::")
        told = "" if listens_everywhere or host == split_address(config.listen)[0] else host
        count = config.data_workers or default_count()
        try:
            return DataWorkers(host, port, told, count, self._segment.info())
        except OSError as error:
            raise _cannot_listen(config.data_listen, " for the data port", "--data-listen", error) from None

    async def _abandon(self) -> None:
        if self._tiers is not None:
            await self._tiers.close()
        if self.data is not None:
            self.data.stop()
        if self._publisher is not None:
            self._publisher.close()
        self.engine = None  # Before the memory that it lets others into.
        self._segment.close()

    def _publish_events(self) -> Publisher:
        config, counters = self.config, self.pool.counters
        ledger = Ledger(asyncio.get_running_loop().call_soon, counters)
        encoder = Encoder(config.kv_events_topic, config.kv_events_medium, config.kv_events_hashes == "bytes")
        history = History(ledger, encoder, counters, config.kv_events_buffer)
        publisher = Publisher(ledger, history, config.kv_events, config.kv_events_replay)
        self._observers.append(ledger)
        log.info("publishing KV events", endpoint=publisher.endpoint, replay=publisher.replay_endpoint or None)
        return publisher

    async def _open_tiers(self) -> Tiers:
        config = self.config
        options = [parse(text) for text in config.tier]
        handover_s = config.drain_ms / 1000 + HANDOVER_S
        context = TierContext(split_address(config.listen), POLICIES[config.policy], handover_s)
        made = [each.make(context) for each in options]
        tiers = Tiers(self.pool, self._segment.bytes, made, [each.write == "back" for each in options])
        await tiers.open()
        self._observers.append(tiers)
        self.pool.below = tiers
        return tiers

    async def _register_arena(self, arena: Arena) -> Engine:
        """Starts Mooncake's engine, and registers the arena and its nonce with it."""
        config = self.config
        host = config.mooncake_host or split_address(config.listen)[0]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        engine = await asyncio.to_thread(Engine.start, host, config.mooncake, config.mooncake_device)
        while config.mooncake == "rdma" and self._prefaulted_bytes < self._segment.nbytes:
            # RDMA pins all of it, and memory that is not there yet would be an error without a name.
            arena.back(await asyncio.to_thread(self._prefault_step))
        try:
            await asyncio.to_thread(engine.register, self._segment.whole)
        except TransferError as error:
            raise ConfigError(f"{error}; see --mooncake") from None
        log.info("Transfer Engine listens", session=engine.session, protocol=engine.protocol)
        return engine

    def _offer(self) -> Offer:
        segment = self._segment.info()
        data_port = self.data.info if self.data is not None else None
        if self.engine is None:
            return Offer(PIECE_BYTES, segment, None, data_port)
        mooncake = MooncakeInfo(
            self.engine.session,
            self.engine.protocol,
            self._segment.whole.ctypes.data,
            segment.nbytes,
            segment.nonce,
            segment.nonce_offset,
        )
        return Offer(PIECE_BYTES, segment, mooncake, data_port)

    async def _create_segment(self, nbytes: int) -> Segment:
        """Makes the arena's memory; waits a little for engines to let go of a predecessor's."""
        deadline = time.monotonic() + PREDECESSOR_S
        while True:
            try:
                return Segment.create(self.config.shm_dir, nbytes)
            except ConfigError:
                if time.monotonic() > deadline or not could_hold(self.config.shm_dir, nbytes):
                    raise
            await asyncio.sleep(EXPIRE_EVERY_S)

    async def _listen(self) -> None:
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        registry.register(PoolCollector(self._stats))
        registry.register(OwnMemory())
        self._grpc = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # Two servers on one port must be an error, not a lottery.
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ]
        )
        self._service = PoolService(
            self.pool,
            self._segment.bytes,
            self._offer(),
            self.boot_token,
            RpcMetrics(registry, self.data.nbytes if self.data is not None else dict),
            self._stats,
            self.data.signer if self.data is not None else None,
            self._tiers,
        )
        add_service(self._service, self._grpc)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        try:
            self.port = self._grpc.add_insecure_port(self.config.listen)
        except RuntimeError:
            raise _cannot_listen(self.config.listen, "", "--listen", _why_not_listening(self.config.listen)) from None
        self._http: OperatorHttp | None = None
        if self.config.http_listen:
            host, port = split_address(self.config.http_listen)
            try:
                self._http = OperatorHttp(host, port, registry, lambda: not self._draining)
            except OSError as error:
                raise _cannot_listen(self.config.http_listen, " for /metrics", "--http-listen", error) from None
            self.http_port = self._http.port
        await self._grpc.start()
        await self._set_serving(True)

    def _stats(self) -> PoolStats:
        stats = self.pool.stats(self._prefaulted_bytes)
        return stats if self._tiers is None else dataclasses.replace(stats, tiers=self._tiers.stats())

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def request_stop(self) -> None:
        """Ends `wait`; for signal handlers."""
        self._stopping.set()

    async def wait(self) -> None:
        """Returns when the server is to stop. Raises ConfigError if it cannot go on."""
        await self._stopping.wait()
        if self._failure:
            raise ConfigError(self._failure)

    async def stop(self) -> None:
        """Drains and stops. Every thread, task and file of the server is gone afterwards."""
        self._draining = True
        log.info("draining", tickets=self.pool.stats().num_tickets, leases=self.pool.stats().num_leases)
        await self._set_serving(False)
        self._service.end_streams()
        ends_at = time.monotonic() + self.config.drain_ms / 1000
        await self._grpc.stop(self.config.drain_ms / 1000)
        if self._tiers is not None:
            left = await self._tiers.drain(max(0.0, ends_at - time.monotonic()))
            log.info("tiers drained", blocks_left=left)
            await self._tiers.close()
        if self.data is not None and self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.to_thread(self.data.stop)
        self._expire_task.cancel()
        self._prefault_stop.set()
        if self._http is not None:
            self._http.close()
        await asyncio.to_thread(self._prefault_thread.join, 10)
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        self.engine = None
        self._segment.close()
        log.info("stopped")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            try:
                self.pool.settle()
            except Exception:
                log.exception("expiring failed")  # Every call expires, too: the server goes on.

    def _prefault(self) -> None:
        # In the background: a server of 100 GiB is to answer at once. In steps: it is to stop at once, too.
        started = time.monotonic()
        try:
            while self._prefaulted_bytes < self._segment.nbytes and not self._prefault_stop.is_set():
                nbytes = self._prefault_step()
                self._loop.call_soon_threadsafe(self.pool.arena.back, nbytes)
        except MemoryError as error:
            total = self._segment.nbytes
            self._failure = f"{error} (got {self._prefaulted_bytes} of {total} bytes); lower --memory"
            self._loop.call_soon_threadsafe(self._stopping.set)
            return
        log.info("arena prefaulted", nbytes=self._prefaulted_bytes, seconds=round(time.monotonic() - started, 2))

    def _prefault_step(self) -> int:
        """Backs a little more of the arena with memory; how much is backed now.

        Nothing else is given out: a write to what has no memory could end in SIGBUS, in an engine.
        """
        start = self._prefaulted_bytes
        nbytes = min(PREFAULT_STEP_BYTES, self._segment.nbytes - start)
        self._segment.populate(start, nbytes)
        self._prefaulted_bytes = start + nbytes
        return self._prefaulted_bytes


def _why_not_listening(address: str) -> OSError:
    """What gRPC does not say."""
    host, port = split_address(address)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return error
    return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))  # It was, a moment ago.


def _cannot_listen(address: str, what_for: str, flag: str, error: OSError) -> ConfigError:
    why = f"cannot listen on {address}{what_for}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{why}. Another server may run here; give --listen, --http-listen and --data-listen free ports, or 0"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"{why}; give {flag} a port from 1024 on")
    return ConfigError(f"{why}; give {flag} an address of this host")


def _check_memory(wanted: ByteSize) -> None:
    """Raises ConfigError if the machine, or the cgroup the server runs in, cannot hold the arena."""
    bounds = {"machine's memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if available:
        bounds["machine's free memory"] = int(available[1]) << 10
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.exists() and (text := cgroup.read_text().strip()).isdigit():
        bounds["container's limit"] = int(text)
    for what, limit in bounds.items():
        if wanted > limit:
            size, most = wanted.human_readable(), ByteSize(limit).human_readable()
            raise ConfigError(f"memory = {size}, and this {what} is {most}; lower --memory")
