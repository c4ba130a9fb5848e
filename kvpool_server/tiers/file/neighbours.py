"""Other servers' directories under the same path: what they have stored can be read, by their journals.

Nothing is agreed with them. A journal may be old, and its owner may overwrite a slot while it is read here: checksums
tell. A directory whose owner has given no sign of life for long is removed by whoever notices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from kvpool_server.storage.entry import Record
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.journal import FILE_NAME, GroupKey, Inventory
from kvpool_server.tiers.file.lock import FILE_NAME as LOCK_NAME
from kvpool_server.tiers.file.lock import DirectoryLock

log = structlog.get_logger()

ORPHANED_S = 3_600.0
"""Without a sign of life for so long a directory is nobody's. Longer than a restart takes, also one with mishaps."""


class Neighbour:
    """One other server's directory."""

    def __init__(self, directory: Path, disk: Disk, direct: bool):
        self.directory = directory
        self.inventory = Inventory()
        self._disk = disk
        self._direct = direct
        self._extents: Extents | None = None
        self._journal: int | None = None
        self._read_to = 0

    def refresh(self) -> None:
        """Reads what has been added to its journal, or all of it if that is another one now. Raises OSError."""
        path = self.directory / FILE_NAME
        if self._journal is not None:
            now, then = os.stat(path), os.fstat(self._journal)
            if (now.st_ino, now.st_dev) != (then.st_ino, then.st_dev) or now.st_size < self._read_to:
                self.close()
                self.inventory = Inventory()  # Whoever reads by the old one finds out by the checksums.
        if self._journal is None:
            self._journal, self._read_to = os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0
        size = os.fstat(self._journal).st_size
        if size > self._read_to:
            text = os.pread(self._journal, size - self._read_to, self._read_to)
            self._read_to += self.inventory.apply(text)
        if self._extents is None and self.inventory.extent_bytes:
            self._extents = Extents(
                self.directory, self.inventory.extent_bytes, self._disk, writable=False, direct=self._direct
            )

    @property
    def extent_bytes(self) -> int:
        return self.inventory.extent_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """As `Extents.read`."""
        return self._extents is not None and self._extents.read(offset, views)

    def close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        if self._extents is not None:
            self._extents.close()
            self._extents = None


class Neighbours:
    """All of them. `refresh` is for one thread at a time, `find` for any."""

    def __init__(self, root: Path, own: Path, disk: Disk, direct: bool):
        self._root = root
        self._own = own
        self._disk = disk
        self._direct = direct
        self._all: dict[str, Neighbour] = {}

    def __len__(self) -> int:
        return len(self._all)

    def find(self, group: GroupKey, block_hash: bytes) -> tuple[Neighbour, Record] | None:
        for neighbour in list(self._all.values()):
            if (record := neighbour.inventory.get(group, block_hash)) is not None:
                return neighbour, record
        return None

    def refresh(self) -> None:
        """Looks who is there and what they have added. Raises OSError."""
        there = {entry.name for entry in os.scandir(self._root) if entry.is_dir() and entry.name != self._own.name}
        for gone in self._all.keys() - there:
            self._all.pop(gone).close()
        for name in there:
            directory = self._root / name
            try:
                if _is_orphaned(directory):
                    self._remove(directory)
                    continue
                neighbour = self._all.get(name) or Neighbour(directory, self._disk, self._direct)
                neighbour.refresh()
            except FileNotFoundError:
                continue  # It has just been made, or removed; or is none.
            except OSError as error:
                log.warning("another server's directory cannot be read", directory=str(directory), error=str(error))
                continue
            self._all[name] = neighbour

    def close(self) -> None:
        for neighbour in self._all.values():
            neighbour.close()
        self._all.clear()

    def _remove(self, directory: Path) -> None:
        if (neighbour := self._all.pop(directory.name, None)) is not None:
            neighbour.close()
        try:
            with contextlib.closing(DirectoryLock(directory)):
                shutil.rmtree(directory)
        except BlockingIOError:
            return  # Its owner lives, and cannot say so: a clock is wrong, or its disk is full.
        log.info("removed the directory of a server that has not been seen for long", directory=str(directory))


def _is_orphaned(directory: Path) -> bool:
    return time.time() - (directory / LOCK_NAME).stat().st_mtime > ORPHANED_S
