"""Blocks as objects in the cluster: a key, their bytes and a footer; written and read through the staging memory.

Mooncake may give memory to another object while a reader reads it; the reader then gets that object's bytes, with
checksums that match. So the footer says which object the bytes belong to.

Layout of a footer, little-endian: magic (8 bytes), SHA-256 of the key (32), bytes of the block (8), number of chunks
(8), then the xxh3-64 of each chunk (8 each), then, where servers share a secret, the block's tag (`block_mac.py`).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence

import numpy as np

from kvpool_server.tiers.block_mac import TAG_BYTES, BlockMac
from kvpool_server.tiers.mooncake.store_process import StoreChannel
from kvpool_server.tiers.tier import Block, BlockKey, is_sound

TOO_SMALL = -600
"""Mooncake's code: the object is larger than the buffer."""
MAGIC = b"kvpool\x00\x01"
_HEAD = struct.Struct("<8s32sQQ")


def object_key(block: BlockKey) -> str:
    """The key of a block's object: `kvpool/<fingerprint>/<group_idx>/<block hash>`, in hex."""
    fingerprint, group_idx, block_hash = block
    return f"kvpool/{fingerprint.hex()}/{group_idx}/{block_hash.hex()}"


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
    """
    if _HEAD.unpack_from(footer) != (MAGIC, _digest(key), payload.nbytes, num_shards):
        return None
    checksums: Sequence[int] = struct.unpack_from(f"<{num_shards}Q", footer, _HEAD.size)
    if mac is not None and not mac.is_valid(name, payload, footer[footer_bytes(num_shards) :]):
        return None
    return checksums if is_sound(payload, checksums) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def put_blocks(
    names: Sequence[BlockKey], blocks: Sequence[Block], mac: BlockMac | None, channel: StoreChannel
) -> list[int]:
    """Copies blocks to the staging memory, and puts them; Mooncake's codes. Raises StoreError."""
    keys = list(map(object_key, names))
    nbytes = blocks[0].payload.nbytes
    size = nbytes + footer_bytes(len(blocks[0].checksums), mac is not None)
    for nth, (key, name, block) in enumerate(zip(keys, names, blocks, strict=True)):
        staged = channel.memory[nth * size : (nth + 1) * size]
        staged[:nbytes] = np.frombuffer(block.payload, np.uint8)
        tag = b"" if mac is None else mac.tag(name, block.payload)
        staged[nbytes:] = np.frombuffer(encode_footer(key, nbytes, block.checksums, tag), np.uint8)
    return channel.call("put", keys, size)


class StagedRead:
    """One read of several objects. The loop creates and cancels it; a thread of the tier copies.

    Args:
        views: where each block of `names` goes: uint8 [slot_bytes], `num_shards` chunks.

    Attributes:
        found: for each block the checksums of its chunks, None until the block has been copied and verified.
        corrupt: keys of objects that are not what was stored.
    """

    def __init__(self, names: Sequence[BlockKey], views: Sequence[memoryview], num_shards: int, mac: BlockMac | None):
        self.found: list[Sequence[int] | None] = [None] * len(names)
        self.corrupt: list[str] = []
        self._keys = list(map(object_key, names))
        self._names = names
        self._views = views
        self._num_shards = num_shards
        self._mac = mac
        self._lock = threading.Lock()
        self._is_cancelled = False

    def run(self, channel: StoreChannel) -> list[int]:
        """Gets the objects, and copies and verifies each; Mooncake's codes. Raises StoreError."""
        size = self._views[0].nbytes + footer_bytes(self._num_shards, self._mac is not None)
        codes = channel.call("get", self._keys, size)
        for nth, code in enumerate(codes):
            if code == size:
                self._copy(nth, channel.memory[nth * size : (nth + 1) * size])
            elif code >= 0 or code == TOO_SMALL:
                self.corrupt.append(self._keys[nth])
        return codes

    def _copy(self, nth: int, staged: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Copies one object, then verifies the copy: the staging memory may still change."""
        view = self._views[nth]
        with self._lock:
            if self._is_cancelled:
                return
            np.frombuffer(view, np.uint8)[:] = staged[: view.nbytes]
            footer = staged[view.nbytes :].tobytes()
            self.found[nth] = verify(self._keys[nth], view, self._num_shards, footer, self._names[nth], self._mac)
        if self.found[nth] is None:
            self.corrupt.append(self._keys[nth])

    def cancel(self) -> None:
        """No view is written from now on. Idempotent."""
        with self._lock:
            self._is_cancelled = True
