"""The journal of this server's own directory: a file of frames (`frames.py`), appended by the directory's owner.

The owner reads the journal at its start, and other servers at any time. Nothing is flushed to the disk: the journal
ends at a frame that is torn, or missing after a power cut, or invalid. The journal may be older or newer than the bytes
in the slots; whoever reads a slot compares checksums, so a wrong line costs a miss.

Whoever can write the file decides its content: a reader bounds the bytes of a frame, of the file, and of the memory
that the blocks take, and ends the journal where a bound is reached.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import structlog

from kvpool.protocol.namespace import NamespaceSpec
from kvpool_server.cache.entry import Entry, Observer, Record
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.block_mac import TAG_BYTES
from kvpool_server.tiers.file import frames
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.frames import GroupKey

log = structlog.get_logger()

FILE_NAME = "journal"
NEW_FILE_NAME = "journal.new"
"""A journal that is being compacted."""
MAX_JOURNAL_BYTES = 16 << 30
"""What a file has behind these is not read."""
READ_BYTES = frames.MAX_FRAME_BYTES + 4096
"""Bytes that are read at once: a piece that begins with a frame has all of it."""
RECORD_BYTES, CHECKSUM_BYTES = 520, 8
"""Memory of a block without its tag, and of each of its checksums."""
TAG_OBJECT_BYTES = 64
GROUP_BYTES, NAMESPACE_BYTES, SPEC_FACTOR = 512, 2048, 20
"""Memory of a group and of a namespace, and at most so many times the bytes of a spec's JSON."""
COMPACT_AT_LEAST_BYTES = 16 << 20
"""A journal is compacted when it is twice as long as after the last compaction, and so much longer still."""
MAX_HIDDEN = 65_536


class JournalTooLargeError(Exception):
    """A journal lists more than its reader may keep in memory."""


