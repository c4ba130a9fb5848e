"""An extent that is being emptied for a slot size that has less than its share.

Where each extent of a busy size holds some entry under a lease, none can be given up at once, and none ever might be: a
newcomer would starve. So one is closed: nobody gets a slot of it any more, entries that nobody uses go, the others as
soon as their readers and writers have ended, and the extent then waits for the size that it was emptied for. One at a
time, and for a bounded time: an entry that is always in use would keep it for ever.
"""

from __future__ import annotations

from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.entry import Entry

CLAIM_S = 10.0


class ExtentDrain:
    """The one there may be.

    Attributes:
        wanted_by: the slot size that asks for an extent; 0: none does.
        held: whether an extent is being emptied, or waits.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self.wanted_by = 0
        self.held = False
        self._in_use: list[Entry] = []
        self._ends_at = 0.0

    def begin(self, extent: Extent, now: float) -> None:
        """Closes an extent for the size that asks for one."""
        self._arena.close(extent.start, self.wanted_by)
        self._in_use = [owner for owner in extent.owners if owner is not None and owner.live]
        self._ends_at = now + CLAIM_S
        self.wanted_by, self.held = 0, True

    def idle(self, now: float) -> list[Entry]:
        """Who is to go, for nobody uses it any more; ends the claim when its time has come."""
        if now >= self._ends_at:
            self._arena.end_claim()
            self._in_use, self.held = [], False
        idle = [entry for entry in self._in_use if entry.live and entry.movable]
        self._in_use = [entry for entry in self._in_use if entry.live and not entry.movable]
        return idle
