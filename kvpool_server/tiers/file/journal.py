"""What a file tier writes down of itself: which block lies where, and its checksums.

A journal is a sequence of frames, each with a checksum of its own, appended by the one server that owns the directory
and read by it at its start, and by others at any time. Nothing is flushed to the disk: a frame that is torn, or missing
after a power cut, ends the journal there. What it says may be older or newer than what lies in the slots; whoever reads
a slot compares checksums, so that a wrong line costs a miss. A whole frame that makes no sense ends it, too.

    frame       MAGIC, kind, nbytes, xxh3-64 of the payload; the payload
    HEAD        of the journal: format version and bytes of an extent, uint64 each
    NAMESPACE   its spec, as JSON
    STORED      fingerprint, group, number of shards; blocks: hash, parent's hash, offset, xxh3-64 of each shard
    REMOVED     offsets of slots, uint64 each
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import structlog

from kvpool.hashing import checksum
from kvpool.namespace import NamespaceSpec
from kvpool.types import HASH_BYTES
from kvpool_server.cache.entry import Record
from kvpool_server.tiers.file.disk import Disk

log = structlog.get_logger()

FILE_NAME = "journal"
FORMAT_VERSION = 1
MAX_FRAME_BYTES = 1 << 26
RECORDS_A_FRAME = 4096

_MAGIC = b"kvptier\n"
_FRAME = struct.Struct("<8sIIQ")
_HEAD = struct.Struct("<QQ")
_STORED = struct.Struct(f"<{HASH_BYTES}sII")
HEAD, NAMESPACE, STORED, REMOVED = range(1, 5)
_ROOT = bytes(HASH_BYTES)

GroupKey = tuple[bytes, int]
"""(fingerprint, group_idx)"""
Items = TypeVar("Items", Sequence[Record], "array[int]")


def is_one_or_none(path: Path) -> bool:
    """Whether a file is empty, or begins as a journal of any version does; True if there is none. Raises OSError."""
    try:
        with path.open("rb") as file:
            start = file.read(_FRAME.size)
    except FileNotFoundError:
        return True
    if len(start) < _FRAME.size:
        return not start
    magic, kind, *_ = _FRAME.unpack(start)
    return magic == _MAGIC and kind == HEAD


def _frame(kind: int, payload: bytes) -> bytes:
    assert len(payload) <= MAX_FRAME_BYTES, "nobody would read this frame, nor what follows it"
    return _FRAME.pack(_MAGIC, kind, len(payload), checksum(payload)) + payload


def head(extent_bytes: int) -> bytes:
    """The first frame."""
    return _frame(HEAD, _HEAD.pack(FORMAT_VERSION, extent_bytes))


def opened(spec: NamespaceSpec) -> bytes:
    """Says that blocks of a namespace may follow."""
    return _frame(NAMESPACE, msgspec.json.encode(spec))


def stored(group: GroupKey, records: Sequence[Record]) -> bytes:
    """Says that blocks of a group are there; all have as many checksums."""
    frames = []
    for some in _at_most(records, RECORDS_A_FRAME):
        lines = b"".join(
            b"".join(
                (
                    record.block_hash,
                    record.parent_hash or _ROOT,
                    record.offset.to_bytes(8, "little"),
                    array("Q", record.checksums).tobytes(),
                )
            )
            for record in some
        )
        frames.append(_frame(STORED, _STORED.pack(*group, len(some[0].checksums)) + lines))
    return b"".join(frames)


def removed(offsets: Iterable[int]) -> bytes:
    """Says that nothing is there any more."""
    return b"".join(_frame(REMOVED, some.tobytes()) for some in _at_most(array("Q", offsets), RECORDS_A_FRAME))


def _at_most(items: Items, count: int) -> Iterator[Items]:
    return (items[start : start + count] for start in range(0, len(items), count))


class Inventory:
    """What a journal says that there is.

    One thread applies; others may ask for single records meanwhile.

    Attributes:
        extent_bytes: 0 until the first frame is known.
        specs: by fingerprint.
        groups: of each group its blocks by hash, in the order in which they were stored.
        nbytes: of the journal, as far as it was whole.
        is_exact: whether it says just this: it ends with a whole frame, and nothing was left out of it.
        trouble: why a whole frame was not taken in; empty if there was none such.
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
        """Takes in what is whole and makes sense; returns how many bytes that were."""
        done = 0
        self.trouble = ""
        for kind, payload, ends in _frames(memoryview(text)):
            try:
                self._apply_frame(kind, payload)
            except Exception as error:  # Another version or program wrote it: whatever is wrong, it ends here.
                self.trouble = f"{type(error).__name__}: {error}"
                break
            done = ends
        self.nbytes += done
        self.is_exact = done == len(text)
        return done

    def _apply_frame(self, kind: int, payload: memoryview) -> None:
        """Raises anything, and has changed nothing then."""
        if kind == HEAD:
            version, extent_bytes = _HEAD.unpack(payload)
            if version != FORMAT_VERSION or not 0 < extent_bytes < 1 << 63:
                raise ValueError(f"a journal of version {version} with extents of {extent_bytes} bytes")
            self.extent_bytes = extent_bytes
        elif kind == NAMESPACE:
            spec = msgspec.json.decode(payload, type=NamespaceSpec)
            self.specs[spec.fingerprint()] = spec
        elif kind == STORED:
            self._store(payload)
        elif kind == REMOVED:
            for offset in np.frombuffer(payload, np.uint64).tolist():
                self._remove(offset)

    def only(self, wanted: Callable[[GroupKey, Record], bool]) -> Inventory:
        """Itself, without the blocks that are not wanted."""
        for group, records in self.groups.items():
            for record in [record for record in records.values() if not wanted(group, record)]:
                del records[record.block_hash], self._at[record.offset]
                self.is_exact = False
        return self

    def get(self, group: GroupKey, block_hash: bytes) -> Record | None:
        records = self.groups.get(group)
        return None if records is None else records.get(block_hash)

    def encode(self) -> Iterator[bytes]:
        """A journal that says the same, parents before their children where they were stored so.

        All namespaces are in it, also those without blocks: who appends has told of them, and does not do so again.
        """
        yield head(self.extent_bytes)
        for spec in self.specs.values():
            yield opened(spec)
        for group, records in self.groups.items():
            if records:
                yield stored(group, list(records.values()))

    def _store(self, payload: memoryview) -> None:
        fingerprint, group_idx, num_shards = _STORED.unpack_from(payload)
        spec = self.specs.get(fingerprint)
        if not num_shards or (spec is not None and spec.groups[group_idx].num_shards != num_shards):
            raise ValueError(f"blocks with {num_shards} checksums")
        line = np.dtype(
            [
                ("hash", f"V{HASH_BYTES}"),
                ("parent", f"V{HASH_BYTES}"),
                ("offset", "<u8"),
                ("sums", f"V{8 * num_shards}"),
            ]
        )
        lines = np.frombuffer(payload[_STORED.size :], line)
        group = (fingerprint, group_idx)
        records = self.groups.setdefault(group, {})
        columns = (lines["hash"], lines["parent"], lines["offset"], lines["sums"])
        for block_hash, parent_hash, offset, sums in zip(*(column.tolist() for column in columns), strict=True):
            if offset in self._at:
                self._remove(offset)
            if (old := records.pop(block_hash, None)) is not None:
                del self._at[old.offset]
            parent = b"" if parent_hash == _ROOT else parent_hash
            records[block_hash] = Record(block_hash, parent, offset, array("Q", sums))
            self._at[offset] = (group, block_hash)

    def _remove(self, offset: int) -> None:
        at = self._at.pop(offset, None)
        if at is not None:
            self.groups[at[0]].pop(at[1], None)


