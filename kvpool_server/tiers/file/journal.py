"""The journal of this server's own directory: a file of frames (`frames.py`), appended by the directory's owner.

The owner reads the journal at its start, and other servers at any time. Nothing is flushed to the disk: the journal
ends at a frame that is torn, or missing after a power cut, or invalid. The journal may be older or newer than the bytes
in the slots; whoever reads a slot compares checksums, so a wrong line costs a miss.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from kvpool.namespace import NamespaceSpec
from kvpool_server.cache.entry import Entry, Observer, Record
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.file import frames
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.frames import GroupKey

log = structlog.get_logger()
FILE_NAME = "journal"
COMPACT_AT_LEAST_BYTES = 16 << 20
"""A journal is compacted when it is twice as long as after the last compaction, and so much longer still."""


class Inventory:
    """The blocks that a journal lists. One thread applies frames; other threads may `get` single records meanwhile.

    Attributes:
        extent_bytes: 0 until the first frame is known.
        specs: by fingerprint.
        groups: the blocks of each group by hash, in the order in which they were stored.
        nbytes: of the journal, up to the end of the last frame that was applied.
        is_exact: True if the journal lists these blocks and nothing else, and ends with a whole frame.
        trouble: why a whole frame was not applied; empty if none was refused.
    """

    def __init__(self) -> None:
        self.extent_bytes = 0
        self.specs: dict[bytes, NamespaceSpec] = {}
        self.groups: dict[GroupKey, dict[bytes, Record]] = {}
        self.nbytes = 0
        self.is_exact = True
        self.trouble = ""
        self._at: dict[int, tuple[GroupKey, bytes]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def apply(self, text: bytes | memoryview) -> int:
        """Applies the frames up to the first that is torn or invalid; returns how many bytes were applied."""
        done = 0
        self.trouble = ""
        for frame in frames.decode_frames(memoryview(text)):
            try:
                self._apply_frame(frame.kind, frame.payload)
            except Exception as error:  # Another version or program wrote the frame: the journal ends before it.
                self.trouble = f"{type(error).__name__}: {error}"
                break
            done = frame.end
        self.nbytes += done
        self.is_exact = done == len(text)
        return done

    def _apply_frame(self, kind: int, payload: memoryview) -> None:
        """May raise anything; has changed nothing then."""
        if kind == frames.HEAD:
            self.extent_bytes = frames.decode_head(payload)
        elif kind == frames.NAMESPACE:
            spec = frames.decode_namespace(payload)
            self.specs[spec.fingerprint()] = spec
        elif kind == frames.STORED:
            self._store(payload)
        elif kind == frames.REMOVED:
            for offset in frames.decode_removed(payload):
                self._remove(offset)

    def _store(self, payload: memoryview) -> None:
        group, num_shards, stored = frames.decode_stored(payload)
        spec = self.specs.get(group[0])
        if not num_shards or (spec is not None and spec.groups[group[1]].num_shards != num_shards):
            raise ValueError(f"blocks with {num_shards} checksums")
        records = self.groups.setdefault(group, {})
        for record in stored:
            if record.offset in self._at:
                self._remove(record.offset)
            if (old := records.pop(record.block_hash, None)) is not None:
                del self._at[old.offset]
            records[record.block_hash] = record
            self._at[record.offset] = (group, record.block_hash)

    def _remove(self, offset: int) -> None:
        at = self._at.pop(offset, None)
        if at is not None:
            self.groups[at[0]].pop(at[1], None)

    def keep_only(self, is_wanted: Callable[[GroupKey, Record], bool]) -> None:
        for group, records in self.groups.items():
            for record in [record for record in records.values() if not is_wanted(group, record)]:
                del records[record.block_hash], self._at[record.offset]
                self.is_exact = False

    def get(self, group: GroupKey, block_hash: bytes) -> Record | None:
        records = self.groups.get(group)
        return None if records is None else records.get(block_hash)

    def encode(self) -> Iterator[bytes]:
        """A journal that lists these blocks, in the order in which they were stored: parents before children.

        The journal names all namespaces, also those without blocks: its writer has noted that they are named, and does
        not name them again.
        """
        yield frames.encode_head(self.extent_bytes)
        for spec in self.specs.values():
            yield frames.encode_namespace(spec)
        for group, records in self.groups.items():
            if records:
                yield frames.encode_stored(group, list(records.values()))


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

    def append(self, text: bytes) -> None:
        """Adds frames, all or nothing as far as readers see."""
        with self._lock:
            self._disk.write(self._fd, [memoryview(text)], self._nbytes)
            self._nbytes += len(text)
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
            for text in inventory.encode():
                self._disk.write(fd, [memoryview(text)], nbytes)
                nbytes += len(text)
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


class JournalBuffer(Observer):
    """Changes that the journal does not have yet, as frames in their order; changes of one kind in a row share one."""

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
