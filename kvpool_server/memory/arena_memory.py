"""The arena's memory: made at the start, handed out to clients on this host, and zeroed between tenants.

The arena is one file (memfd). Where callers are not authenticated, every client that may connect maps the file. Where
callers are authenticated, no client maps it, and an extent is zeroed before another tenant gets it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from typing import Any

import structlog

from kvpool.protocol import wire
from kvpool.transport.memory_socket import abstract_name
from kvpool.transport.mooncake_engine import Engine
from kvpool.transport.segment import Segment
from kvpool.transport.unix_socket import memory_path
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.data_plane.workers import DataPortInfo
from kvpool_server.memory.memory_socket import MemorySocket
from kvpool_server.memory.prefault import Prefault, check_fits, check_free, free_bytes
from kvpool_server.rpc.chunks import PIECE_BYTES
from kvpool_server.settings.config import ServerConfig

log = structlog.get_logger()

PREDECESSOR_S = 15.0
"""How long a start waits for engines to unmap the memory of a server that ran here before."""

LOOK_EVERY_S = 0.5


class ArenaMemory:
    """The arena of one server and its memory, which `create` makes. The event loop owns it.

    Raises ConfigError if the host can never hold the arena.

    Args:
        has_tenants: whether callers are authenticated, so that extents belong to tenants.

    Attributes:
        arena: slots by offset, of which none can be allocated before `prefault` has backed it.
        segment, prefault: once created.
    """

    def __init__(self, config: ServerConfig, *, has_tenants: bool):
        check_fits(config.memory)
        self._config = config
        self._has_tenants = has_tenants
        self.arena = Arena(config.memory, None, 0, self._zero if has_tenants else None)
        self.segment: Segment
        self.prefault: Prefault

    async def create(self, stack: AsyncExitStack) -> None:
        """Waits a little where engines still map the memory of a predecessor.

        Args:
            stack: closes what was created.
        """
        deadline = time.monotonic() + PREDECESSOR_S
        if free_bytes() < self._config.memory:
            log.info("waits for memory that engines of a predecessor may still map", longest_s=PREDECESSOR_S)
        while free_bytes() < self._config.memory and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_EVERY_S)
        check_free(self._config.memory)
        self.segment = Segment.create(self.arena.arena_bytes)
        stack.callback(self.segment.close)
        if not self.segment.is_sealed:
            log.warning("this system cannot seal memory (memfd), so clients on this host get it over the network")
        self.prefault = Prefault(self.segment, self.arena)
        stack.push_async_callback(self.prefault.close)

    def _zero(self, start: int, nbytes: int) -> None:
        self.segment.bytes[start : start + nbytes] = 0

    def hand_out(self, stack: AsyncExitStack) -> None:
        """Opens the sockets by which clients get memory; they need no gRPC to answer."""
        path, mode = self._config.unix_listen, self._config.unix_mode_bits
        if self._is_everybodys:
            token = self.segment.token
            stack.callback(MemorySocket(abstract_name(token), self._descriptor_of).close)
            if path:
                stack.callback(MemorySocket(memory_path(path), self._descriptor_of, mode).close)

    def _descriptor_of(self, token: bytes) -> int | None:
        return self.segment.fd if secrets.compare_digest(token, self.segment.token) else None

    @property
    def _is_everybodys(self) -> bool:
        return self.segment.is_sealed and not self._has_tenants

    def offer(self, engine: Engine | None, data_port: DataPortInfo | None) -> pb.PingResponse:
        """The transports of this server, for callers that may open namespaces."""
        offer = pb.PingResponse(piece_bytes=PIECE_BYTES)
        nbytes = self.segment.nbytes
        whole: dict[str, Any] = {"nbytes": nbytes, "nonce": self.segment.nonce, "nonce_offset": nbytes}
        if self._is_everybodys:
            offer.segment.MergeFrom(pb.Segment(token=self.segment.token, **whole))
        if engine is not None:
            address = self.segment.whole.ctypes.data
            offer.mooncake.MergeFrom(
                pb.MooncakeEngine(session=engine.session, protocol=engine.protocol, base_address=address, **whole)
            )
        if data_port is not None:
            offer.data_port.MergeFrom(wire.message_of(data_port, pb.DataPort))
        return offer
