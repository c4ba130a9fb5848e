"""What the sides tell each other: cutting and adding up."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, LeasedSlots, Slots
from tests.support.values import block_hash, group_spec
from vllm_plugin.metadata import ConnectorMetadata, GroupBlocks, Handshake, LoadJob, StoreJob, WorkerMetadata


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
    pieces = list(part.pieces(max_blocks))
    sizes = [sum(map(len, runs)) for _, runs in pieces]
    assert [start for start, _ in pieces] == [sum(sizes[:nth]) for nth in range(len(sizes))]
    assert set(sizes[:-1]) <= {max_blocks} and 0 < sizes[-1] <= max_blocks
    assert sum(sizes) == len(part) == sum(lengths)
    # Every block has the name, the group and the parent that it has in the whole.
    parents = {}
    for run in part.runs:
        parents.update(zip(run.block_hashes, [run.parent_hash, *run.block_hashes], strict=False))
    cut = [run for _, runs in pieces for run in runs]
    assert all(len(run) and run.group_idx == 3 for run in cut)
    assert [name for run in cut for name in run.block_hashes] == [
        name for run in part.runs for name in run.block_hashes
    ]
    assert all(run.parent_hash == parents[run.block_hashes[0]] for run in cut)


def test_metadata_survives_the_way_between_processes() -> None:
    part = blocks_of(2, 1, tables=2)
    leased = LeasedSlots(Slots(bytes(24), bytes(48), b"permit"), b"f" * 32, 3, 4.5, 1, 3)
    loaded = dataclasses.replace(part, leased=(leased, None))
    there = ConnectorMetadata([LoadJob("r", (7, 8), [loaded], clock="c")], [StoreJob(1, [part])])
    assert pickle.loads(pickle.dumps(there)) == there
    back = WorkerMetadata({1: 1}, {1})
    assert pickle.loads(pickle.dumps(back)) == back
    handshake = Handshake(NamespaceSpec("model", (group_spec(),)))
    assert pickle.loads(pickle.dumps(handshake)) == handshake


def test_reports_of_ranks_add_up() -> None:
    first, second = WorkerMetadata({1: 1, 2: 1}, {2}), WorkerMetadata({2: 1, 3: 1}, {3})
    assert first.aggregate(second) == WorkerMetadata({1: 1, 2: 2, 3: 1}, {2, 3})
    one, other = WorkerMetadata(unserved_loads={"a"}), WorkerMetadata(unserved_loads={"b"})
    assert one.aggregate(other).unserved_loads == {"a", "b"}
    assert first == WorkerMetadata({1: 1, 2: 1}, {2}), "its own report is left as it was"
