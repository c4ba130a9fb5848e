"""The journal of this server's own directory: a file of frames (`frames.py`), appended by the directory's owner.

The owner reads the journal at its start, and other servers at any time. Nothing is flushed to the disk: the journal
ends at a frame that is torn, or missing after a power cut, or invalid. The journal may be older or newer than the bytes
in the slots; whoever reads a slot compares checksums, so a wrong line costs a miss.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import structlog

from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.inventory import Inventory

log = structlog.get_logger()

FILE_NAME = "journal"
COMPACT_AT_LEAST_BYTES = 16 << 20
"""A journal is compacted when it is twice as long as after the last compaction, and so much longer still."""


class Journal:
    """See the module. Blocking; thread-safe. Every method raises OSError."""

    def __init__(self, directory: Path, disk: Disk):
        self._path = directory / FILE_NAME
        self._disk = disk
        self._lock = threading.Lock()
        self._fd = -1
        self._nbytes = 0
        self._compact_at_bytes = 0

    def load(self) -> Inventory:
        """The blocks at the end of the last run; empty without a journal."""
        inventory = Inventory()
        with contextlib.suppress(FileNotFoundError):
            inventory.apply(self._path.read_bytes())
        return inventory

    def begin(self, inventory: Inventory) -> None:
        """Continues from this content. Called once, before `append`."""
        with self._lock:
            if not inventory.nbytes or not inventory.is_exact:
                self._rewrite(inventory)
                return
            self._fd = self._disk.open(self._path, os.O_WRONLY)
            self._nbytes = inventory.nbytes
            self._compact_at_bytes = 2 * self._nbytes + COMPACT_AT_LEAST_BYTES

    def append(self, frames: bytes) -> None:
        """Adds frames, all or nothing as far as readers see."""
        with self._lock:
            self._disk.write(self._fd, [memoryview(frames)], self._nbytes)
            self._nbytes += len(frames)
            if self._nbytes >= self._compact_at_bytes:
                try:
                    self._compact()
                except OSError as error:
                    # The frames are written. The journal grows on, and is compacted when it is worth another try.
                    self._compact_at_bytes = self._nbytes + COMPACT_AT_LEAST_BYTES
                    log.warning("a tier's journal cannot be compacted", path=str(self._path), error=str(error))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd >= 0:
                self._disk.close(self._fd)
                self._fd = -1

    def _compact(self) -> None:
        inventory = Inventory()
        inventory.apply(self._path.read_bytes())
        self._rewrite(inventory)

    def _rewrite(self, inventory: Inventory) -> None:
        fresh = self._path.with_suffix(".new")
        fd = self._disk.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nbytes = 0
        try:
            for frames in inventory.encode():
                self._disk.write(fd, [memoryview(frames)], nbytes)
                nbytes += len(frames)
            self._disk.replace(fresh, self._path)
        except BaseException:
            self._disk.close(fd)
            with contextlib.suppress(OSError):
                self._disk.remove(fresh)  # The file takes space, of which there may be none left.
            raise
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self._nbytes = fd, nbytes
        self._compact_at_bytes = 2 * nbytes + COMPACT_AT_LEAST_BYTES
