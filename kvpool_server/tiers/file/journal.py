"""The journal of a file tier: which block lies where, with its checksums; its frames, and what a reader makes of them.

frame       MAGIC, kind, nbytes, xxh3-64 of the payload; the payload
HEAD        of the journal: format version (2 if blocks have tags) and bytes of an extent, uint64 each
NAMESPACE   its spec, as JSON
STORED      fingerprint, group, number of shards; blocks: hash, parent's hash, offset, xxh3-64 of each shard, tag
REMOVED     offsets of slots, uint64 each

The directory's owner appends frames (`own_blocks.py`) and reads them at its start; other servers read at any time.
Nothing is flushed to the disk: the journal ends at a frame that is torn, or missing after a power cut, or invalid. It
may be older or newer than the bytes in the slots; every reader of a slot compares checksums, so a wrong line costs a
miss.

Whoever can write the file decides its content: a reader bounds the bytes of a frame, of the file, and of the memory
that the blocks take, and ends the journal where a bound is reached.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import HASH_BYTES
from kvpool_server.cache.entry import Record
from kvpool_server.tiers.block_mac import TAG_BYTES

FILE_NAME = "journal"
FORMAT_VERSION, TAGGED_VERSION = 1, 2
"""A journal without and with the blocks' tags (`block_mac.py`)."""
HEAD, NAMESPACE, STORED, REMOVED = range(1, 5)
RECORDS_A_FRAME = 4096
MAX_NAMESPACE_BYTES = 1 << 20
MAX_FRAME_BYTES = 4 << 20
"""No reader accepts a longer frame. RECORDS_A_FRAME blocks of MAX_SHARDS shards take 2.3 MiB."""
MAX_JOURNAL_BYTES = 16 << 30
"""What a file has behind these is not read."""
READ_BYTES = MAX_FRAME_BYTES + 4096
"""Bytes that are read at once: a piece that begins with a frame has all of it."""
RECORD_BYTES, CHECKSUM_BYTES, TAG_OBJECT_BYTES = 520, 8, 64
"""Memory of a block without its tag, of each of its checksums, and of its tag."""
GROUP_BYTES, NAMESPACE_BYTES, SPEC_FACTOR = 512, 2048, 20
"""Memory of a group and of a namespace, and at most so many times the bytes of a spec's JSON."""
MAX_HIDDEN = 65_536

_MAGIC = b"kvptier\n"
_FRAME = struct.Struct("<8sIIQ")
_HEAD = struct.Struct("<QQ")
_STORED = struct.Struct(f"<{HASH_BYTES}sII")
_ROOT = bytes(HASH_BYTES)

GroupKey = tuple[bytes, int]
"""(fingerprint, group_idx)"""
Items = TypeVar("Items", Sequence[Record], "array[int]")


def encode_frame(kind: int, payload: bytes) -> bytes:
    """One frame."""
    assert len(payload) <= MAX_FRAME_BYTES, "no reader accepts this frame, nor any frame behind it"
    return _FRAME.pack(_MAGIC, kind, len(payload), checksum(payload)) + payload


def encode_head(extent_bytes: int, version: int = FORMAT_VERSION) -> bytes:
    """The first frame."""
    return encode_frame(HEAD, _HEAD.pack(version, extent_bytes))


def encode_namespace(spec: NamespaceSpec) -> bytes:
    """A namespace, of which blocks may follow. Raises InvalidRequestError if no reader would accept the spec."""
    payload = msgspec.json.encode(spec)
    if len(payload) > MAX_NAMESPACE_BYTES:
        raise InvalidRequestError(f"a namespace's spec of {len(payload)} bytes; a tier takes {MAX_NAMESPACE_BYTES}")
    return encode_frame(NAMESPACE, payload)


def encode_stored(group: GroupKey, records: Sequence[Record]) -> bytes:
    """Blocks of a group that are stored; all have the same number of checksums, and a tag or none."""
    frames = []
    for some in _at_most(records, RECORDS_A_FRAME):
        rows = [
            (hash_, parent_hash or _ROOT, offset, array("Q", sums).tobytes(), tag)
            for hash_, parent_hash, offset, sums, tag in some
        ]
        num_shards = len(some[0].checksums)
        lines = np.array(rows, _row(num_shards, len(some[0].tag))).tobytes()
        frames.append(encode_frame(STORED, _STORED.pack(*group, num_shards) + lines))
    return b"".join(frames)


def encode_removed(offsets: Iterable[int]) -> bytes:
    """Slots that are empty."""
    return b"".join(encode_frame(REMOVED, some.tobytes()) for some in _at_most(array("Q", offsets), RECORDS_A_FRAME))


def _at_most(items: Items, count: int) -> Iterator[Items]:
    return (items[start : start + count] for start in range(0, len(items), count))


