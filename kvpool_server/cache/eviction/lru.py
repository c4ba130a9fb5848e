"""Least recently used first; of the blocks that one call used, in the order in which they became candidates.

In a prefix, blocks become candidates from its end, so its deepest block is evicted first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import Policy, VictimQueue


class PrefixLRU(Policy):
    """Evicts the least recently used block."""

    summary = "the least recently used"

    def __init__(self) -> None:
        self.queue = StampHeap()

    def worth(self, entry: Entry, stamp: int) -> float:
        return entry.used

    def oldest_stamp(self, next_victim: Callable[[], Entry | None]) -> int | None:
        victim = next_victim()
        return None if victim is None else victim.used


class StampHeap(VictimQueue):
    """Candidates by stamp."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._ties = itertools.count()

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.used, next(self._ties), entry))

    def pop(self) -> tuple[int, Entry] | None:
        if not self._heap:
            return None
        stamp, _, entry = heapq.heappop(self._heap)
        return stamp, entry

    def filter(self, keep: Callable[[Entry], bool]) -> int:
        self._heap = [item for item in self._heap if keep(item[2])]
        heapq.heapify(self._heap)
        return len(self._heap)
