"""The footer behind a block's bytes in the cluster: which object the bytes belong to, and their checksums.

Mooncake may give memory to another object while a reader reads it; the reader then gets that object's bytes, with
checksums that match. So the footer names its object.

Layout, little-endian: magic (8 bytes), SHA-256 of the key (32), bytes of the block (8), number of chunks (8), then the
xxh3-64 of each chunk (8 each), then, where servers share a secret, the block's tag (`block_mac.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvpool_server.tiers.block_mac import TAG_BYTES, BlockMac
from kvpool_server.tiers.tier import BlockKey, is_sound

MAGIC = b"kvpool\x00\x01"
_HEAD = struct.Struct("<8s32sQQ")


def footer_bytes(num_shards: int, has_tag: bool = False) -> int:
    """Length of a footer."""
    return _HEAD.size + 8 * num_shards + TAG_BYTES * has_tag


def encode_footer(key: str, slot_bytes: int, checksums: Sequence[int], tag: bytes = b"") -> bytes:
    """The footer of a block."""
    head = _HEAD.pack(MAGIC, _digest(key), slot_bytes, len(checksums))
    return head + struct.pack(f"<{len(checksums)}Q", *checksums) + tag


def verify(
    key: str, payload: memoryview, num_shards: int, footer: bytes, name: BlockKey, mac: BlockMac | None
) -> Sequence[int] | None:
    """Checksums of the block's chunks, if all of `payload` is what was stored as `key`; else None.

    Args:
        payload: uint8 [slot_bytes].
        footer: `footer_bytes(num_shards, mac is not None)` bytes.
        name, mac: of the block, and what verifies its tag; None: blocks have no tags.
    """
    if _HEAD.unpack_from(footer) != (MAGIC, _digest(key), payload.nbytes, num_shards):
        return None
    checksums: Sequence[int] = struct.unpack_from(f"<{num_shards}Q", footer, _HEAD.size)
    if mac is not None and not mac.is_valid(name, payload, footer[footer_bytes(num_shards) :]):
        return None
    return checksums if is_sound(payload, checksums) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
