"""Block hashes and checksums. Two hashes, two jobs: SHA-256 names content, xxh3 guards payloads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import cbor2
import xxhash

ALGORITHM = "sha256_cbor"
DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed for the first block of every prefix, unless PYTHONHASHSEED is set, which replaces it."""
MAX_LOCKED_BYTES = 64 << 10
"""xxhash sums more bytes than these without Python's lock (the GIL), if they are given to the constructor."""


def sha256_cbor(value: Any) -> bytes:
    """SHA-256 of the canonical CBOR encoding of `value`, 32 bytes."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def block_hashes(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    seed: str = DEFAULT_SEED,
    extra_keys: Sequence[tuple[Any, ...] | None] = (),
) -> list[bytes]:
    """Chained hashes of the full blocks of a token sequence, for clients that are not vLLM: a router, a test.

    They are the names that vLLM computes with `--prefix-caching-hash-algo sha256_cbor`.

    Args:
        token_ids: the tokens; a last, partly filled block has no hash.
        block_tokens: tokens in a block, >= 1.
        seed: as the engine's (see `DEFAULT_SEED`).
        extra_keys: what vLLM folds in beside the tokens (LoRA, multimodal, salt), one a block; missing ones are None.

    Returns:
        One hash of 32 bytes a full block; each folds in all blocks before it.

    Source: vLLM, v1/core/kv_cache_utils.py, `hash_block_tokens`.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    parent = sha256_cbor(seed)
    hashes = []
    for idx in range(len(token_ids) // block_tokens):
        tokens = tuple(token_ids[idx * block_tokens : (idx + 1) * block_tokens])
        extra = extra_keys[idx] if idx < len(extra_keys) else None
        parent = sha256_cbor((parent, tokens, extra))
        hashes.append(parent)
    return hashes


def checksum(payload: Any) -> int:
    """xxh3-64 of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(payload)
