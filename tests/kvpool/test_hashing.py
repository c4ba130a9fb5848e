import hashlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.hashing import DEFAULT_SEED, MAX_LOCKED_BYTES, block_hashes, checksum, sha256_cbor
from kvpool.transport.chunk_sums import ChunkSums, sums_of

GOLDEN = [
    "34a0f2f90671cd97c20c1bb8463391c24d8456547af0bd1bebf0d48bff335e7e",
    "0edba80b0a0357373377b649168b4399c52ee0ee8860ed67813440980284124e",
]
GOLDEN_SEED = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
GOLDEN_CHECKSUM = 0x6B53AE1A40132E83


def _cbor_of_block(parent: bytes, tokens: bytes) -> bytes:
    # Canonical CBOR by hand (RFC 8949): array(3), bytes(32), array of integers below 24, null.
    assert len(parent) == 32 and len(tokens) < 24 and max(tokens) < 24
    return b"\x83\x58\x20" + parent + bytes([0x80 | len(tokens)]) + tokens + b"\xf6"


def test_blocks_are_named_by_the_sha256_of_their_canonical_cbor() -> None:
    seed = hashlib.sha256(bytes([0x60 | len(DEFAULT_SEED)]) + DEFAULT_SEED.encode()).digest()
    first = hashlib.sha256(_cbor_of_block(seed, bytes([1, 2, 3, 4]))).digest()
    second = hashlib.sha256(_cbor_of_block(first, bytes([5, 6, 7, 8]))).digest()
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4) == [first, second]


def test_golden_values() -> None:
    hashes = block_hashes(range(1000, 1032), 16, seed="0", extra_keys=[("lora-1", 7)])
    assert [value.hex() for value in hashes] == GOLDEN
    assert sha256_cbor("0").hex() == GOLDEN_SEED
    assert checksum(b"") == 0x2D06800538D394C2  # From the xxHash reference implementation.
    assert checksum(b"kvpool") == GOLDEN_CHECKSUM


def test_a_partial_block_has_no_hash_and_a_block_has_a_token() -> None:
    with pytest.raises(ValueError, match="block_tokens must be at least 1, got 0"):
        block_hashes([1], 0)
    assert block_hashes([1, 2, 3], 4) == []
    assert block_hashes([1, 2, 3, 4, 5], 4) == block_hashes([1, 2, 3, 4], 4)


def test_the_seed_and_the_extra_keys_are_part_of_the_name() -> None:
    plain = block_hashes([1, 2, 3, 4], 2)
    assert block_hashes([1, 2, 3, 4], 2, seed="1")[0] != plain[0]
    salted = block_hashes([1, 2, 3, 4], 2, extra_keys=[None, ("salt",)])
    assert salted[0] == plain[0] and salted[1] != plain[1]


@given(
    num_chunks=st.integers(1, 4),
    chunk_bytes=st.sampled_from([1, 1_000, MAX_LOCKED_BYTES, MAX_LOCKED_BYTES + 1, 100_001]),
    cuts=st.lists(st.floats(0, 1), max_size=6),
)
def test_chunks_have_the_same_sums_in_whatever_pieces_they_lie(
    num_chunks: int, chunk_bytes: int, cuts: list[float]
) -> None:
    whole = np.random.default_rng(num_chunks).integers(0, 256, num_chunks * chunk_bytes, np.uint8)
    pieces = np.split(whole, sorted(int(cut * len(whole)) for cut in cuts))
    assert sums_of(pieces, chunk_bytes) == [checksum(chunk) for chunk in whole.reshape(-1, chunk_bytes)]


@given(order=st.permutations(range(6)), theirs=st.sets(st.integers(0, 5)), first_sum=st.integers(0, (1 << 64) - 12))
def test_sums_are_in_the_order_of_the_regions(order: list[int], theirs: set[int], first_sum: int) -> None:
    """Whoever computed them, and whenever."""
    rows = np.random.default_rng(6).integers(0, 256, (6, 2_000), np.uint8)
    sums = ChunkSums(6, 2_000, 1_000)
    expected = [checksum(chunk) for chunk in rows.reshape(-1, 1_000)]
    for idx in order:
        if idx in theirs:
            expected[2 * idx : 2 * idx + 2] = [first_sum + idx, first_sum + idx + 6]
            sums.add_later(idx, partial(list, expected[2 * idx : 2 * idx + 2]))
        else:
            sums.add(idx, [[rows[idx]]])
    assert sums.all() == expected
