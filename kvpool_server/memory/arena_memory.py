"""The arena's memory: made and backed at the start, handed out to clients on this host, and zeroed between tenants.

The arena is one file (memfd). Where callers are not authenticated, every client that may connect maps the file. Where
callers are authenticated, no client maps it, and an extent is zeroed before another tenant gets it.

The pool gives out backed memory only: a write to memory that the system cannot provide would end in SIGBUS, in an
engine. A server of 100 GiB answers before all of its arena is backed, and stops without waiting for the rest.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog
from pydantic import ByteSize

from kvpool.protocol import wire
from kvpool.protocol.errors import ConfigError
from kvpool.transport.mooncake_engine import Engine
from kvpool.transport.segment import Segment
from kvpool.transport.unix_socket import abstract_name, memory_path
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.data_plane.workers import DataPortInfo
from kvpool_server.memory.memory_socket import MemorySocket
from kvpool_server.rpc.chunks import WRITTEN_BYTES
from kvpool_server.settings.config import ServerConfig

log = structlog.get_logger()

PREDECESSOR_S = 15.0
"""How long a start waits for engines to unmap the memory of a server that ran here before."""

LOOK_EVERY_S = 0.5
STEP_BYTES = 32 << 20
CGROUP = Path("/sys/fs/cgroup")
"""Of this process, as a container sees it."""


def check_fits(memory: ByteSize) -> None:
    """Raises ConfigError if the host, or the cgroup that the server runs in, can never hold an arena of this size."""
    bounds = {"the host's memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    if (limit := _cgroup_bytes("memory.max")) is not None:
        bounds["the container's memory limit"] = limit
    for what, limit in bounds.items():
        if memory > limit:
            raise _too_large(memory, what, limit)


def check_free(memory: ByteSize) -> None:
    """Raises ConfigError if less memory is free now: backing the arena would end in the kernel's OOM killer."""
    if memory > (free := free_bytes()):
        raise _too_large(memory, "the free memory", free)


def free_bytes() -> int:
    """Memory that the host, and the cgroup that the server runs in, can give at the moment."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(available[1]) << 10 if available else 1 << 62
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        # The page cache of files counts as used, and gives way.
        cached = re.findall(r"^(?:in)?active_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - used + sum(map(int, cached)))
    return free


def _cgroup_bytes(name: str) -> int | None:
    """A figure of the cgroup; None if there is none, or no limit."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _too_large(memory: ByteSize, what: str, limit: int) -> ConfigError:
    size, most = memory.human_readable(), ByteSize(max(0, limit)).human_readable()
    return ConfigError(f"memory = {size} is more than {what}, {most}; lower --memory")


class Prefault:
    """Prefaults one segment on threads, `backed_bytes` so far, and tells the arena. Owned by the event loop."""

    def __init__(self, segment: Segment, arena: Arena):
        self.backed_bytes = 0
        self._segment = segment
        self._arena = arena
        self._step: asyncio.Future[None] | None = None

    async def step(self) -> None:
        """Backs the next `STEP_BYTES`. Raises MemoryError if the system has no more memory to give."""
        start, total = self.backed_bytes, self._segment.nbytes
        nbytes = min(STEP_BYTES, total - start)
        self._step = asyncio.ensure_future(asyncio.to_thread(self._back, start, nbytes))
        try:
            await asyncio.shield(self._step)
        except MemoryError as error:
            raise MemoryError(f"{error} ({start} of {total} bytes are backed)") from None
        self.backed_bytes = start + nbytes
        self._arena.back(self.backed_bytes)

    def _back(self, start: int, nbytes: int) -> None:
        if (free := free_bytes()) < nbytes:  # The kernel would not refuse: it would end a process.
            raise MemoryError(f"no memory for the arena at {start}: {max(0, free)} bytes are free")
        self._segment.populate(start, nbytes)

    async def all(self) -> None:
        """Backs what is left. Raises as `step`."""
        while self.backed_bytes < self._segment.nbytes:
            await self.step()

    async def close(self) -> None:
        """Waits for a step under way, whose caller may have been cancelled: the segment may be closed afterwards."""
        if self._step is not None:
            await asyncio.wait((self._step,))


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
        offer = pb.PingResponse(piece_bytes=WRITTEN_BYTES)
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
