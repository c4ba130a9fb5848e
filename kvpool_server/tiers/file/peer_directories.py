"""Other servers' directories below the same path: their blocks can be read, by their journals.

Servers agree on nothing: a journal may be old, and its owner may overwrite a slot while another server reads it, which
the checksums tell. Trouble with one directory is logged once, and does not affect the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import structlog

from kvpool.holdings import printable
from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.frames import GroupKey
from kvpool_server.tiers.file.journal import FILE_NAME, Inventory
from kvpool_server.tiers.open_files import OpenFiles

log = structlog.get_logger()

MAX_LOST = 65_536
MAX_SKIPPED_REFRESHES = 63
MAX_PEERS = 1_024
MAX_ENTRIES = 4_096
"""Entries of a tier's path that are looked at."""
REFRESH_BYTES = 32 << 20
"""Bytes of journals that are read between two heartbeats: about a second's."""
DEFAULT_MEMORY_BYTES = 4 << 30


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

    @property
    def memory_bytes(self) -> int:
        """Estimate of what the inventory takes."""
        return self._inventory.memory_bytes

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
    """One other server's directory, which it closes. For one thread at a time.

    Attributes:
        directory: the directory.
        blocks: can be read; None until the journal's first frame is known.
        trouble: what is wrong with the journal; empty if nothing is, or only its end is not written yet.
        memory_bytes: estimate of what its blocks take.
    """

    def __init__(self, directory: Directory, make_extents: Callable[[int], Extents], *, has_tags: bool):
        self.directory = directory
        self._has_tags = has_tags
        self.blocks: PeerBlocks | None = None
        self._make_extents = make_extents
        self._journal: int | None = None
        self._inventory = Inventory(has_tags=self._has_tags)
        self._has_begun = False
        self._vain_refreshes = 0
        self._refreshes_to_skip = 0

    @property
    def trouble(self) -> str:
        return self._inventory.trouble

    @property
    def memory_bytes(self) -> int:
        return self._inventory.memory_bytes + self._replaced_memory_bytes

    @property
    def _replaced_memory_bytes(self) -> int:
        """Of the blocks of a journal that was replaced, until the new one has been read."""
        return 0 if self._has_begun or self.blocks is None else self.blocks.memory_bytes

    def refresh(self, max_bytes: int, max_memory_bytes: int) -> int:
        """Reads what has been added to the journal, or a journal that was replaced; returns the bytes read.

        Args:
            max_bytes: stops once so much was read; the next refresh goes on.
            max_memory_bytes: the most memory that its blocks may take.

        Raises OSError.
        """
        if self._journal is None or self._is_replaced(self._journal):
            self._begin()
        elif self._refreshes_to_skip:
            self._refreshes_to_skip -= 1
            return 0
        self._inventory.max_memory_bytes = max_memory_bytes - self._replaced_memory_bytes
        num_read = self._read_on(max_bytes)
        has_more = num_read >= max_bytes and not self._vain_refreshes
        if not self._has_begun and self._inventory.extent_bytes and (self.blocks is None or not has_more):
            old = self.blocks
            self.blocks = PeerBlocks(self._inventory, self._make_extents(self._inventory.extent_bytes))
            self._has_begun = True
            if old is not None:
                old.close()
        return num_read

    def close(self) -> None:
        self._close_journal()
        if self.blocks is not None:
            self.blocks.close()
            self.blocks = None
        self.directory.close()

    def _is_replaced(self, journal: int) -> bool:
        now = self.directory.stat(FILE_NAME)
        return not os.path.samestat(now, os.fstat(journal)) or now.st_size < self._inventory.nbytes

    def _begin(self) -> None:
        journal = self.directory.open(FILE_NAME, os.O_RDONLY)
        self._close_journal()
        self._journal = journal
        self._inventory = Inventory(has_tags=self._has_tags)
        self._has_begun = False
        self._vain_refreshes = self._refreshes_to_skip = 0

    def _read_on(self, max_bytes: int) -> int:
        assert self._journal is not None
        began_at = self._inventory.nbytes
        num_read = self._inventory.read(self._journal, max_bytes)
        if num_read and began_at == self._inventory.nbytes:
            # The rest of the frame may come yet, or never: refreshes that read it again become rarer.
            self._refreshes_to_skip = min(2**self._vain_refreshes - 1, MAX_SKIPPED_REFRESHES)
            self._vain_refreshes = min(self._vain_refreshes + 1, 16)
        else:
            self._vain_refreshes = 0
        return num_read

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


