"""Least recently used first, and of one prefix the deepest block first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import Policy


class PrefixLRU(Policy):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, Entry]] = []
        self._ties = itertools.count()

    def oldest_stamp(self, gone: dict[Entry, int]) -> int | None:
        aside: list[Entry] = []
        entry = self._pop(gone, aside)
        if entry is not None:
            aside.append(entry)
        self._requeue(aside)
        return entry.used if entry is not None else None

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.used, next(self._ties), entry))

    def _pop_next(self) -> tuple[int, Entry] | None:
        if not self._heap:
            return None
        stamp, _, entry = heapq.heappop(self._heap)
        return stamp, entry

    def _worth(self, entry: Entry, stamp: int) -> float:
        return entry.used

    def _sweep(self, stays: Callable[[Entry], bool]) -> int:
        self._heap = [item for item in self._heap if stays(item[2])]
        heapq.heapify(self._heap)
        return len(self._heap)
