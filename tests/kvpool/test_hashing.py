import hashlib

import pytest

from kvpool.protocol.hashing import DEFAULT_SEED, block_hashes, checksum, sha256_cbor

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
