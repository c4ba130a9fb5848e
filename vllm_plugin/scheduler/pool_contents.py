"""Which blocks this engine takes the pool to hold: those that it has stored, until one is found missing."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_plugin.metadata import StoreJob
from vllm_plugin.scheduler.events import Events

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_BLOCKS = 1 << 15
"""Blocks in one generation. There are two, and forgetting drops the older one; neither grows so large that dropping it,
or adding to it, delays a step."""
FORGET_S = 5.0
SAMPLE = 64
"""Of many missing blocks only so many are checked, to tell whether any was stored recently. A lookup of a new prompt
finds thousands of blocks missing, and to check each of them delays a step by a millisecond."""


class RecentStores:
    """Blocks that this engine has stored recently, and need not offer again with every request that shares them.

    The pool may have evicted such a block since. The block is offered again as soon as a lookup or a load has found it
    missing, and in any case after `FORGET_S`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._groups: defaultdict[int, _Generations] = defaultdict(_Generations)

    def has(self, block_hash: bytes, group_idx: int) -> bool:
        """Whether a block was stored within the last `FORGET_S`."""
        return self._clock() - self._groups[group_idx].seen_at(block_hash) < FORGET_S

    def stored(self, job: StoreJob) -> None:
        """Every rank has stored a job."""
        now = self._clock()
        for part in job.groups:
            for run in part.runs:
                self._groups[part.group_idx].add(run.block_hashes, now)

    def missing(self, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Blocks are not in the pool."""
        group = self._groups[group_idx]
        known_since = self._clock() - FORGET_S
        sample = block_hashes[:: len(block_hashes) // SAMPLE + 1]
        if any(group.seen_at(block_hash) > known_since for block_hash in sample):
            group.remove(block_hashes)

    def forget_all(self) -> None:
        """The engine has left the namespace."""
        self._groups.clear()


class _Generations:
    """Blocks of one group, and when each was seen."""

    def __init__(self) -> None:
        self._newer: dict[bytes, float] = {}
        self._older: dict[bytes, float] = {}

    def seen_at(self, block_hash: bytes) -> float:
        return max(self._newer.get(block_hash, -FORGET_S), self._older.get(block_hash, -FORGET_S))

    def add(self, block_hashes: Sequence[bytes], now: float) -> None:
        if len(self._newer) + len(block_hashes) > MAX_BLOCKS:
            self._older, self._newer = self._newer, {}
        self._newer.update(dict.fromkeys(block_hashes, now))

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        for seen_at in (self._newer, self._older):
            for block_hash in seen_at.keys() & block_hashes:
                del seen_at[block_hash]


class PoolContents:
    """One engine's: `recent` keeps it from offering a block twice, `events` tell routers of blocks."""

    def __init__(self, events: Events):
        self.events = events
        self.recent = RecentStores()

    def stored(self, request: Request, job: StoreJob) -> None:
        """Every rank has stored a job of a request."""
        self.events.stored(request, job)
        self.recent.stored(job)

    def missing(self, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Blocks are not in the pool."""
        self.events.missing(group_idx, block_hashes)
        self.recent.missing(group_idx, block_hashes)

    def forget_all(self) -> None:
        """The engine has moved to another namespace."""
        self.events.all_missing()
        self.recent.forget_all()
