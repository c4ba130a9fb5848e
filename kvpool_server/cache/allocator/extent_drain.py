"""Drains one extent at a time for a slot size, or a tenant, that could get none otherwise."""

from __future__ import annotations

from collections import deque

from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.entry import Entry

DRAIN_S = 10.0


class ExtentDrain:
    """Drains an extent for a slot size that has less than its share.

    Where every extent of a busy size holds a leased entry, no extent can be given up at once, and perhaps none ever: a
    new size would starve. So one extent is drained: none of its slots is allocated any more; entries without a hold are
    evicted, the others as soon as their readers and writers have ended; and the empty extent is then reserved for the
    size that waits. One extent at a time, and for a bounded time, because an entry may always be in use.

    An extent of another tenant is drained of leased entries as well: nobody can lease them again, so the extent is
    empty when the leases have ended, whatever that tenant does.

    Args:
        longest_hold_s: how long a slot can stay held after its entry was dropped.

    Attributes:
        wanted_by: the tenant and slot size that wait for an extent.
        is_active: whether an extent is being drained, or is reserved.
    """

    def __init__(self, arena: Arena, longest_hold_s: float):
        self._arena = arena
        self._longest_hold_s = longest_hold_s
        self.wanted_by: tuple[str, int] | None = None
        self.is_active = False
        self._is_foreign = False
        self._entries: deque[Entry] = deque()
        self._ends_at = 0.0

    def start(self, extent: Extent, now: float) -> None:
        """Drains an extent for the size that waits for one."""
        assert self.wanted_by is not None
        tenant, slot_bytes = self.wanted_by
        self._arena.start_drain(extent.start, slot_bytes, tenant)
        self._entries = deque(filter(None, extent.owners))
        self._is_foreign = extent.tenant != tenant
        self._ends_at = now + DRAIN_S + (self._longest_hold_s if self._is_foreign else 0)
        self.wanted_by, self.is_active = None, True

    def victims(self, now: float, count: int) -> list[Entry]:
        """Those of the next `count` entries that can be evicted now; ends the drain when its time is over."""
        if not self.is_active:
            return []
        if now >= self._ends_at:
            self._arena.end_drain()
            self._entries, self.is_active = deque(), False
        victims: list[Entry] = []
        for _ in range(min(count, len(self._entries))):
            entry = self._entries.popleft()
            if entry.live and (entry.movable or (self._is_foreign and not entry.pending)):
                victims.append(entry)
            elif entry.live:
                self._entries.append(entry)
        return victims