class PeerDirectories:
    """All other servers' directories below a path. `refresh` is for one thread at a time, `find` for another.

    Args:
        root: the path.
        own_name: of this server's directory, which is none of them.
        max_memory_bytes: the most memory that the blocks of all of them may take.
        has_tags: as `Inventory` takes it.
    """

    def __init__(
        self,
        root: Directory,
        own_name: str,
        disk: Disk,
        open_files: OpenFiles,
        direct: bool,
        max_memory_bytes: int = DEFAULT_MEMORY_BYTES,
        *,
        has_tags: bool = False,
    ):
        self._has_tags = has_tags
        self._root = root
        self._own_name = own_name
        self._disk = disk
        self._open_files = open_files
        self._direct = direct
        self._max_memory_bytes = max_memory_bytes
        self._peers: dict[str, PeerDirectory] = {}
        self._troubles: dict[str, str] = {}
        self._last_name = ""
        """The peer at which the last refresh has stopped."""

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, group: GroupKey, block_hash: bytes) -> tuple[PeerBlocks, Record] | None:
        for peer in list(self._peers.values()):
            blocks = peer.blocks
            if blocks is not None and (record := blocks.find(group, block_hash)) is not None:
                return blocks, record
        return None

    def refresh(self) -> bool:
        """Reads what peers have added, and notices new and deleted directories. Raises OSError for the path itself.

        Returns True if there is more to read at once: REFRESH_BYTES were read.
        """
        names = self._candidates()
        left = REFRESH_BYTES
        room = self._max_memory_bytes - sum(peer.memory_bytes for peer in self._peers.values())
        for name in names:
            before = self._memory_of(name)
            try:
                left -= self._refresh_one(name, left, room + before)
                trouble = self._peers[name].trouble
            except FileNotFoundError:
                continue  # Another server has just created or deleted the directory; or it is no server's.
            except Exception as error:  # Trouble with one directory must not affect the others.
                trouble = f"{type(error).__name__}: {error}"
            room += before - self._memory_of(name)
            self._report(name, trouble)
            if left <= 0:
                self._last_name = name
                return True
        self._last_name = ""
        self._troubles = {name: trouble for name, trouble in self._troubles.items() if name in {*names, ""}}
        return False

    def close(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()

    def _candidates(self) -> list[str]:
        """Names of the peers that are there and of directories that may be peers: those after `_last_name` first."""
        for name, peer in list(self._peers.items()):
            if not peer.directory.is_at(self._root, name):
                self._peers.pop(name).close()
        names, trouble = {*self._peers, self._own_name}, ""
        for nth, entry in enumerate(self._root.entries()):
            if nth == MAX_ENTRIES:
                trouble = f"it has more than {MAX_ENTRIES} entries; the others are ignored"
                break
            if entry.name in names or entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            if len(names) > MAX_PEERS:
                trouble = f"it has more than {MAX_PEERS} directories; the others are ignored"
                break
            names.add(entry.name)
        self._report("", trouble)
        names.remove(self._own_name)
        return sorted(names, key=lambda name: (name <= self._last_name, name))

    def _memory_of(self, name: str) -> int:
        return self._peers[name].memory_bytes if name in self._peers else 0

    def _refresh_one(self, name: str, max_bytes: int, room: int) -> int:
        """Bytes read of a directory's journal. May raise anything."""
        peer = self._peers.get(name)
        if peer is not None:
            return peer.refresh(max_bytes, room)
        directory = self._root.open_directory(name)
        peer = PeerDirectory(directory, lambda nbytes: self._extents_in(directory, nbytes), has_tags=self._has_tags)
        try:
            num_read = peer.refresh(max_bytes, room)
        except BaseException:
            peer.close()
            raise
        self._peers[name] = peer
        return num_read

    def _report(self, name: str, trouble: str) -> None:
        """Logs what is wrong with a directory, once; an empty name is the path itself."""
        if trouble != self._troubles.get(name, ""):
            self._troubles[name] = trouble
            if trouble:
                directory = printable(str(self._root.path / name))
                log.warning("a peer's directory cannot be read", directory=directory, error=printable(trouble))

    def _extents_in(self, directory: Directory, extent_bytes: int) -> Extents:
        return Extents(directory, extent_bytes, self._disk, self._open_files, writable=False, direct=self._direct)