def _frames(text: memoryview) -> Iterator[tuple[int, memoryview, int]]:
    """Kind, payload and end of each frame, up to the first that is not whole."""
    at = 0
    while at + _FRAME.size <= len(text):
        magic, kind, nbytes, expected = _FRAME.unpack_from(text, at)
        starts = at + _FRAME.size
        at = starts + nbytes
        if magic != _MAGIC or nbytes > MAX_FRAME_BYTES or at > len(text):
            return
        payload = text[starts:at]
        if checksum(payload) != expected:
            return
        yield kind, payload, at


class Journal:
    """The journal of this server's own directory. Blocking; thread-safe. Every method raises OSError."""

    COMPACT_AT_LEAST = 16 << 20

    def __init__(self, directory: Path, disk: Disk):
        self._path = directory / FILE_NAME
        self._disk = disk
        self._lock = threading.Lock()
        self._fd = -1
        self._nbytes = 0
        self._compact_at = 0

    def load(self) -> Inventory:
        """What there was at the last stop, however it came to that."""
        inventory = Inventory()
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return inventory
        inventory.apply(text)
        return inventory

    def begin(self, inventory: Inventory) -> None:
        """Goes on with a journal of this content."""
        with self._lock:
            if not inventory.nbytes or not inventory.is_exact:
                self._rewrite(inventory)
                return
            self._fd = self._disk.open(self._path, os.O_WRONLY)
            self._nbytes = inventory.nbytes
            self._compact_at = 2 * self._nbytes + self.COMPACT_AT_LEAST

    def append(self, frames: bytes) -> None:
        """Adds frames, all or nothing as far as readers see it."""
        with self._lock:
            self._disk.write(self._fd, [memoryview(frames)], self._nbytes)
            self._nbytes += len(frames)
            if self._nbytes >= self._compact_at:
                try:
                    self._compact()
                except OSError as error:
                    # The frames are written. It goes on growing, and is tried again when it is worth it.
                    self._compact_at = self._nbytes + self.COMPACT_AT_LEAST
                    log.warning("a tier's journal could not be written anew", path=str(self._path), error=str(error))

    def close(self) -> None:
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
                self._disk.remove(fresh)  # It takes room, of which there may be none left.
            raise
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self._nbytes = fd, nbytes
        self._compact_at = 2 * nbytes + self.COMPACT_AT_LEAST
