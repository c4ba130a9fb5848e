"""The frames of a journal, which says of a file tier which block lies where, with its checksums.

frame       MAGIC, kind, nbytes, xxh3-64 of the payload; the payload
HEAD        of the journal: format version (2 if blocks have tags) and bytes of an extent, uint64 each
NAMESPACE   its spec, as JSON
STORED      fingerprint, group, number of shards; blocks: hash, parent's hash, offset, xxh3-64 of each shard, tag
REMOVED     offsets of slots, uint64 each
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.namespace import MAX_SHARDS, NamespaceSpec
from kvpool.protocol.types import HASH_BYTES
from kvpool_server.cache.entry import Record

FORMAT_VERSION, TAGGED_VERSION = 1, 2
"""A journal without and with the blocks' tags (`block_mac.py`)."""
MAX_FRAME_BYTES = 4 << 20
"""No reader accepts a longer frame. RECORDS_A_FRAME blocks of MAX_SHARDS shards take 2.3 MiB."""
MAX_NAMESPACE_BYTES = 1 << 20
RECORDS_A_FRAME = 4096
HEAD, NAMESPACE, STORED, REMOVED = range(1, 5)

_MAGIC = b"kvptier\n"
_FRAME = struct.Struct("<8sIIQ")
_HEAD = struct.Struct("<QQ")
_STORED = struct.Struct(f"<{HASH_BYTES}sII")
_ROOT = bytes(HASH_BYTES)

GroupKey = tuple[bytes, int]
"""(fingerprint, group_idx)"""
Items = TypeVar("Items", Sequence[Record], "array[int]")


def encode_frame(kind: int, payload: bytes) -> bytes:
    """One frame of any payload."""
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


def decode_head(payload: memoryview, expected: int) -> int:
    """Bytes of an extent. Raises ValueError for a journal of another version than `expected`."""
    version, extent_bytes = _HEAD.unpack(payload)
    if version != expected or not 0 < extent_bytes < 1 << 63:
        raise ValueError(f"a journal of version {version} with extents of {extent_bytes} bytes")
    return int(extent_bytes)


def decode_namespace(payload: memoryview) -> NamespaceSpec:
    """The spec. Raises msgspec.DecodeError or InvalidRequestError."""
    if len(payload) > MAX_NAMESPACE_BYTES:
        raise InvalidRequestError(f"a namespace's spec of {len(payload)} bytes")
    spec = msgspec.json.decode(payload, type=NamespaceSpec)
    spec.check()
    encode_namespace(spec)  # Fields that the payload leaves to their defaults may make it longer.
    return spec


def decode_stored(payload: memoryview, tag_bytes: int) -> tuple[GroupKey, int, int, Iterator[Record]]:
    """A group, its number of shards, the number of its blocks, and the blocks. Raises ValueError or struct.error."""
    fingerprint, group_idx, num_shards = _STORED.unpack_from(payload)
    if not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"blocks with {num_shards} checksums")
    lines = np.frombuffer(payload[_STORED.size :], _row(num_shards, tag_bytes))
    columns = (lines[name].tolist() for name in lines.dtype.names or ())
    records = (
        Record(block_hash, b"" if parent_hash == _ROOT else parent_hash, offset, array("Q", sums), tag)
        for block_hash, parent_hash, offset, sums, tag in zip(*columns, strict=True)
    )
    return (fingerprint, group_idx), num_shards, lines.size, records


def decode_removed(payload: memoryview) -> array[int]:
    """Offsets of slots. Raises ValueError."""
    return array("Q", payload.tobytes())


def is_start_of_journal(file: BinaryIO) -> bool:
    """True if a file is empty, or begins as a journal of any version does. Raises OSError."""
    start = file.read(_FRAME.size)
    if len(start) < _FRAME.size:
        return not start
    magic, kind, *_ = _FRAME.unpack(start)
    return bool(magic == _MAGIC and kind == HEAD)
