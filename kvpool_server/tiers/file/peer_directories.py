"""Other servers' directories below the same path: their blocks can be read, by their journals.

Servers agree on nothing: a journal may be old, and its owner may overwrite a slot while another server reads it, which
the checksums tell.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import structlog

from kvpool.protocol.text import printable
from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file.directory import Directory, OpenFile
from kvpool_server.tiers.file.extents import Extents, MakeExtents
from kvpool_server.tiers.file.journal import FILE_NAME, GroupKey, Inventory, MakeInventory

log = structlog.get_logger()

MAX_SKIPPED_REFRESHES = 63
MAX_PEERS = 1_024
MAX_ENTRIES = 4_096
"""Entries of a tier's path that are looked at."""
REFRESH_BYTES = 32 << 20
"""Bytes of journals that are read between two heartbeats: about a second's."""
DEFAULT_MEMORY_BYTES = 4 << 30


class PeerBlocks(NamedTuple):
    """The blocks that one journal of a peer lists, and the extents with their bytes.

    The two belong together: a journal that was replaced makes new ones, and readers of the old ones go on with the
    inventory that led them there.
    """

    inventory: Inventory
    extents: Extents


class PeerDirectory:
    """One other server's directory, which it closes. For one thread at a time.

    Attributes:
        blocks: can be read; None until the journal's first frame is known.
        inventory: of the journal that is being read.
    """

    def __init__(self, directory: Directory, make_extents: MakeExtents, empty: MakeInventory):
        self.directory = directory
        self.blocks: PeerBlocks | None = None
        self._make_extents = make_extents
        self._empty = empty
        self._journal: OpenFile | None = None
        self.inventory = empty()
        self._next_skip = self._refreshes_to_skip = 0

    def memory_bytes(self) -> int:
        """Estimate of what its blocks take, those of a replaced journal included until the new one has been read."""
        return self.inventory.memory_bytes + self._replaced_memory_bytes()

    def _replaced_memory_bytes(self) -> int:
        old = self.blocks
        return 0 if old is None or old.inventory is self.inventory else old.inventory.memory_bytes

    def refresh(self, max_bytes: int, max_memory_bytes: int) -> int:
        """Reads what has been added to the journal, or a journal that was replaced; returns the bytes read.

        Stops once `max_bytes` were read. The blocks may take `max_memory_bytes`. Raises OSError.
        """
        if (journal := self._journal) is None or self._is_replaced(journal.fd):
            journal = self._journal = OpenFile(self.directory.open(FILE_NAME, os.O_RDONLY))
            self.inventory = self._empty()
            self._next_skip = self._refreshes_to_skip = 0
        elif self._refreshes_to_skip:
            self._refreshes_to_skip -= 1
            return 0
        self.inventory.max_memory_bytes = max_memory_bytes - self._replaced_memory_bytes()
        began_at = self.inventory.nbytes
        num_read = self.inventory.read(journal.fd, max_bytes)
        is_vain = num_read > 0 and began_at == self.inventory.nbytes
        if is_vain:  # The rest of the frame may come yet, or never: refreshes that read it again become rarer.
            self._refreshes_to_skip = self._next_skip
        self._next_skip = min(2 * self._next_skip + 1, MAX_SKIPPED_REFRESHES) if is_vain else 0
        old, has_all = self.blocks, num_read < max_bytes or is_vain
        if self.inventory.extent_bytes and (old is None or (old.inventory is not self.inventory and has_all)):
            extents = self._make_extents(self.directory, self.inventory.extent_bytes, False)
            self.blocks = PeerBlocks(self.inventory, extents)
            if old is not None:
                old.extents.close()
        return num_read

    def close(self) -> None:
        self._journal = None
        if self.blocks is not None:
            self.blocks.extents.close()
            self.blocks = None
        self.directory.close()

    def _is_replaced(self, fd: int) -> bool:
        now = self.directory.stat(FILE_NAME)
        return not os.path.samestat(now, os.fstat(fd)) or now.st_size < self.inventory.nbytes


class PeerDirectories:
    """All other servers' directories below a path. `refresh` is for one thread at a time, `find` for another.

    Args:
        own_name: of this server's directory, which is none of them.
        max_memory_bytes: the most memory that the blocks of all of them may take.
    """

    def __init__(
        self, root: Directory, own_name: str, make_extents: MakeExtents, max_memory_bytes: int, empty: MakeInventory
    ):
        self._root = root
        self._own_name = own_name
        self._make_extents = make_extents
        self._max_memory_bytes = max_memory_bytes
        self._empty = empty
        self._peers: dict[str, PeerDirectory] = {}
        self._troubles: dict[str, str] = {}
        self._last_name = ""
        """The peer at which the last refresh has stopped."""

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, group: GroupKey, block_hash: bytes) -> tuple[PeerBlocks, Record] | None:
        for peer in list(self._peers.values()):
            blocks = peer.blocks
            if blocks is not None and (record := blocks.inventory.get(group, block_hash)) is not None:
                return blocks, record
        return None

    def refresh(self) -> bool:
        """Reads what peers have added, and notices new and deleted directories. Raises OSError for the path itself.

        Returns True if there is more to read at once: REFRESH_BYTES were read.
        """
        names = self._candidates()
        left = REFRESH_BYTES
        room = self._max_memory_bytes - sum(peer.memory_bytes() for peer in self._peers.values())
        for name in names:
            before = self._memory_of(name)
            try:
                left -= self._refresh_one(name, left, room + before)
                trouble = self._peers[name].inventory.trouble
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
        return self._peers[name].memory_bytes() if name in self._peers else 0

    def _refresh_one(self, name: str, max_bytes: int, room: int) -> int:
        """Bytes read of a directory's journal. May raise anything."""
        if (peer := self._peers.get(name)) is not None:
            return peer.refresh(max_bytes, room)
        peer = PeerDirectory(self._root.open_directory(name), self._make_extents, self._empty)
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
                directory = printable(self._root.path / name)
                log.warning("a peer's directory cannot be read", directory=directory, error=printable(trouble))
