"""What the sides tell each other: cutting and adding up."""

from __future__ import annotations

import itertools
import pickle

from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.types import BlockRun
from tests.support.values import block_hash
from vllm_plugin.metadata import GroupBlocks, WorkerMetadata


def blocks_of(*lengths: int, tables: int = 1) -> GroupBlocks:
    """Stretches of one prefix, with gaps between them."""
    names = itertools.count()
    runs = []
    for length in lengths:
        parent = next(names)
        hashes = [block_hash(next(names)) for _ in range(length)]
        runs.append(BlockRun(3, hashes, block_hash(parent) if parent else b""))
    total = sum(lengths)
    return GroupBlocks(3, runs, [list(range(at * total, (at + 1) * total)) for at in range(tables)])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 3))
def test_pieces_follow_each_other_without_gap_or_overlap(lengths: list[int], max_blocks: int, tables: int) -> None:
    part = blocks_of(*lengths, tables=tables)
    assert pickle.loads(pickle.dumps(part)) == part, "the way between processes changes blocks"
    pieces = list(part.pieces(max_blocks))
    sizes = [sum(map(len, runs)) for _, runs in pieces]
    assert [start for start, _ in pieces] == [sum(sizes[:nth]) for nth in range(len(sizes))]
    assert set(sizes[:-1]) <= {max_blocks} and 0 < sizes[-1] <= max_blocks
    assert sum(sizes) == len(part) == sum(lengths)
    # Every block has the name, the group and the parent that it has in the whole.
    cut = [each for _, runs in pieces for run in runs for each in named(run)]
    assert cut == [each for run in part.runs for each in named(run)]


def named(run: BlockRun) -> list[tuple[int, bytes, bytes]]:
    """Of each block the group, the name and the parent's name."""
    parents = [run.parent_hash, *run.block_hashes]
    return [(run.group_idx, *pair) for pair in zip(run.block_hashes, parents, strict=False)]


def test_reports_of_ranks_add_up() -> None:
    first, second = WorkerMetadata({1: 1, 2: 1}, {2}), WorkerMetadata({2: 1, 3: 1}, {3})
    assert first.aggregate(second) == WorkerMetadata({1: 1, 2: 2, 3: 1}, {2, 3})
    one, other = WorkerMetadata(unserved_loads={"a"}), WorkerMetadata(unserved_loads={"b"})
    assert one.aggregate(other).unserved_loads == {"a", "b"}
    assert first == WorkerMetadata({1: 1, 2: 1}, {2}), "its own report is left as it was"
