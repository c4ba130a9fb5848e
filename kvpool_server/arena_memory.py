"""The arena's memory: made at the start, handed out to clients on this host, and handed over between tenants.

Where callers prove nothing, all of the arena is one file (memfd), which whoever may connect maps. Where they prove who
they are, engines map nothing, and an extent that changes hands is zeroed; with `--tenant-memory` they map their own
tenant's memory (`tenant_memory.py`), through the Unix socket alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

import structlog

from kvpool.memory_socket import abstract_name
from kvpool.mooncake import Engine
from kvpool.segment import Segment
from kvpool.types import DataPortInfo, MooncakeInfo, Offer, SegmentInfo
from kvpool.unix_socket import memory_path
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.config import ServerConfig
from kvpool_server.data_plane.extent_files import ExtentFiles
from kvpool_server.memory_socket import MemorySocket
from kvpool_server.prefault import Prefault, check_fits, check_free, free_bytes
from kvpool_server.services.transfers import PIECE_BYTES
from kvpool_server.tenant_memory import TenantMemory

log = structlog.get_logger()

PREDECESSOR_S = 15.0
"""How long a start waits for engines to unmap the memory of a server that ran here before."""

LOOK_EVERY_S = 0.5

FREE_EVERY_S = 5.0
"""How often pages are freed that engines have touched beside their tenants' extents."""


class ArenaMemory:
    """One server's. Make it before the arena, then `create` it. The event loop owns it.

    Raises ConfigError if the host can never hold the arena.

    Args:
        has_tenants: whether callers prove whose engines they are.

    Attributes:
        arena: slots by offset, of which none can be allocated before `prefault` has backed it.
        segment, prefault: once created.
    """

    def __init__(self, config: ServerConfig, *, has_tenants: bool):
        check_fits(config.memory)
        self._config = config
        self._has_tenants = has_tenants
        self._wants_files = config.tenant_memory
        self._tenants: TenantMemory | None = None
        hand_over = self._hand_over if has_tenants else None
        self.arena = Arena(config.memory, None, 0, hand_over, unused_is_anybodys=not self._wants_files)
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
        elif self._wants_files:
            self._tenants = TenantMemory(self.segment, self.arena.extent_bytes, lambda nbytes: free_bytes() >= nbytes)
            stack.callback(self._tenants.close)
        self.prefault = Prefault(self.segment, self.arena)
        stack.push_async_callback(self.prefault.close)

    @property
    def extent_files(self) -> ExtentFiles | None:
        """For the data workers; None: all of the arena lies in the segment's file."""
        return self._tenants.files if self._tenants is not None else None

    def _hand_over(self, start: int, nbytes: int, tenant: str) -> bool:
        if self._tenants is not None:
            return self._tenants.hand_over(start, nbytes, tenant)
        self.segment.bytes[start : start + nbytes] = 0
        return True

    def hand_out(self, stack: AsyncExitStack) -> None:
        """Opens the sockets by which clients get memory; they need no gRPC to answer."""
        path, mode = self._config.unix_listen, self._config.unix_mode_bits
        if (tenants := self._tenants) is not None:
            stack.callback(MemorySocket(memory_path(path), tenants.descriptor_of, mode).close)
        elif self._is_everybodys:
            token = self.segment.token
            stack.callback(MemorySocket(abstract_name(token), self._descriptor_of).close)
            if path:
                stack.callback(MemorySocket(memory_path(path), self._descriptor_of, mode).close)

    def _descriptor_of(self, token: bytes) -> int | None:
        return self.segment.fd if secrets.compare_digest(token, self.segment.token) else None

    @property
    def _is_everybodys(self) -> bool:
        return self.segment.is_sealed and not self._has_tenants

    def offer(self, engine: Engine | None, data_port: DataPortInfo | None) -> Offer:
        """What every caller is offered who may open namespaces. See also `of_tenant`."""
        segment = self.segment.info()
        mooncake = None
        if engine is not None:
            address = self.segment.whole.ctypes.data
            mooncake = MooncakeInfo(
                engine.session, engine.protocol, address, segment.nbytes, segment.nonce, segment.nonce_offset
            )
        return Offer(PIECE_BYTES, segment if self._is_everybodys else None, mooncake, data_port)

    async def free_strays(self) -> None:
        """Frees what engines have touched beside their tenants' extents, until cancelled."""
        while self._tenants is not None:
            await asyncio.sleep(FREE_EVERY_S)
            self._tenants.free_strays()

    def of_tenant(self, tenant: str) -> SegmentInfo | None:
        """What a tenant's engines are offered that call through the Unix socket."""
        return self._tenants.info(tenant) if self._tenants is not None else None
