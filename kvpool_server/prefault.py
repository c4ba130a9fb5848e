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

from kvpool.errors import ConfigError
from kvpool.segment import Segment
from kvpool_server.cache.allocator.arena import Arena

STEP_BYTES = 32 << 20


def check_fits(memory: ByteSize) -> None:
    """Raises ConfigError if the host, or the cgroup that the server runs in, cannot hold an arena of this size."""
    bounds = {"the host's memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if available:
        bounds["the host's free memory"] = int(available[1]) << 10
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.exists() and (text := cgroup.read_text().strip()).isdigit():
        bounds["the container's memory limit"] = int(text)
    for what, limit in bounds.items():
        if memory > limit:
            size, most = memory.human_readable(), ByteSize(limit).human_readable()
            raise ConfigError(f"memory = {size} is more than {what}, {most}; lower --memory")


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
        self._step = asyncio.ensure_future(asyncio.to_thread(self._segment.populate, start, nbytes))
        try:
            await asyncio.shield(self._step)
        except MemoryError as error:
            raise MemoryError(f"{error} ({start} of {total} bytes are backed)") from None
        self.backed_bytes = start + nbytes
        self._arena.back(self.backed_bytes)

    async def all(self) -> None:
        """Backs what is left. Raises as `step`."""
        while self.backed_bytes < self._segment.nbytes:
            await self.step()

    async def close(self) -> None:
        """Waits for a step under way, whose caller may have been cancelled: the segment may be closed afterwards."""
        if self._step is not None:
            await asyncio.wait((self._step,))
