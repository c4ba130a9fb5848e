"""Slots out of the index that a late reader or writer might still touch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvpool_server.cache.entry import Entry


class Quarantine:
    """Dropped entries by their slot, until nobody can touch it: no lease, no ticket, and a time has come."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Entry, float]] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry, _ in self._held.values())

    def entries(self) -> dict[int, Entry]:
        """By offset."""
        return {offset: entry for offset, (entry, _) in self._held.items()}

    def hold(self, entry: Entry, not_before: float) -> None:
        """Takes a dropped entry's slot in, or keeps it longer."""
        _, until = self._held.get(entry.offset, (entry, not_before))
        until = max(until, not_before)
        self._held[entry.offset] = (entry, until)
        heapq.heappush(self._ends, (until, entry.offset))

    def settle(self, entry: Entry, now: float) -> bool:
        """Lets a slot go if its time has come and nobody touches it; whether it is free now."""
        _, until = self._held.get(entry.offset, (entry, now))
        if now < until or not entry.movable:
            return False
        return self._held.pop(entry.offset, None) is not None

    def pop_ended(self, now: float) -> Iterator[Entry]:
        """Removes and yields what may go now."""
        while self._ends and self._ends[0][0] <= now:
            entry, _ = self._held.get(heapq.heappop(self._ends)[1], (None, 0.0))
            if entry is not None and self.settle(entry, now):
                yield entry
