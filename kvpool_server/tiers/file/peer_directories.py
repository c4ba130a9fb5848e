"""Other servers' directories below the same path: their blocks can be read, by their journals.

Servers agree on nothing: a journal may be old, and its owner may overwrite a slot while another server reads it, which
the checksums tell. Trouble with one directory is logged once, and does not affect the others.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.frames import MAX_FRAME_BYTES, GroupKey
from kvpool_server.tiers.file.journal import FILE_NAME, Inventory
from kvpool_server.tiers.open_files import OpenFiles

MAX_LOST = 65_536

log = structlog.get_logger()
READ_BYTES = MAX_FRAME_BYTES + 4096
"""Bytes of a journal that are read at once: a piece that begins with a frame has all of it."""
MAX_SKIPPED_REFRESHES = 63


class PeerBlocks:
    """The blocks of one peer: the inventory that its journal gives, and the extents with the bytes.

    The two belong together: a journal that was replaced makes a new `PeerBlocks`, and readers of the old one go on with
    the inventory that led them there. Any failure is a miss, never an error of this server. One thread calls `find`
    and `forget`; any thread the rest, while the inventory grows.
    """

    def __init__(self, inventory: Inventory, extents: Extents):
        self.extent_bytes = extents.extent_bytes
        self._inventory = inventory
        self._extents = extents
        self._lost: dict[int, Record] = {}

    def find(self, group: GroupKey, block_hash: bytes) -> Record | None:
        """Where a block lies, as far as the journal has been read."""
        record = self._inventory.get(group, block_hash)
        return None if record is None or self._lost.get(record.offset) is record else record

    def forget(self, record: Record) -> None:
        """Hides a block that could not be read, until the journal has a new record of it."""
        self._lost.pop(record.offset, None)
        self._lost[record.offset] = record
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """As `Extents.read`, but False instead of an error."""
        try:
            return self._extents.read(offset, views)
        except (OSError, OverflowError):  # A failing disk, missing permissions, or an offset that no file can have.
            return False

    def close(self) -> None:
        """Reads are misses from now on. Idempotent."""
        self._extents.close()


class PeerDirectory:
    """One other server's directory. For one thread at a time.

    `blocks` can be read; None until the journal's first frame is known.
    """

    def __init__(self, directory: Path, make_extents: Callable[[int], Extents]):
        self.blocks: PeerBlocks | None = None
        self._path = directory / FILE_NAME
        self._make_extents = make_extents
        self._journal: int | None = None
        self._inventory = Inventory()
        self._has_begun = False
        self._nbytes_read = 0
        self._vain_refreshes = 0
        self._refreshes_to_skip = 0

    def refresh(self) -> str:
        """Reads what has been added to the journal, or all of a journal that was replaced. Raises OSError.

        Returns what is wrong with the journal; empty if nothing is, or only its end is not written yet.
        """
        if self._journal is None or self._is_replaced(self._journal):
            self._begin()
        elif self._refreshes_to_skip:
            self._refreshes_to_skip -= 1
            return self._inventory.trouble
        self._read_on()
        if not self._has_begun and self._inventory.extent_bytes:
            old = self.blocks
            self.blocks = PeerBlocks(self._inventory, self._make_extents(self._inventory.extent_bytes))
            self._has_begun = True
            if old is not None:
                old.close()
        return self._inventory.trouble

    def close(self) -> None:
        self._close_journal()
        if self.blocks is not None:
            self.blocks.close()
            self.blocks = None

    def _is_replaced(self, journal: int) -> bool:
        now = os.stat(self._path)
        return not os.path.samestat(now, os.fstat(journal)) or now.st_size < self._nbytes_read

    def _begin(self) -> None:
        journal = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe would block.
        if not stat.S_ISREG(os.fstat(journal).st_mode):
            os.close(journal)
            raise OSError(f"{self._path} is not a regular file")
        self._close_journal()
        self._journal = journal
        self._inventory = Inventory()
        self._has_begun = False
        self._nbytes_read = self._vain_refreshes = self._refreshes_to_skip = 0

    def _read_on(self) -> None:
        assert self._journal is not None
        began_at, size = self._nbytes_read, os.fstat(self._journal).st_size
        while self._nbytes_read < size:
            text = os.pread(self._journal, min(READ_BYTES, size - self._nbytes_read), self._nbytes_read)
            applied = self._inventory.apply(text)
            if not applied:
                break
            self._nbytes_read += applied
        if began_at == self._nbytes_read < size:
            # The rest of the frame may come yet, or never: refreshes that read it again become rarer.
            self._refreshes_to_skip = min(2**self._vain_refreshes - 1, MAX_SKIPPED_REFRESHES)
            self._vain_refreshes = min(self._vain_refreshes + 1, 16)
        else:
            self._vain_refreshes = 0

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


class PeerDirectories:
    """All other servers' directories below a path. `refresh` is for one thread at a time, `find` for another."""

    def __init__(self, root: Path, own: Path, disk: Disk, open_files: OpenFiles, direct: bool):
        self._root = root
        self._own = own
        self._disk = disk
        self._open_files = open_files
        self._direct = direct
        self._peers: dict[str, PeerDirectory] = {}
        self._troubles: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, group: GroupKey, block_hash: bytes) -> tuple[PeerBlocks, Record] | None:
        for peer in list(self._peers.values()):
            blocks = peer.blocks
            if blocks is not None and (record := blocks.find(group, block_hash)) is not None:
                return blocks, record
        return None

    def refresh(self) -> None:
        """Reads what peers have added, and notices new and deleted directories. Raises OSError for the path itself."""
        there = {name for name in os.listdir(self._root) if name != self._own.name}
        for gone in self._peers.keys() - there:
            self._peers.pop(gone).close()
        for gone in self._troubles.keys() - there:
            del self._troubles[gone]
        for name in there:
            try:
                trouble = self._refresh_one(name)
            except FileNotFoundError:
                continue  # Another server has just created or deleted the directory; or it is no server's.
            except Exception as error:  # Trouble with one directory must not affect the others.
                trouble = f"{type(error).__name__}: {error}"
            if trouble != self._troubles.get(name, ""):
                self._troubles[name] = trouble
                if trouble:
                    log.warning("a peer's directory cannot be read", directory=str(self._root / name), error=trouble)

    def close(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()

    def _refresh_one(self, name: str) -> str:
        """What is wrong with a directory, if anything. May raise anything."""
        directory = self._root / name
        if name.startswith(".") or not directory.is_dir():
            return ""
        peer = self._peers.get(name) or PeerDirectory(directory, lambda nbytes: self._extents_in(directory, nbytes))
        trouble = peer.refresh()
        self._peers[name] = peer
        return trouble

    def _extents_in(self, directory: Path, extent_bytes: int) -> Extents:
        return Extents(directory, extent_bytes, self._disk, self._open_files, writable=False, direct=self._direct)
