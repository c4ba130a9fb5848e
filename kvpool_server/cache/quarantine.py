"""Slots of dropped entries that somebody may still read or write."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvpool_server.cache.entry import Entry


class Quarantine:
    """Dropped entries by slot. Each stays until its time is over and no lease or ticket covers it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Entry, float]] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry, _ in self._held.values())

    def add(self, entry: Entry, until: float) -> None:
        """Puts a dropped entry in quarantine until a time; never shortens its stay."""
        _, before = self._held.get(entry.offset, (entry, until))
        until = max(until, before)
        self._held[entry.offset] = (entry, until)
        heapq.heappush(self._ends, (until, entry.offset))

    def remove_if_over(self, entry: Entry, now: float) -> bool:
        """Removes an entry whose time is over and that no hold covers; True if its slot is to be freed now."""
        _, until = self._held.get(entry.offset, (entry, now))
        if now < until or not entry.movable:
            return False
        return self._held.pop(entry.offset, None) is not None

    def pop_over(self, now: float) -> Entry | None:
        """Removes and returns an entry whose time is over and that no hold covers; None if there is none."""
        while self._ends and self._ends[0][0] <= now:
            entry, _ = self._held.get(heapq.heappop(self._ends)[1], (None, 0.0))
            if entry is not None and self.remove_if_over(entry, now):
                return entry
        return None
