"""The key by which engines of a tenant name blocks, so that nobody else can test guesses of prompts.

A block hash is a public function of a prompt's tokens. A server or a neighbour that sees block hashes, or looks them
up, can hash guessed prompts and compare. With a key, BLAKE2b-256(key, block hash) takes the place of each block hash on
the wire, and the namespace has a digest of the key: engines without the key, or with another one, use other namespaces.

Source: RFC 7693, keyed hashing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import time
from dataclasses import replace
from pathlib import Path

from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import HASH_BYTES, BlockRun
from kvpool.security.files import read_private, write_new

KEY_BYTES = 32
FIELD = "name_key"
"""Key of the digest in `NamespaceSpec.extra`."""
NAMES_PER_TURN = 256
"""About 0.1 ms."""


class NameKey:
    """Names blocks. Thread-safe.

    Args:
        key: `KEY_BYTES` random bytes.

    Attributes:
        digest: names the key, hexadecimal; it tells nothing of the key, nor of the names.
    """

    def __init__(self, key: bytes):
        if len(key) != KEY_BYTES:
            raise InvalidRequestError(f"a key of {len(key)} bytes; give {KEY_BYTES} random bytes")
        self._keyed = hashlib.blake2b(key=key, digest_size=HASH_BYTES)
        self.digest = hashlib.blake2b(b"namespace", key=key, digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"NameKey({self.digest})"

    @classmethod
    def read(cls, path: Path) -> NameKey:
        """With the key in a file, as `create` writes it, or in base64. Raises ConfigError, which does not show it."""
        text = read_private(path, "name_key_file (--name-key-file)").decode(errors="replace").strip()
        try:
            is_hexadecimal = re.fullmatch("[0-9a-fA-F]{64}", text)
            return cls(bytes.fromhex(text) if is_hexadecimal else base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error, InvalidRequestError):
            raise ConfigError(
                f"{path} holds no key of {KEY_BYTES} bytes as hexadecimal digits or base64; make one with "
                "`kvpool name-key create FILE`"
            ) from None

    @classmethod
    def create(cls, path: Path) -> NameKey:
        """A new key, in a new file that only its owner can read. Raises ConfigError if there is such a file."""
        write_new(path, secrets.token_hex(KEY_BYTES) + "\n")
        return cls.read(path)

    def name(self, block_hash: bytes) -> bytes:
        """The name of a block on the wire, `HASH_BYTES`."""
        keyed = self._keyed.copy()  # Cheaper than to begin with the key again.
        keyed.update(block_hash)
        return keyed.digest()

    def run(self, run: BlockRun) -> BlockRun:
        """The same blocks under their names on the wire."""
        names: list[bytes] = []
        for at in range(0, len(run), NAMES_PER_TURN):
            names += map(self.name, run.block_hashes[at : at + NAMES_PER_TURN])
            time.sleep(0)  # Passes Python's lock on: an engine's scheduler would wait for all names of a long prompt.
        return BlockRun(run.group_idx, names, self.name(run.parent_hash) if run.parent_hash else b"")


def named_by(spec: NamespaceSpec, key: NameKey | None) -> NamespaceSpec:
    """The namespace in which `key` names the blocks; None: their hashes do."""
    extra = {**dict(spec.extra), FIELD: key.digest if key else ""}
    return replace(spec, extra=tuple((name, value) for name, value in extra.items() if value or name != FIELD))


def check_key(spec: NamespaceSpec, key: NameKey | None) -> None:
    """Raises InvalidRequestError if a namespace's blocks are named by another key than `key`."""
    wanted = dict(spec.extra).get(FIELD)
    if wanted and (key is None or key.digest != wanted):
        have = f"has the key {key.digest}" if key else "has no key"
        raise InvalidRequestError(
            f"the namespace's blocks are named by the key {wanted}, and this client {have}; give the file of that key "
            "as name_key_file"
        )
