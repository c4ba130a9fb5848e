"""Slots for entries: the arena is cut into equal extents, and an extent into equal slots of one size.

Several slot sizes (models, groups) share one arena: an extent belongs to a size from its first slot's allocation until
its last slot is freed. Bookkeeping of offsets only, without memory. Not thread-safe: the pool's event loop owns it.

Invariant: every offset is either free or has exactly one owner.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvpool_server.cache.entry import Entry

ALIGNMENT = 2 << 20
MIN_EXTENT_BYTES = 32 << 20
EXTENTS_PER_ARENA = 64
MIN_EXTENTS = 4
MAX_SLOTS_PER_EXTENT = 1 << 18
"""Bounds the bookkeeping: without it, a namespace of one-byte chunks would make lists as long as the arena."""


class Extent:
    """Slots of one size. `owners[i]` is the entry in slot i, or None."""

    __slots__ = ("free", "owners", "slot_bytes", "start")

    def __init__(self, start: int, slot_bytes: int, num_slots: int):
        self.start = start
        self.slot_bytes = slot_bytes
        self.owners: list[Entry | None] = [None] * num_slots
        # Allocated from the end: in ascending order, so that the blocks of one put lie side by side. An array, because
        # a list of a quarter of a million numbers takes milliseconds to make, and to free.
        self.free = array("i", np.arange(num_slots - 1, -1, -1, np.int32).tobytes())

    @property
    def num_used(self) -> int:
        return len(self.owners) - len(self.free)


class Arena:
    """Slots by offset.

    Args:
        arena_bytes: rounded down to whole extents.
        extent_bytes: default: a 64th of the arena, at least 32 MiB, and at most a quarter of the arena.
        backed_bytes: how much can be allocated at first; default: all. See `back`.
    """

    def __init__(self, arena_bytes: int, extent_bytes: int | None = None, backed_bytes: int | None = None):
        if extent_bytes is None:
            wanted = max(arena_bytes // EXTENTS_PER_ARENA, MIN_EXTENT_BYTES)
            extent_bytes = min(wanted, max(arena_bytes // MIN_EXTENTS, 1))
            extent_bytes = max(extent_bytes // ALIGNMENT, 1) * ALIGNMENT if extent_bytes >= ALIGNMENT else extent_bytes
        self.extent_bytes = extent_bytes
        self.num_extents = arena_bytes // extent_bytes
        if not self.num_extents:
            raise ValueError(f"an arena of {arena_bytes} bytes holds no extent of {extent_bytes}")
        self.arena_bytes = self.num_extents * extent_bytes
        self._extents: list[Extent | None] = [None] * self.num_extents
        self._num_backed = 0
        self._unused: list[int] = []
        self.back(self.arena_bytes if backed_bytes is None else backed_bytes)
        # By slot size, its extents by start. Extents with free slots are kept apart so that allocation never searches.
        self._by_size: dict[int, dict[int, Extent]] = {}
        self._with_room: dict[int, dict[int, Extent]] = {}
        self._draining: int | None = None
        self._drained_for = 0
        self._num_reserved = 0  # 1: the drained extent is empty, and waits for its size.

    def back(self, nbytes: int) -> None:
        """Says that the first `nbytes` are backed by memory: only those are allocated."""
        while self._num_backed < self.num_extents and (self._num_backed + 1) * self.extent_bytes <= nbytes:
            self._unused.insert(0, self._num_backed)
            self._num_backed += 1

    @property
    def unbacked_bytes(self) -> int:
        """Bytes that cannot be allocated yet; see `back`."""
        return (self.num_extents - self._num_backed) * self.extent_bytes

    def slots_per_extent(self, slot_bytes: int) -> int:
        return min(self.extent_bytes // slot_bytes, MAX_SLOTS_PER_EXTENT)

    def sizes(self) -> list[int]:
        """Slot sizes that have extents."""
        return list(self._by_size)

    def extents(self, slot_bytes: int) -> list[Extent]:
        return list(self._by_size.get(slot_bytes, {}).values())

    def unused_extents(self) -> list[int]:
        """Indexes of extents without any allocated slot."""
        return list(self._unused)

    def available(self, slot_bytes: int) -> int:
        """Slots of this size that can be allocated now."""
        num_free = sum(len(extent.free) for extent in self._with_room.get(slot_bytes, {}).values())
        reserved = 0 if slot_bytes == self._drained_for else self._num_reserved
        return num_free + (len(self._unused) - reserved) * self.slots_per_extent(slot_bytes)

    def allocate(self, slot_bytes: int, count: int) -> list[int] | None:
        """Allocates `count` slots; returns their offsets. None if fewer are free: nothing has changed."""
        if count > self.available(slot_bytes):
            return None
        offsets: list[int] = []
        with_room = self._with_room.setdefault(slot_bytes, {})
        while len(offsets) < count:
            extent = next(iter(with_room.values()), None) or self._open(slot_bytes, self._unused.pop())
            while extent.free and len(offsets) < count:
                offsets.append(extent.start + extent.free.pop() * slot_bytes)
            if not extent.free:
                del with_room[extent.start]
        return offsets

    def restore(self, slot_bytes: int, offsets: Sequence[int]) -> list[bool]:
        """Allocates the slots at these offsets. Of each, whether it was one: a free slot of this size."""
        num_slots = self.slots_per_extent(slot_bytes)
        free: dict[int, set[int]] = {}  # By extent.
        placed = []
        for offset in offsets:
            idx, within = divmod(offset, self.extent_bytes)
            slot, rest = divmod(within, slot_bytes)
            if idx not in free:
                extent = self._extents[idx] if 0 <= idx < self.num_extents else None
                if extent is None and idx in self._unused and not rest and slot < num_slots:
                    self._unused.remove(idx)
                    extent = self._open(slot_bytes, idx)
                if extent is None or extent.slot_bytes != slot_bytes:
                    placed.append(False)
                    continue
                free[idx] = set(extent.free)
            placed.append(not rest and slot in free[idx])
            if placed[-1]:
                free[idx].remove(slot)
        for idx, slots in free.items():
            extent = self._extents[idx]
            assert extent is not None
            extent.free = array("i", (slot for slot in extent.free if slot in slots))
            if not extent.free:
                self._with_room[slot_bytes].pop(extent.start, None)
        return placed

    def start_drain(self, start: int, slot_bytes: int) -> None:
        """Allocates no slot of an extent any more; once it is empty, reserves it for a size. One extent at a time."""
        extent = self._extents[start // self.extent_bytes]
        assert extent is not None and self._draining is None and not self._num_reserved
        self._draining, self._drained_for = start, slot_bytes
        self._with_room[extent.slot_bytes].pop(start, None)

    def end_drain(self) -> None:
        """Allocates from the extent as from any other again."""
        extent = None if self._draining is None else self._extents[self._draining // self.extent_bytes]
        if extent is not None and extent.free:
            self._with_room[extent.slot_bytes][extent.start] = extent
        self._draining, self._drained_for, self._num_reserved = None, 0, 0

    def assign(self, offset: int, owner: Entry) -> None:
        extent, slot = self._locate(offset)
        extent.owners[slot] = owner

    def owner(self, offset: int) -> Entry | None:
        """The entry whose slot contains `offset`, if any."""
        idx = offset // self.extent_bytes
        extent = self._extents[idx] if 0 <= idx < self.num_extents else None
        if extent is None:
            return None
        slot = (offset - extent.start) // extent.slot_bytes
        return extent.owners[slot] if slot < len(extent.owners) else None

    def free(self, offset: int) -> None:
        """Frees a slot. An extent whose last slot is freed is open to every size again."""
        extent, slot = self._locate(offset)
        extent.owners[slot] = None
        extent.free.append(slot)
        if extent.num_used:
            if extent.start != self._draining:
                self._with_room[extent.slot_bytes][extent.start] = extent
            return
        if extent.start == self._draining:
            self._draining, self._num_reserved = None, 1
        self._extents[extent.start // self.extent_bytes] = None
        self._unused.append(extent.start // self.extent_bytes)
        del self._by_size[extent.slot_bytes][extent.start]
        self._with_room[extent.slot_bytes].pop(extent.start, None)
        if not self._by_size[extent.slot_bytes]:
            del self._by_size[extent.slot_bytes], self._with_room[extent.slot_bytes]

    @property
    def used_bytes(self) -> int:
        return sum(extent.num_used * extent.slot_bytes for extent in self._extents if extent is not None)

    def _open(self, slot_bytes: int, idx: int) -> Extent:
        if slot_bytes == self._drained_for:
            self._num_reserved = 0
        extent = Extent(idx * self.extent_bytes, slot_bytes, self.slots_per_extent(slot_bytes))
        self._extents[idx] = extent
        self._by_size.setdefault(slot_bytes, {})[extent.start] = extent
        self._with_room.setdefault(slot_bytes, {})[extent.start] = extent
        return extent

    def _locate(self, offset: int) -> tuple[Extent, int]:
        extent = self._extents[offset // self.extent_bytes]
        assert extent is not None, f"offset {offset} lies in no extent"
        slot, rest = divmod(offset - extent.start, extent.slot_bytes)
        assert rest == 0, f"offset {offset} is no slot of {extent.slot_bytes} bytes"
        return extent, slot
