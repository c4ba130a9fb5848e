"""Changes of a file tier that its journal does not have yet."""

from __future__ import annotations

from kvpool_server.cache.entry import Entry, Record
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.observer import Observer
from kvpool_server.tiers.file import frames
from kvpool_server.tiers.file.frames import GroupKey


class JournalBuffer(Observer):
    """Collects frames in the order of the changes; consecutive changes of one kind share a frame."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._stored: list[Record] = []
        self._removed: list[int] = []
        self._group: GroupKey | None = None
        self._namespaces: set[bytes] = set()

    def skip_namespace(self, fingerprint: bytes) -> None:
        """Notes that the journal names this namespace already."""
        self._namespaces.add(fingerprint)

    def open_namespace(self, namespace: PoolNamespace) -> None:
        """Names a namespace in the journal, once, before any block of it."""
        if namespace.fingerprint not in self._namespaces:
            self._encode_changes()
            self._namespaces.add(namespace.fingerprint)
            self._frames.append(frames.encode_namespace(namespace.spec))

    def stored(self, entry: Entry) -> None:
        group = (entry.group.fingerprint, entry.group.idx)
        if self._removed or group != self._group:
            self._encode_changes()
            self._group = group
        self._stored.append(Record(entry.block_hash, entry.parent_hash, entry.offset, entry.checksums))

    def removed(self, entry: Entry) -> None:
        if self._stored:
            self._encode_changes()
        self._removed.append(entry.offset)

    def pop(self) -> bytes:
        """Removes and returns all frames; empty if nothing has changed."""
        self._encode_changes()
        popped, self._frames = self._frames, []
        return b"".join(popped)

    def push_back(self, popped: bytes) -> None:
        """Returns frames that could not be written: the next `pop` begins with them."""
        self._frames.insert(0, popped)

    def _encode_changes(self) -> None:
        if self._removed:
            self._frames.append(frames.encode_removed(self._removed))
            self._removed = []
        if self._stored:
            assert self._group is not None
            self._frames.append(frames.encode_stored(self._group, self._stored))
            self._stored = []
        self._group = None
