"""The footer behind a block's bytes in the cluster: which object the bytes belong to, and their checksums.

Mooncake may give memory to another object while a reader reads it; the reader then gets that object's bytes, with
checksums that match. So the footer names its object.

Layout, little-endian: magic (8 bytes), SHA-256 of the key (32), bytes of the block (8), number of chunks (8), then the
xxh3-64 of each chunk (8 each).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvpool_server.tiers.tier import is_sound

MAGIC = b"kvpool\x00\x01"
_HEAD = struct.Struct("<8s32sQQ")


def footer_bytes(num_shards: int) -> int:
    """Length of a footer."""
    return _HEAD.size + 8 * num_shards


def encode_footer(key: str, slot_bytes: int, checksums: Sequence[int]) -> bytes:
    """The footer of a block."""
    head = _HEAD.pack(MAGIC, _digest(key), slot_bytes, len(checksums))
    return head + struct.pack(f"<{len(checksums)}Q", *checksums)


def verify(key: str, payload: memoryview, num_shards: int, footer: bytes) -> Sequence[int] | None:
    """Checksums of the block's chunks, if all of `payload` is what was stored as `key`; else None.

    Args:
        payload: uint8 [slot_bytes].
        footer: `footer_bytes(num_shards)` bytes.
    """
    if _HEAD.unpack_from(footer) != (MAGIC, _digest(key), payload.nbytes, num_shards):
        return None
    checksums: Sequence[int] = struct.unpack_from(f"<{num_shards}Q", footer, _HEAD.size)
    return checksums if is_sound(payload, checksums) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
