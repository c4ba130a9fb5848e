"""What has changed in a file tier since its journal was last written."""

from __future__ import annotations

from kvpool_server.cache.entry import Entry, Record
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.cache.observer import Observer
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.journal import GroupKey


class News(Observer):
    """Frames in the order of what happened; neighbouring changes of one kind share one."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._stored: list[Record] = []
        self._removed: list[int] = []
        self._group: GroupKey | None = None
        self._told: set[bytes] = set()

    def already_told(self, fingerprint: bytes) -> None:
        """The journal knows this namespace."""
        self._told.add(fingerprint)

    def opened(self, namespace: Namespace) -> None:
        """Blocks of a namespace may follow."""
        if namespace.fingerprint not in self._told:
            self._settle()
            self._told.add(namespace.fingerprint)
            self._frames.append(journal.opened(namespace.spec))

    def stored(self, entry: Entry) -> None:
        group = (entry.group.fingerprint, entry.group.idx)
        if self._removed or group != self._group:
            self._settle()
            self._group = group
        self._stored.append(Record(entry.block_hash, entry.parent_hash, entry.offset, entry.checksums))

    def removed(self, entry: Entry) -> None:
        if self._stored:
            self._settle()
        self._removed.append(entry.offset)

    def take(self) -> bytes:
        """All there is; empty if nothing has changed."""
        self._settle()
        frames, self._frames = self._frames, []
        return b"".join(frames)

    def put_back(self, frames: bytes) -> None:
        """What `take` gave could not be written: the next one gives it again."""
        self._frames.insert(0, frames)

    def _settle(self) -> None:
        if self._removed:
            self._frames.append(journal.removed(self._removed))
            self._removed = []
        if self._stored:
            assert self._group is not None
            self._frames.append(journal.stored(self._group, self._stored))
            self._stored = []
        self._group = None
