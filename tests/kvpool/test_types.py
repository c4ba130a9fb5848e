from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.types import BlockRun, Located, in_parts, in_two, join_located

HASHES = [bytes([idx]) * 32 for idx in range(256)]


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), count=st.integers(1, 40))
def test_runs_in_two_are_the_same_blocks(lengths: list[int], count: int) -> None:
    starts = [sum(lengths[:nth]) for nth in range(len(lengths))]
    runs = [
        BlockRun(0, HASHES[start : start + length], HASHES[start - 1] if start else b"")
        for start, length in zip(starts, lengths, strict=True)
    ]
    parts = in_two(runs, count)
    sizes = [sum(map(len, part)) for part in parts]
    assert sizes == ([sum(lengths)] if sum(lengths) <= count else [count, sum(lengths) - count])
    blocks = [block_hash for part in parts for run in part for block_hash in run.block_hashes]
    assert blocks == HASHES[: sum(lengths)]
    for run in (run for part in parts for run in part):
        before = HASHES.index(run.block_hashes[0]) - 1
        assert len(run) and run.parent_hash == (HASHES[before] if before >= 0 else b"")


def test_parts_of_an_answer_are_one_that_ends_with_the_first() -> None:
    parts = [Located(500, (True, False), (0,), (7, 8)), Located(400, (True,), (64,), (9, 10))]
    assert join_located(parts) == Located(400, (True, False, True), (0, 64), (7, 8, 9, 10))


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.integers(1, 4))
def test_parts_of_runs_are_the_same_blocks_and_keep_to_the_bounds(
    lengths: list[int], max_blocks: int, max_runs: int
) -> None:
    hashes = iter(range(100))
    runs = [BlockRun(0, [bytes([next(hashes)]) for _ in range(length)], b"p") for length in lengths]
    parts = list(in_parts(runs, max_blocks, max_runs))
    assert all(1 <= sum(map(len, part)) <= max_blocks and len(part) <= max_runs for part in parts)
    before: dict[bytes, bytes] = {}
    for run in runs:
        before.update(zip(run.block_hashes, [b"p", *run.block_hashes], strict=False))
    found = [piece for part in parts for piece in part]
    assert [name for piece in found for name in piece.block_hashes] == [n for run in runs for n in run.block_hashes]
    assert all(piece.parent_hash == before[piece.block_hashes[0]] for piece in found)
