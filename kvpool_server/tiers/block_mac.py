"""Tags that authenticate the bytes of blocks in a tier, for servers that share a secret key.

Checksums find accidents: whoever can write to a disk or to a store can give any bytes the right checksums. A tag cannot
be made without the key, and names its block: bytes of another block, or of another namespace, do not pass either.

A tag is a random nonce and AES-256-GMAC of the block, under a key of the block's own, which BLAKE2b derives from the
servers' key and the block's name. So a nonce would have to repeat for one block to give anything away.

Source: NIST SP 800-38D (GMAC), RFC 7693 (keyed BLAKE2b).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvpool.protocol.errors import ConfigError
from kvpool.security.files import read_private
from kvpool_server.tiers.tier import BlockKey, TierOptions

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = NONCE_BYTES + 16
_PURPOSE = b"kvpool tier tag"


def read_key(path: Path) -> bytes:
    """The key in a file: 64 hexadecimal digits. Raises ConfigError, which does not show the content."""
    try:
        key = bytes.fromhex(read_private(path, "key_file", "key").decode().strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"key_file={path} is no key; write one with: openssl rand -hex {KEY_BYTES}")
    return key


class BlockMac:
    """Makes and verifies tags. Thread-safe."""

    def __init__(self, key: bytes):
        self._key = key

    @classmethod
    def of(cls, options: TierOptions) -> BlockMac | None:
        """With the key of a tier's options; None without a key. Raises ConfigError."""
        return cls(read_key(Path(options.key_file))) if options.key_file else None

    def tag(self, name: BlockKey, payload: memoryview) -> bytes:
        """The tag of a block, uint8 [slot_bytes]: TAG_BYTES long, and another one each time."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher(name).encrypt(nonce, b"", payload)

    def is_valid(self, name: BlockKey, payload: memoryview, tag: bytes) -> bool:
        """Whether a server with this key has made the tag for these bytes of this block."""
        if len(tag) != TAG_BYTES:
            return False
        try:
            self._cipher(name).decrypt(tag[:NONCE_BYTES], tag[NONCE_BYTES:], payload)
        except InvalidTag:
            return False
        return True

    def _cipher(self, name: BlockKey) -> AESGCM:
        fingerprint, group_idx, block_hash = name
        message = b"".join((_PURPOSE, fingerprint, group_idx.to_bytes(4, "little"), block_hash))
        return AESGCM(hashlib.blake2b(message, key=self._key, digest_size=KEY_BYTES).digest())
