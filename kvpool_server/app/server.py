"""Runs a server: starts it, drains it, stops it. Its parts are those of `composition.py`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import structlog

from kvpool.client.config import split_address
from kvpool.protocol.errors import ConfigError
from kvpool.version import __version__
from kvpool_server.app.composition import Composition, in_background
from kvpool_server.cache.steps import Steps
from kvpool_server.keeping import store
from kvpool_server.observability.http import DRAINING, SERVING, STARTING
from kvpool_server.process.logs import LogEvents
from kvpool_server.process.runtime import return_freed_memory
from kvpool_server.rpc.drain import Drain
from kvpool_server.settings.config import ServerConfig

log = structlog.get_logger()

EXPIRE_EVERY_S = 0.5
DRAINED_S = 2.0
"""How long calls may go on once all leases and tickets have ended: a stream of a client would last to the deadline."""


class Server:
    """One kvpool server. `start`, then `wait`, then `stop`, all on one event loop, which owns the pool.

    Args:
        events: the last warnings and errors of the log, which the dashboard shows; None: it shows none.
    """

    def __init__(self, config: ServerConfig, events: LogEvents | None = None):
        self.config = config
        self._state = STARTING
        self._stopping = asyncio.Event()
        self._failure = ""
        self._open = AsyncExitStack()
        self.parts = Composition(config, self._open, lambda: self._state, self._announce_drain, events or LogEvents())

    async def start(self) -> None:
        """Returns when clients are served. Raises ConfigError if the settings cannot be met; all is closed then."""
        try:
            await self.parts.open()
        except BaseException as error:
            await self._open.aclose()
            if isinstance(error, MemoryError):
                raise ConfigError(f"{error}; lower --memory") from None
            raise
        parts, drain = self.parts, self.parts.drain
        assert drain is not None
        for work in (self._expire(), return_freed_memory(), self._stop_once_drained(drain), self._prefault_rest()):
            in_background(self._open, work)
        if parts.data is not None:
            in_background(self._open, parts.data.watch())
        if self._state == STARTING:  # Else a first call has drained the server already.
            self._state = SERVING
        log.info(
            "listening", version=__version__, grpc=f"{split_address(self.config.listen)[0]}:{parts.port}",
            http_port=parts.http_port or None, data_port=parts.data.port if parts.data else None,
            unix=self.config.unix_listen or None, arena_bytes=parts.pool.arena.arena_bytes,
            keeper_pid=store.keeper_pid(),
        )  # fmt: skip

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            try:
                await self.parts.turns.run(self._settle())
            except Exception:
                log.exception("expiring leases and tickets failed; the next call of a client expires them")

    def _settle(self) -> Steps[None]:
        while self.parts.pool.settle() or self.parts.pool.rebalance():
            yield

    async def _prefault_rest(self) -> None:
        started, memory = time.monotonic(), self.parts.memory
        try:
            await memory.back_all()
        except MemoryError as error:
            self._failure = f"{error}; lower --memory"
            self._stopping.set()
            return
        log.info("arena prefaulted", nbytes=memory.backed_bytes, seconds=round(time.monotonic() - started, 2))

    def request_stop(self) -> None:
        """Ends `wait`; for signal handlers. A drain under way goes on, for `drain_ms` at most."""
        if (drain := self.parts.drain) is not None and drain.is_draining:
            self.in_background(drain.begin(self.config.drain_ms or 1))  # 0 would leave the deadline as it is.
        else:
            self._stopping.set()

    def request_drain(self) -> None:
        """Begins a drain, which ends `wait`; for signal handlers. A server that does not serve yet stops at once."""
        if (drain := self.parts.drain) is not None and self._state == SERVING:
            self.in_background(drain.begin())
        else:
            self.request_stop()

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Work that ends by itself, or with the server."""
        in_background(self._open, work)

    async def _announce_drain(self) -> None:
        """Has load balancers, probes and routers send nothing more here, and the keeper start no other server."""
        self._state = DRAINING
        if store.keeper_pid() is not None:
            with contextlib.suppress(OSError):
                store.notify("KEEP=no")
        await self.parts.grpc.announce_end()
        if self.parts.events is not None:
            self.parts.events.withdraw()

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
        parts, drain_s = self.parts, self.config.drain_ms / 1000
        ends_at = time.monotonic() + drain_s
        if parts.drain is not None and parts.drain.is_draining:
            await parts.grpc.stop(min(parts.drain.left_s, DRAINED_S))
        else:
            log.info("draining", tickets=self.parts.pool.stats().num_tickets, leases=self.parts.pool.stats().num_leases)
            await parts.grpc.stop(drain_s)
            await parts.tiered.drain(max(0.0, ends_at - time.monotonic()))
        await self._open.aclose()
        log.info("stopped")