class Inventory:
    """The blocks that a journal lists. One thread applies frames; another may `get` and `hide` records meanwhile.

    Args:
        has_tags: whether the blocks have tags; a journal of blocks with or without is none for the other.

    Attributes:
        max_memory_bytes: a frame whose blocks would take more memory is refused.
        memory_bytes: estimate of what the blocks and namespaces take.
        extent_bytes: 0 until the first frame is known.
        specs: by fingerprint.
        groups: the blocks of each group by hash, in the order in which they were stored.
        nbytes: of the journal, up to the end of the last frame that was applied.
        is_exact: True if the journal lists these blocks and nothing else, and ends with a whole frame.
        trouble: why a whole frame was not applied; empty if none was refused.
    """

    def __init__(self, max_memory_bytes: int = sys.maxsize, *, has_tags: bool = False) -> None:
        self._version = frames.TAGGED_VERSION if has_tags else frames.FORMAT_VERSION
        self._tag_bytes = TAG_BYTES if has_tags else 0
        self.max_memory_bytes = max_memory_bytes
        self.memory_bytes = 0
        self.extent_bytes = 0
        self.specs: dict[bytes, NamespaceSpec] = {}
        self.groups: dict[GroupKey, dict[bytes, Record]] = {}
        self.nbytes = 0
        self.is_exact = True
        self.trouble = ""
        self._at: dict[int, tuple[GroupKey, bytes]] = {}
        self._hidden: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._at)

    def read(self, fd: int, max_bytes: int = MAX_JOURNAL_BYTES) -> int:
        """Applies what a journal's file has behind the bytes that were applied before; returns the bytes read.

        Reads until the end, or until at least `max_bytes` were read. Raises OSError.
        """
        size = min(os.fstat(fd).st_size, MAX_JOURNAL_BYTES)
        num_read = 0
        while self.nbytes < size and num_read < max_bytes:
            text = os.pread(fd, min(READ_BYTES, size - self.nbytes), self.nbytes)
            num_read += len(text)
            if not self.apply(text):
                break
        self.is_exact = self.nbytes == os.fstat(fd).st_size
        return num_read

    def apply(self, text: bytes | memoryview) -> int:
        """Applies the frames up to the first that is torn or invalid; returns how many bytes were applied."""
        done = 0
        self.trouble = ""
        for kind, payload, end in frames.decode_frames(memoryview(text)):
            try:
                self._apply_frame(kind, payload)
            except Exception as error:  # Another version or program wrote the frame: the journal ends before it.
                self.trouble = f"{type(error).__name__}: {error}"
                break
            done = end
        self.nbytes += done
        self.is_exact = done == len(text)
        return done

    def _apply_frame(self, kind: int, payload: memoryview) -> None:
        """May raise anything; has changed nothing then."""
        match kind:
            case frames.HEAD:
                self.extent_bytes = frames.decode_head(payload, self._version)
            case frames.NAMESPACE:
                spec = frames.decode_namespace(payload)
                if (fingerprint := spec.fingerprint()) not in self.specs:
                    self._take_memory(NAMESPACE_BYTES + SPEC_FACTOR * len(payload))
                self.specs[fingerprint] = spec
            case frames.STORED:
                self._store(payload)
            case frames.REMOVED:
                for offset in frames.decode_removed(payload):
                    self._remove(offset)

    def _store(self, payload: memoryview) -> None:
        group, num_shards, num_records, stored = frames.decode_stored(payload, self._tag_bytes)
        if self.specs[group[0]].groups[group[1]].num_shards != num_shards:
            raise ValueError(f"blocks with {num_shards} checksums")
        self._take_memory(num_records * self._record_bytes(num_shards) + GROUP_BYTES * (group not in self.groups))
        records = self.groups.setdefault(group, {})
        for record in stored:
            if record.offset in self._at:
                self._remove(record.offset)
            if (old := records.pop(record.block_hash, None)) is not None:
                self._forget(old)
            records[record.block_hash] = record
            self._at[record.offset] = (group, record.block_hash)

    def _remove(self, offset: int) -> None:
        if (at := self._at.get(offset)) is not None:
            self._forget(self.groups[at[0]].pop(at[1]))

    def _forget(self, record: Record) -> None:
        """A record that has left its group."""
        del self._at[record.offset]
        self.memory_bytes -= self._record_bytes(len(record.checksums))

    def _record_bytes(self, num_shards: int) -> int:
        return RECORD_BYTES + CHECKSUM_BYTES * num_shards + TAG_OBJECT_BYTES * (self._tag_bytes > 0)

    def _take_memory(self, nbytes: int) -> None:
        if self.memory_bytes + nbytes > self.max_memory_bytes:
            raise JournalTooLargeError("it lists more blocks than fit into the memory for them (peer_memory=)")
        self.memory_bytes += nbytes

    def keep_only(self, is_wanted: Callable[[GroupKey, Record], bool]) -> None:
        for group, records in self.groups.items():
            for record in [record for record in records.values() if not is_wanted(group, record)]:
                self._forget(records.pop(record.block_hash))
                self.is_exact = False

    def get(self, group: GroupKey, block_hash: bytes) -> Record | None:
        """Where a block lies, as far as the journal has been read."""
        record = self.groups.get(group, {}).get(block_hash)
        return None if record is None or self._hidden.get(record.offset) is record else record

    def hide(self, record: Record) -> None:
        """Hides a block that could not be read, until the journal has a new record of it."""
        self._hidden[record.offset] = record
        if len(self._hidden) > MAX_HIDDEN:
            del self._hidden[next(iter(self._hidden))]

    def encode(self) -> Iterator[bytes]:
        """A journal that lists these blocks, in the order in which they were stored: parents before children.

        It names all namespaces, also those without blocks: its writer does not name them again.
        """
        yield frames.encode_head(self.extent_bytes, self._version)
        for spec in self.specs.values():
            yield frames.encode_namespace(spec)
        for group, records in self.groups.items():
            if records:
                yield frames.encode_stored(group, list(records.values()))


