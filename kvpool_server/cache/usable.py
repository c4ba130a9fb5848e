"""How much of a prefix an engine could resume, from the blocks that each group of a model has.

A hit ends at a boundary: a number of tokens at which every group has the blocks that a hit needs. The rule of a kind is
`GroupSpec.hit_blocks`. A kind whose rule the server does not know needs all blocks of the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.protocol.namespace import GroupSpec
from kvpool.protocol.types import BlockRun, RunHits

Ints = npt.NDArray[np.int64]


def usable_tokens(groups: Sequence[GroupSpec], runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> int:
    """The longest usable prefix; 0 if a group has no run.

    Args:
        groups: all of a namespace.
        runs: of one prompt, from its first token on; of several runs of a group the first counts.
        hits: one a run, with the bitmap of all complete blocks.
    """
    found = {run.group_idx: (len(run), hit) for run, hit in reversed(list(zip(runs, hits, strict=True)))}
    if len(found) < len(groups):
        return 0
    alignment = math.lcm(*(group.block_tokens for group in groups))
    most = min(found[idx][0] * group.block_tokens for idx, group in enumerate(groups))
    for idx, group in enumerate(groups):
        if not group.hit_blocks:
            most = min(most, found[idx][1].num_leading * group.block_tokens)
    boundaries = np.arange(most // alignment * alignment, 0, -alignment)
    are_usable = np.ones(len(boundaries), np.bool_)
    for idx, group in enumerate(groups):
        if group.hit_blocks and len(boundaries):
            ends = boundaries // group.block_tokens
            count, hit = found[idx]
            are_usable &= _run_lengths(hit.complete, count)[ends - 1] >= np.minimum(group.hit_blocks, ends)
    return int(boundaries[are_usable.argmax()]) if are_usable.any() else 0


def _run_lengths(complete: int, count: int) -> Ints:
    """How many blocks without a gap end at each of `count` blocks."""
    packed = np.frombuffer(complete.to_bytes(-(-count // 8), "little"), np.uint8)
    bits = np.unpackbits(packed, count=count, bitorder="little")
    nth = np.arange(1, count + 1)
    return nth - np.maximum.accumulate(np.where(bits, 0, nth))