def _row(num_shards: int, tag_bytes: int) -> np.dtype[Any]:
    """A block in a frame of stored blocks."""
    name, sums, tag = f"V{HASH_BYTES}", f"V{8 * num_shards}", f"V{tag_bytes}"
    return np.dtype([("hash", name), ("parent", name), ("offset", "<u8"), ("sums", sums), ("tag", tag)])


def decode_frames(text: memoryview) -> Iterator[tuple[int, memoryview, int]]:
    """The kind, the payload and the end of each frame, up to the first that is torn or has a wrong checksum."""
    at = 0
    while at + _FRAME.size <= len(text):
        magic, kind, nbytes, expected = _FRAME.unpack_from(text, at)
        start = at + _FRAME.size
        at = start + nbytes
        if magic != _MAGIC or nbytes > MAX_FRAME_BYTES or at > len(text):
            return
        payload = text[start:at]
        if checksum(payload) != expected:
            return
        yield kind, payload, at


def decode_namespace(payload: memoryview) -> NamespaceSpec:
    """The spec. Raises msgspec.DecodeError or InvalidRequestError."""
    if len(payload) > MAX_NAMESPACE_BYTES:
        raise InvalidRequestError(f"a namespace's spec of {len(payload)} bytes")
    spec = msgspec.json.decode(payload, type=NamespaceSpec)
    spec.check()
    encode_namespace(spec)  # Fields that the payload leaves to their defaults may make it longer.
    return spec


def is_start_of_journal(file: BinaryIO) -> bool:
    """True if a file is empty, or begins as a journal of any version does. Raises OSError."""
    start = file.read(_FRAME.size)
    if len(start) < _FRAME.size:
        return not start
    magic, kind, *_ = _FRAME.unpack(start)
    return bool(magic == _MAGIC and kind == HEAD)


class JournalTooLargeError(Exception):
    """A journal lists more than its reader may keep in memory."""


class Inventory:
    """The blocks that a journal lists. One thread applies frames; another may `get` and `hide` records meanwhile.

    Args:
        max_memory_bytes: a frame whose blocks would take more memory is refused.
        has_tags: whether the blocks have tags; a journal of blocks with or without is none for the other.

    Attributes:
        memory_bytes: estimate of what the blocks and namespaces take.
        extent_bytes: 0 until the first frame is known.
        specs: by fingerprint.
        groups: the blocks of each group by hash, in the order in which they were stored.
        nbytes: of the journal, up to the end of the last frame that was applied.
        is_exact: True if the journal lists these blocks and nothing else, and ends with a whole frame.
        trouble: why a whole frame was not applied; empty if none was refused.
    """

    def __init__(self, max_memory_bytes: int = sys.maxsize, *, has_tags: bool = False) -> None:
        self._version = TAGGED_VERSION if has_tags else FORMAT_VERSION
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
        for kind, payload, end in decode_frames(memoryview(text)):
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
        if kind == HEAD:
            version, extent_bytes = _HEAD.unpack(payload)
            if version != self._version or not 0 < extent_bytes < 1 << 63:
                raise ValueError(f"a journal of version {version} with extents of {extent_bytes} bytes")
            self.extent_bytes = extent_bytes
        elif kind == NAMESPACE:
            spec = decode_namespace(payload)
            if (fingerprint := spec.fingerprint()) not in self.specs:
                self._take_memory(NAMESPACE_BYTES + SPEC_FACTOR * len(payload))
            self.specs[fingerprint] = spec
        elif kind == STORED:
            self._store(payload)
        elif kind == REMOVED:
            for offset in array("Q", payload.tobytes()):
                self._remove(offset)

    def _store(self, payload: memoryview) -> None:
        fingerprint, group_idx, num_shards = _STORED.unpack_from(payload)
        if self.specs[fingerprint].groups[group_idx].num_shards != num_shards:
            raise ValueError(f"blocks with {num_shards} checksums")
        lines = np.frombuffer(payload[_STORED.size :], _row(num_shards, self._tag_bytes))
        group = fingerprint, group_idx
        self._take_memory(lines.size * self._record_bytes(num_shards) + GROUP_BYTES * (group not in self.groups))
        records = self.groups.setdefault(group, {})
        columns = (lines[name].tolist() for name in lines.dtype.names or ())
        for block_hash, parent_hash, offset, sums, tag in zip(*columns, strict=True):
            if offset in self._at:
                self._remove(offset)
            if (old := records.pop(block_hash, None)) is not None:
                self._forget(old)
            parent_hash = b"" if parent_hash == _ROOT else parent_hash
            records[block_hash] = Record(block_hash, parent_hash, offset, array("Q", sums), tag)
            self._at[offset] = (group, block_hash)

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
        yield encode_head(self.extent_bytes, self._version)
        for spec in self.specs.values():
            yield encode_namespace(spec)
        for group, records in self.groups.items():
            if records:
                yield encode_stored(group, list(records.values()))


MakeInventory = Callable[[], Inventory]
"""Makes an inventory of a server's kind and bounds, without blocks."""