class Journal:
    """The file, appended by its owner. Blocking; thread-safe. Every method raises OSError.

    Args:
        empty: makes an inventory of this journal's kind and bounds, without blocks.
    """

    def __init__(self, directory: Directory, disk: Disk, empty: Callable[[], Inventory] = Inventory):
        self.empty = empty
        self._directory = directory
        self._disk = disk
        self._lock = threading.Lock()
        self._fd = -1
        self._nbytes = self._compact_at_bytes = 0

    def load(self) -> Inventory:
        """The blocks at the end of the last run; empty without a journal."""
        inventory = self.empty()
        try:
            fd = self._disk.open(self._directory, FILE_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return inventory
        try:
            inventory.read(fd)
        finally:
            self._disk.close(fd)
        return inventory

    def begin(self, inventory: Inventory) -> None:
        """Continues from this content. Called once, before `append`."""
        with self._lock:
            if inventory.nbytes and inventory.is_exact:
                self._continue(self._disk.open(self._directory, FILE_NAME, os.O_RDWR), inventory.nbytes)
            else:
                self._rewrite(inventory)

    def append(self, text: bytes) -> None:
        """Adds frames, all or nothing as far as readers see."""
        with self._lock:
            self._disk.write(self._fd, [memoryview(text)], self._nbytes)
            self._nbytes += len(text)
            if self._nbytes < self._compact_at_bytes:
                return
            try:
                inventory = self.empty()
                inventory.read(self._fd)
                self._rewrite(inventory)
            except OSError as error:
                # The frames are written. The journal grows on, and is compacted when it is worth another try.
                self._compact_at_bytes = self._nbytes + COMPACT_AT_LEAST_BYTES
                directory = str(self._directory.path)
                log.warning("a tier's journal cannot be compacted", directory=directory, error=str(error))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd >= 0:
                self._disk.close(self._fd)
                self._fd = -1

    def _rewrite(self, inventory: Inventory) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._directory, NEW_FILE_NAME)  # Of a process that died meanwhile.
        fd = self._disk.open(self._directory, NEW_FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        nbytes = 0
        try:
            for text in inventory.encode():
                self._disk.write(fd, [memoryview(text)], nbytes)
                nbytes += len(text)
            self._disk.replace(self._directory, NEW_FILE_NAME, FILE_NAME)
        except BaseException:
            self._disk.close(fd)
            with contextlib.suppress(OSError):
                # The file takes space, of which there may be none left.
                self._disk.remove(self._directory, NEW_FILE_NAME)
            raise
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._continue(fd, nbytes)

    def _continue(self, fd: int, nbytes: int) -> None:
        self._fd, self._nbytes = fd, nbytes
        self._compact_at_bytes = 2 * nbytes + COMPACT_AT_LEAST_BYTES


class JournalBuffer(Observer):
    """Changes that the journal does not have yet, as frames in their order; changes of one kind in a row share one.

    Args:
        tags: of the slots at these offsets, if blocks have tags.

    Attributes:
        named: namespaces that the journal or the buffer names.
    """

    def __init__(self, tags: Mapping[int, bytes] = MappingProxyType({})) -> None:
        self._tags = tags
        self._frames: list[bytes] = []
        self._stored: list[Record] = []
        self._removed: list[int] = []
        self._group: GroupKey | None = None
        self.named: set[bytes] = set()

    def open_namespace(self, namespace: PoolNamespace) -> None:
        """Names a namespace in the journal, once, before any block of it. Raises InvalidRequestError."""
        if namespace.fingerprint not in self.named:
            self._encode_changes()
            self._frames.append(frames.encode_namespace(namespace.spec))
            self.named.add(namespace.fingerprint)

    def record(self, entry: Entry) -> Record:
        """A complete entry as the journal lists it."""
        tag = self._tags.get(entry.offset, b"")
        return Record(entry.block_hash, entry.parent_hash, entry.offset, entry.checksums, tag)

    def stored(self, entry: Entry) -> None:
        group = (entry.group.fingerprint, entry.group.idx)
        if self._removed or group != self._group:
            self._encode_changes()
            self._group = group
        self._stored.append(self.record(entry))

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
