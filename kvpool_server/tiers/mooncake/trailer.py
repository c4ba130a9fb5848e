"""What lies behind a block's bytes in the cluster: whose bytes they are, and how to tell that they still are.

Mooncake gives memory to other objects while somebody may be reading it, and then a reader gets another object's bytes,
all of them right for that one. So the trailer names its object.

Layout, little-endian: magic (8 bytes), SHA-256 of the key (32), bytes of the block (8), number of chunks (8), then the
xxh3-64 of each chunk (8 each).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvpool.hashing import checksum

MAGIC = b"kvpool\x00\x01"
_HEAD = struct.Struct("<8s32sQQ")


def trailer_bytes(num_shards: int) -> int:
    """Length of a trailer."""
    return _HEAD.size + 8 * num_shards


def pack(key: str, slot_bytes: int, checksums: Sequence[int]) -> bytes:
    """The trailer of a block."""
    head = _HEAD.pack(MAGIC, _digest(key), slot_bytes, len(checksums))
    return head + struct.pack(f"<{len(checksums)}Q", *checksums)


def verify(key: str, payload: memoryview, num_shards: int, trailer: bytes) -> Sequence[int] | None:
    """Checksums of the block's chunks, if all of `payload` is what was stored as `key`; else None.

    Args:
        payload: uint8 [slot_bytes].
        trailer: `trailer_bytes(num_shards)` bytes.
    """
    if _HEAD.unpack_from(trailer) != (MAGIC, _digest(key), payload.nbytes, num_shards):
        return None
    checksums: Sequence[int] = struct.unpack_from(f"<{num_shards}Q", trailer, _HEAD.size)
    size = payload.nbytes // num_shards
    for shard, expected in enumerate(checksums):
        if checksum(payload[shard * size : (shard + 1) * size]) != expected:
            return None
    return checksums


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
