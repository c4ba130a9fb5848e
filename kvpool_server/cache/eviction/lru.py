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
    """Candidates by stamp, in two heaps: a sweep moves entries from `_unswept`, item by item, to the other."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._unswept: list[tuple[int, int, Entry]] = []
        self._ties = itertools.count()

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.used, next(self._ties), entry))

    def pop(self) -> tuple[int, Entry] | None:
        heap = self._heap
        if self._unswept and (not heap or self._unswept[0] < heap[0]):
            heap = self._unswept
        if not heap:
            return None
        stamp, _, entry = heapq.heappop(heap)
        return stamp, entry

    def sweep(self, count: int, keep: Callable[[Entry], bool]) -> int:
        if not self._unswept:
            self._unswept, self._heap = self._heap, self._unswept
        removed = 0
        for _ in range(min(count, len(self._unswept))):
            item = self._unswept.pop()  # What remains of a heap without its last item is a heap.
            if keep(item[2]):
                heapq.heappush(self._heap, item)
            else:
                removed += 1
        return removed
