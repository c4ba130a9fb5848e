"""In which file each extent of the arena has its pages, where tenants have files of their own.

The server and its data workers share a table: for each extent a byte, the number of its file. The server alone writes
it, when all of an extent has been handed over, and before any permit for the extent is made. A worker compares the
table with what it has mapped before it uses a permit. While a transfer is under way in an extent, its hold keeps the
extent with its tenant (`permits.py`), so a worker never replaces a mapping that one of its threads is using.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

from kvpool.segment import Segment


class ExtentFiles:
    """The files and the table.

    Args:
        fds: of the files, by number. Number 0 is that of the whole arena at first.
        table_fd: of the table: uint8 [extents].

    Attributes:
        fds, table_fd, extent_bytes: as given.
    """

    def __init__(self, fds: Sequence[int], table_fd: int, extent_bytes: int):
        assert len(fds) <= 256, "a byte of the table names a file"
        self.fds = fds
        self.table_fd = table_fd
        self.extent_bytes = extent_bytes
        self._table = mmap.mmap(table_fd, 0)
        self._mapped = bytes(len(self._table))
        self._mapping = threading.Lock()

    @classmethod
    def create(cls, fds: Sequence[int], num_extents: int, extent_bytes: int) -> ExtentFiles:
        """In the server: with a new table. The files but for the first are closed with it."""
        table_fd = os.memfd_create("kvpool-extents")
        os.ftruncate(table_fd, num_extents)
        return cls(fds, table_fd, extent_bytes)

    def publish(self, idx: int, number: int) -> None:
        """In the server: an extent has its pages in another file from now on."""
        self._table[idx] = number

    def follow(self, segment: Segment) -> None:
        """In a worker: maps the files of extents that have changed hands. Cheap if none has. Thread-safe.

        Raises OSError if the system cannot; a later call tries again.
        """
        if self._table[:] == self._mapped:
            return
        with self._mapping:
            table = self._table[:]
            for idx, number in enumerate(table):
                if number != self._mapped[idx]:
                    segment.lay(self.fds[number], idx * self.extent_bytes, self.extent_bytes)
            self._mapped = table

    def close(self) -> None:
        """In the server."""
        for fd in (*self.fds[1:], self.table_fd):
            os.close(fd)
