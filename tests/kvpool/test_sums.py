from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.block_io import ChunkSums, sums_of
from kvpool.protocol.hashing import MAX_LOCKED_BYTES, checksum


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
