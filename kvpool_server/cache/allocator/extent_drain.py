"""Drains an extent for a slot size that has less than its share.

Where every extent of a busy size holds a leased entry, no extent can be given up at once, and perhaps none ever: a new
size would starve. So one extent is drained: none of its slots is allocated any more; entries without a hold are
evicted, the others as soon as their readers and writers have ended; and the empty extent is then reserved for the size
that waits. One extent at a time, and for a bounded time, because an entry may always be in use.
"""

from __future__ import annotations

from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.entry import Entry

DRAIN_S = 10.0


class ExtentDrain:
    """The drain of an arena: of one extent, or of none.

    Attributes:
        wanted_by: the slot size that waits for an extent; 0: none.
        is_active: whether an extent is being drained, or is reserved.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self.wanted_by = 0
        self.is_active = False
        self._entries: list[Entry] = []
        self._ends_at = 0.0

    def start(self, extent: Extent, now: float) -> None:
        """Drains an extent for the size that waits for one."""
        self._arena.start_drain(extent.start, self.wanted_by)
        self._entries = [owner for owner in extent.owners if owner is not None and owner.live]
        self._ends_at = now + DRAIN_S
        self.wanted_by, self.is_active = 0, True

    def victims(self, now: float) -> list[Entry]:
        """The entries that no hold covers any more; ends the drain when its time is over."""
        if now >= self._ends_at:
            self._arena.end_drain()
            self._entries, self.is_active = [], False
        victims = [entry for entry in self._entries if entry.live and entry.movable]
        self._entries = [entry for entry in self._entries if entry.live and not entry.movable]
        return victims
