"""The arena's memory: whether the host can give it, and its backing, step by step.

The pool gives out backed memory only: a write to memory that the system cannot provide would end in SIGBUS, in an
engine. A server of 100 GiB answers before all of its arena is backed, and stops without waiting for the rest.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from pydantic import ByteSize

from kvpool.protocol.errors import ConfigError
from kvpool.transport.segment import Segment
from kvpool_server.cache.allocator.arena import Arena

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
