"""Which blocks of a run are in a spatial sample, and which sampled block precedes the run.

A put's run goes on where another ended, at a block that is probably not in the sample. So the sampler keeps, for the
last ends of runs, the sampled blocks before them: those with a smaller key than all that follow, because these alone
can be the nearest sampled block at some rate.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvpool_server.cache.steps import STEP_BLOCKS, Steps

KEY_BITS = 60
KEYS = 1 << KEY_BITS
"""Keys of blocks are in [0, KEYS), uniformly distributed."""
MAX_ENDS = 1_024
"""Ends of runs that are kept, the latest."""
PART_BLOCKS = 512
"""Sampled blocks of a run that are looked up, used or stored together, in less than about 2 ms."""
_MASK = KEYS - 1

HashOf = Callable[[bytes], int]
Sampled = Sequence[tuple[int, int]]
"""Sampled blocks of a run: (position in the run, key), ascending by position."""


class SampledRun(NamedTuple):
    """The blocks of a run whose keys are below a threshold.

    Args:
        num_blocks: of the run, sampled or not.
        blocks: (position in the run, key), ascending by position.
        depth: blocks before the run; 0 if they are not known.
        before: keys of sampled blocks before the run, the nearest first; each is smaller than those in front of it.
    """

    num_blocks: int
    blocks: list[tuple[int, int]]
    depth: int
    before: tuple[int, ...]

    def parts(self) -> Sequence[Sampled]:
        """The sampled blocks, `PART_BLOCKS` at a time."""
        if len(self.blocks) <= PART_BLOCKS:
            return [self.blocks]
        return [self.blocks[start : start + PART_BLOCKS] for start in range(0, len(self.blocks), PART_BLOCKS)]

    def parent_key(self, threshold: int) -> int | None:
        """The key of the nearest block before the run that is in the sample of a threshold."""
        return next((key for key in self.before if key < threshold), None)


class Sampler:
    """Args:
    hash_of: uniform over at least `KEY_BITS` bits, and unknown to clients: Python's own has a secret seed, and has been
        computed by the pool's index already.
    """

    def __init__(self, hash_of: HashOf = hash):
        self._hash_of = hash_of
        self._ends: OrderedDict[int, tuple[int, tuple[int, ...]]] = OrderedDict()

    def sample(self, salt: int, parent_hash: bytes, hashes: Sequence[bytes], threshold: int) -> Steps[SampledRun]:
        """The sampled blocks of a run, in steps of `STEP_BLOCKS`.

        Args:
            salt: of the run's namespace and group, within `KEY_BITS` bits.
        """
        hash_of = self._hash_of
        blocks: list[tuple[int, int]] = []
        for start in range(0, len(hashes), STEP_BLOCKS):
            if start:
                yield
            blocks += [
                (position, key)
                for position, block_hash in enumerate(hashes[start : start + STEP_BLOCKS], start)
                if (key := (hash_of(block_hash) ^ salt) & _MASK) < threshold
            ]
        depth = 0
        before: tuple[int, ...] = ()
        if parent_hash:
            depth, before = self._ends.get((hash_of(parent_hash) ^ salt) & _MASK, (0, ()))
        return SampledRun(len(hashes), blocks, depth, before)

    def remember_end(self, salt: int, run: SampledRun, hashes: Sequence[bytes], count: int) -> Steps[None]:
        """Keeps what precedes a later run that goes on after the first `count` blocks of this one."""
        if not count:
            return
        keys: list[int] = []
        least = KEYS
        for nth in range(bisect.bisect_left(run.blocks, (count,)) - 1, -1, -1):
            key = run.blocks[nth][1]
            if key < least:
                keys.append(least := key)
            if nth % PART_BLOCKS == PART_BLOCKS - 1:
                yield
        keys += [key for key in run.before if key < least]
        end = (self._hash_of(hashes[count - 1]) ^ salt) & _MASK
        self._ends[end] = run.depth + count, tuple(keys)
        self._ends.move_to_end(end)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
