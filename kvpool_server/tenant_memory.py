"""The memory of tenants: each tenant's extents lie in a file (memfd) that its engines alone may map.

The server's mapping of the arena stays contiguous. An extent that changes hands leaves its former owner's file, whose
engines find zeros there from then on, and the new owner's file is mapped in its place. Data workers follow by a table
(`data_plane/extent_files.py`).

The files are made at the start, empty, so that data workers inherit them, also those that replace others; a tenant gets
one when it first needs it, and keeps it as long as the server runs, because its engines may have mapped it. Tenants
beyond `MAX_TENANTS` have their extents in the server's own file, which nobody maps.

Not thread-safe: the event loop owns it. A thread of its own frees and backs pages: freeing takes the longer the more
often engines have mapped them, and an engine can map its file many thousand times.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import structlog

from kvpool.errors import OutOfSpaceError
from kvpool.memory_socket import TOKEN_BYTES
from kvpool.segment import NONCE_BYTES, TRAILER_BYTES, Segment, create_file, punch, write_state
from kvpool.types import SegmentInfo
from kvpool_server.data_plane.extent_files import ExtentFiles

log = structlog.get_logger()

MAX_TENANTS = 64
"""Tenants that get memory of their own: as many as an arena has extents. Each takes a file descriptor."""

WAIT_S = 0.001
"""How long a call may hold the event loop."""

_BLOCK_BYTES = 512
"""Of `st_blocks`."""

_SERVERS_OWN = 0
"""The number of the server's own file. Those of tenants follow."""


class _Job(NamedTuple):
    """A part of an extent that the thread hands over. `part`: its start, and the number of its new file."""

    part: tuple[int, int]
    future: Future[None]


class TenantMemory:
    """The files of one server's tenants.

    Args:
        segment: the arena, whose file is the server's own.
        extent_bytes: of each extent; whole pages.
        has_free: whether the system has so many bytes of free memory.

    Attributes:
        files: for the data workers.
    """

    def __init__(self, segment: Segment, extent_bytes: int, has_free: Callable[[int], bool]):
        self._segment = segment
        self._extent_bytes = extent_bytes
        self._has_free = has_free
        num_extents = segment.nbytes // extent_bytes
        fds = [create_file(segment.nbytes, "-tenant") for _ in range(MAX_TENANTS)]
        self.files = ExtentFiles.create([segment.fd, *fds], num_extents, extent_bytes)
        self._infos = [
            SegmentInfo(segment.nbytes, nonce, segment.nbytes, secrets.token_bytes(TOKEN_BYTES), extent_bytes)
            for nonce in (os.pread(fd, NONCE_BYTES, segment.nbytes) for fd in fds)
        ]
        self._number_of: dict[str, int] = {}
        self._is_full = False
        # By extent: the files in which it may have pages. There are several of them until all of it was handed over.
        self._holders = [{_SERVERS_OWN} for _ in range(num_extents)]
        self._states = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, "kvpool-hand-over")
        # By extent. A put that was given up leaves one here.
        self._jobs: dict[int, _Job] = {}
        self._freeing: Future[None] = Future()
        self._freeing.set_result(None)

    def info(self, tenant: str) -> SegmentInfo | None:
        """What a tenant's engines may map; None: nothing, because there are more tenants than files."""
        number = self._number(tenant)
        return self._infos[number - 1] if number != _SERVERS_OWN else None

    def descriptor_of(self, token: bytes) -> int | None:
        """The descriptor of the file that a token stands for; None for other tokens."""
        found = None
        for number in self._number_of.values():
            if secrets.compare_digest(token, self._infos[number - 1].token):
                found = self.files.fds[number]
        return found

    def hand_over(self, start: int, nbytes: int, tenant: str) -> bool:
        """As `HandOver` of the arena: part of an extent, from the first part to the last. Waits `WAIT_S` at most."""
        idx, number = start // self._extent_bytes, self._number(tenant)
        job = self._jobs.get(idx)
        if job is None or job.part != (start, number):
            # The thread works in the order of the calls: what a put has left unfinished comes first.
            self._holders[idx].add(number)
            state = next(self._states) if (start + nbytes) % self._extent_bytes == 0 else 0
            future = self._thread.submit(self._move, start, nbytes, number, set(self._holders[idx]), state)
            job = self._jobs[idx] = _Job((start, number), future)
        if not wait([job.future], WAIT_S).done:
            return False
        del self._jobs[idx]
        if (error := job.future.exception()) is not None:
            log.error("an extent cannot be handed over", extent=idx, tenant=tenant, error=str(error))
            raise OutOfSpaceError(
                "the server's host has no free memory for these blocks now; try again later"
            ) from error
        if (start + nbytes) % self._extent_bytes == 0:
            self._holders[idx] = {number}
            self.files.publish(idx, number)
        return True

    def _write_state(self, number: int, idx: int, state: int) -> None:
        """Tells a tenant's engines of an extent; nobody maps the server's own file."""
        if number != _SERVERS_OWN:
            write_state(self.files.fds[number], self._segment.nbytes, idx, state)

    def _move(self, start: int, nbytes: int, number: int, holders: set[int], state: int) -> None:
        """In the thread, because engines can lock their file: moves a part of an extent to another file.

        Args:
            holders: the files in which the extent may have pages.
            state: that engines see once the part was moved; 0: further parts follow.
        """
        idx = start // self._extent_bytes
        if start % self._extent_bytes == 0:
            self._check_free(nbytes)
            for holder in holders:
                self._write_state(holder, idx, 0)  # First: engines must not pin pages that leave.
        for holder in holders:  # Also what the new owner's engines have written where it had no extent.
            punch(self.files.fds[holder], start, nbytes)
        self._check_free(nbytes)  # Engines may have pinned what was there.
        fd = self.files.fds[number]
        self._segment.lay(fd, start, nbytes, huge=True)
        self._segment.populate(start, nbytes, fd)
        if state:
            self._write_state(number, idx, state)

    def _check_free(self, nbytes: int) -> None:
        """Raises MemoryError without free memory. The kernel would not refuse: it would end a process."""
        if not self._has_free(nbytes):
            raise MemoryError("no free memory")

    def free_strays(self) -> None:
        """Has the thread free pages that engines have touched where their tenant has no extents. Call it regularly."""
        if not self._freeing.done():
            return
        strays: list[tuple[int, int]] = []
        for number in self._number_of.values():
            others = [idx for idx, holders in enumerate(self._holders) if number not in holders]
            own_bytes = (len(self._holders) - len(others)) * self._extent_bytes + TRAILER_BYTES
            if os.fstat(self.files.fds[number]).st_blocks * _BLOCK_BYTES > own_bytes:
                strays += [(self.files.fds[number], idx) for idx in others]
        if strays:  # An extent that its tenant gets meanwhile is handed over behind this job.
            self._freeing = self._thread.submit(self._free, strays)

    def _free(self, strays: list[tuple[int, int]]) -> None:
        for fd, idx in strays:
            punch(fd, idx * self._extent_bytes, self._extent_bytes)

    def _number(self, tenant: str) -> int:
        number = self._number_of.get(tenant)
        if number is None and len(self._number_of) < MAX_TENANTS:
            number = self._number_of[tenant] = len(self._number_of) + 1
        elif number is None and not self._is_full:
            self._is_full = True
            log.warning("further tenants get no memory to map, so their engines' bytes are sent", tenants=MAX_TENANTS)
        return number or _SERVERS_OWN

    def close(self) -> None:
        """Ends the thread, and closes the files. Memory that engines have mapped stays theirs."""
        self._thread.shutdown(cancel_futures=True)
        self.files.close()
