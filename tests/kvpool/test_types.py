import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol import types
from kvpool.protocol.types import BlockRun, Located, in_parts, join_located


def test_parts_of_an_answer_are_one_that_ends_with_the_first() -> None:
    parts = [Located(500, (True, False), (0,), (7, 8)), Located(400, (True,), (64,), (9, 10))]
    assert join_located(parts) == Located(400, (True, False, True), (0, 64), (7, 8, 9, 10))


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.integers(1, 4))
def test_parts_of_runs_are_the_same_blocks_and_keep_to_the_bounds(
    lengths: list[int], max_blocks: int, max_runs: int
) -> None:
    hashes = iter(range(100))
    runs = [BlockRun(0, [bytes([next(hashes)]) for _ in range(length)], b"p") for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(types, "MAX_RUNS", max_runs)
        parts = list(in_parts(runs, max_blocks))
    assert all(1 <= sum(map(len, part)) <= max_blocks and len(part) <= max_runs for part in parts)
    before: dict[bytes, bytes] = {}
    for run in runs:
        before.update(zip(run.block_hashes, [b"p", *run.block_hashes], strict=False))
    found = [piece for part in parts for piece in part]
    assert [name for piece in found for name in piece.block_hashes] == [n for run in runs for n in run.block_hashes]
    assert all(piece.parent_hash == before[piece.block_hashes[0]] for piece in found)
