"""A part of the arena, cut into slots of one size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvpool_server.cache.entry import Entry

HOLD_SAMPLE = 64
"""Slots of an extent whose holds are counted: all extents of an arena are ranked by these counts in one step."""
MAX_COUNTED_SLOTS = 1_024
"""Entries of an extent that are looked at in one step, to choose some of them."""


class Extent:
    """Slots of one size, of one tenant. `owners[i]` is the entry in slot i, or None."""

    __slots__ = ("free", "owners", "slot_bytes", "slot_class", "start", "tenant")

    def __init__(self, start: int, slot_bytes: int, num_slots: int, tenant: str = ""):
        self.start = start
        self.slot_bytes = slot_bytes
        self.tenant = tenant
        self.slot_class = (tenant, slot_bytes)
        self.owners: list[Entry | None] = [None] * num_slots
        # Allocated from the end: in ascending order, so that the blocks of one put lie side by side. An array, because
        # a list of a quarter of a million numbers takes milliseconds to make, and to free.
        self.free = array("i", np.arange(num_slots - 1, -1, -1, np.int32).tobytes())

    @property
    def num_used(self) -> int:
        return len(self.owners) - len(self.free)

    @property
    def num_held(self) -> int:
        """How many of some slots hold an entry that cannot be evicted now."""
        return sum(not (entry.live and entry.movable) for entry in self.sample(HOLD_SAMPLE))

    def sample(self, count: int) -> list[Entry]:
        """The entries in every nth slot, so that at most about `count` slots are looked at."""
        return [owner for owner in self.owners[:: max(1, len(self.owners) // count)] if owner is not None]

    def occupy(self, owners: Sequence[Entry]) -> None:
        """Gives entries their slots, which are free."""
        free = np.frombuffer(self.free, np.int32)
        is_free = np.zeros(len(self.owners), np.bool_)
        is_free[free] = True
        for owner in owners:
            slot = (owner.offset - self.start) // self.slot_bytes
            self.owners[slot] = owner
            is_free[slot] = False
        self.free = array("i", free[is_free[free]].tobytes())
