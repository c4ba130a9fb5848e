"""Other servers' directories under the same path: what they have stored can be read, by their journals.

Nothing is agreed with them. A journal may be old, and its owner may overwrite a slot while it is read here: checksums
tell. Whatever is wrong with one of them is said once, and harms nobody else. A directory whose owner has given no sign
of life for long is removed by whoever notices.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file import orphans
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.journal import FILE_NAME, MAX_FRAME_BYTES, GroupKey, Inventory
from kvpool_server.tiers.file.open_files import OpenFiles
from kvpool_server.tiers.file.shelf import Shelf

log = structlog.get_logger()

PIECE_BYTES = MAX_FRAME_BYTES + 4096
"""Of a journal, read at once: any frame is whole in one that begins with it."""
MAX_LOOKS_LEFT_OUT = 63


class PeerDirectory:
    """One other server's directory. For one thread at a time.

    Attributes:
        shelf: what can be read; None until its journal has begun.
    """

    def __init__(self, directory: Path, make_extents: Callable[[int], Extents]):
        self.shelf: Shelf | None = None
        self._path = directory / FILE_NAME
        self._make_extents = make_extents
        self._journal: int | None = None
        self._inventory = Inventory()
        self._is_begun = False
        self._read_to = 0
        self._looks_in_vain = 0
        self._looks_to_leave_out = 0

    def refresh(self) -> str:
        """Reads what has been added to its journal, or all of it if that is another one now. Raises OSError.

        Returns:
            What is wrong with it; empty if nothing is, or it is only that the end has not been written yet.
        """
        if self._journal is None or self._is_another(self._journal):
            self._begin()
        elif self._looks_to_leave_out:
            self._looks_to_leave_out -= 1
            return self._inventory.trouble
        self._read_on()
        if not self._is_begun and self._inventory.extent_bytes:
            old, self.shelf = self.shelf, Shelf(self._inventory, self._make_extents(self._inventory.extent_bytes))
            self._is_begun = True
            if old is not None:
                old.close()
        return self._inventory.trouble

    def close(self) -> None:
        self._close_journal()
        if self.shelf is not None:
            self.shelf.close()
            self.shelf = None

    def _is_another(self, journal: int) -> bool:
        now = os.stat(self._path)
        return not os.path.samestat(now, os.fstat(journal)) or now.st_size < self._read_to

    def _begin(self) -> None:
        journal = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # Of a pipe nobody knows the end.
        if not stat.S_ISREG(os.fstat(journal).st_mode):
            os.close(journal)
            raise OSError(f"{self._path} is no file")
        self._close_journal()
        self._journal = journal
        self._inventory = Inventory()
        self._is_begun = False
        self._read_to = self._looks_in_vain = self._looks_to_leave_out = 0

    def _read_on(self) -> None:
        assert self._journal is not None
        began_at, size = self._read_to, os.fstat(self._journal).st_size
        while self._read_to < size:
            text = os.pread(self._journal, min(PIECE_BYTES, size - self._read_to), self._read_to)
            taken = self._inventory.apply(text)
            if not taken:
                break
            self._read_to += taken
        if began_at == self._read_to < size:
            # The rest may come yet, or never: it is not read anew each time.
            self._looks_to_leave_out = min(2**self._looks_in_vain - 1, MAX_LOOKS_LEFT_OUT)
            self._looks_in_vain = min(self._looks_in_vain + 1, 16)
        else:
            self._looks_in_vain = 0

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


class PeerDirectories:
    """All of them. `refresh` is for one thread at a time, `find` for another."""

    def __init__(self, root: Path, own: Path, disk: Disk, files: OpenFiles, direct: bool):
        self._root = root
        self._own = own
        self._disk = disk
        self._files = files
        self._direct = direct
        self._all: dict[str, PeerDirectory] = {}
        self._said: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._all)

    def find(self, group: GroupKey, block_hash: bytes) -> tuple[Shelf, Record] | None:
        for peer in list(self._all.values()):
            shelf = peer.shelf
            if shelf is not None and (record := shelf.find(group, block_hash)) is not None:
                return shelf, record
        return None

    def refresh(self) -> None:
        """Looks who is there and what they have added. Raises OSError, if nothing at all can be seen."""
        there = {name for name in os.listdir(self._root) if name != self._own.name}
        for gone in self._all.keys() - there:
            self._drop(gone)
        for gone in self._said.keys() - there:
            del self._said[gone]
        for name in there:
            try:
                trouble = self._look_at(name)
            except FileNotFoundError:
                continue  # It has just been made, or removed; or is none.
            except Exception as error:  # Whatever is wrong there, the others are not to suffer from it.
                trouble = f"{type(error).__name__}: {error}"
            if trouble != self._said.get(name, ""):
                self._said[name] = trouble
                if trouble:
                    log.warning("a directory cannot be read", directory=str(self._root / name), error=trouble)

    def close(self) -> None:
        for name in list(self._all):
            self._drop(name)

    def _look_at(self, name: str) -> str:
        """What is wrong there, if anything. Raises anything."""
        directory = self._root / name
        if name.startswith(orphans.REMOVED_PREFIX):
            orphans.finish(directory)
        if name.startswith(".") or not directory.is_dir():
            return ""
        if orphans.is_orphaned(directory) and self._is_removed(directory):
            return ""
        peer = self._all.get(name) or PeerDirectory(directory, lambda nbytes: self._extents_in(directory, nbytes))
        trouble = peer.refresh()
        self._all[name] = peer
        return trouble

    def _extents_in(self, directory: Path, extent_bytes: int) -> Extents:
        return Extents(directory, extent_bytes, self._disk, self._files, writable=False, direct=self._direct)

    def _is_removed(self, directory: Path) -> bool:
        try:
            if not orphans.remove(directory):
                return False
        except BlockingIOError:
            return False  # Its owner lives, and cannot say so: a clock is wrong, or its disk is full.
        self._drop(directory.name)
        log.info("removed the directory of a server that has not been seen for long", directory=str(directory))
        return True

    def _drop(self, name: str) -> None:
        if (peer := self._all.pop(name, None)) is not None:
            peer.close()
