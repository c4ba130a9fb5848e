"""Slots for entries: the arena is cut into equal extents, and an extent into equal slots of one size.

Several slot sizes (models, groups) share one arena: an extent belongs to a size from its first slot's allocation until
its last slot is freed. Where callers prove who they are, it also belongs to one tenant, and an extent with another
tenant's bytes is zeroed before the new tenant gets a slot there. Otherwise everybody is one tenant, "", and nothing is
ever zeroed. Bookkeeping of offsets, without memory but for `zero`.

Invariants: an offset is free or has one owner. A slot is allocated only where no byte of another tenant lies.
"""

from __future__ import annotations

import mmap
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool_server.cache.entry import Entry

ALIGNMENT = 2 << 20
MIN_EXTENT_BYTES = 32 << 20
EXTENTS_PER_ARENA = 64
MIN_EXTENTS = 4
MAX_SLOTS_PER_EXTENT = 1 << 18
MIN_SLOT_BYTES = 4 << 10
"""An extent has no more slots than slots of this size. So the server's own memory for blocks, 0.5 KiB for each and up
to 0.6 KiB for its shards, is little more than a quarter of the arena, however small the blocks are."""
FEW_SLOTS = 1 << 15
"""Slots that an arena of few bytes may have in all."""
ZEROED_AT_ONCE = 2 << 20
"""Bytes that one call of `Arena.zero_some` zeroes, within about 1 ms."""
HOLD_SAMPLE, USE_SAMPLE = 64, 32
"""Slots of an extent whose holds, or last uses and pins, are looked at: one step ranks all extents of an arena."""


class Extent:
    """Slots of one size, of one tenant. `owners[i]` is the entry in slot i, or None."""

    __slots__ = ("free", "owners", "slot_bytes", "slot_class", "start", "tenant")

    def __init__(self, start: int, slot_class: tuple[str, int], num_slots: int):
        self.start = start
        self.slot_class = slot_class
        self.tenant, self.slot_bytes = slot_class
        self.owners: list[Entry | None] = [None] * num_slots
        # Allocated from the end: in ascending order, so that the blocks of one put lie side by side. An array, because
        # a list of a quarter of a million numbers takes milliseconds to make, and to free.
        self.free = array("i", np.arange(num_slots - 1, -1, -1, np.int32).tobytes())

    @property
    def num_used(self) -> int:
        return len(self.owners) - len(self.free)

    def _sample(self, count: int) -> list[Entry]:
        """The entries in every nth slot, so that at most about `count` slots are looked at."""
        return [owner for owner in self.owners[:: max(1, len(self.owners) // count)] if owner is not None]

    @property
    def num_held(self) -> int:
        """How many of some of its slots hold an entry that cannot be evicted now."""
        return sum(not (entry.live and entry.movable) for entry in self._sample(HOLD_SAMPLE))

    @property
    def last_use(self) -> int:
        """The stamp of the last use of some of its slots."""
        return max((entry.used for entry in self._sample(USE_SAMPLE)), default=0)

    @property
    def last_pin_end(self) -> int:
        """When the last pin of some of its slots ends."""
        return max((entry.pinned_until for entry in self._sample(USE_SAMPLE)), default=0)


@dataclass(slots=True)
class _Incoming:
    """Extents that a tenant has claimed, and in which it has no slot yet; `num_puts` wait for them.

    The extents in `foreign` have another tenant's bytes; the first `zeroed_bytes` of the first one are zero.
    """

    num_puts: int = 0
    zeroed: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    zeroed_bytes: int = 0

    def __len__(self) -> int:
        return len(self.zeroed) + len(self.foreign)


_NOTHING = _Incoming()
_UNKNOWN_TENANT = "\0"  # No tenant has this name.


class Arena:
    """Slots by offset.

    Args:
        arena_bytes: rounded down to whole extents.
        extent_bytes: default: a 64th of the arena, at least 32 MiB, and at most a quarter of the arena.
        backed_bytes: how much can be allocated at first; default: all. See `back`.
        zero: (start, nbytes): fills these bytes of the arena with zeros. With it, each extent belongs to one tenant;
            without, everybody is the tenant "".

    Attributes:
        num_backed: extents that can be allocated.
        max_slots: of an extent.
        limits: how many extents tenants may hold; a tenant without a limit may hold all.
        on_extent: called with an extent's index and the bytes of its slots, before it has its first one, and with 0
            after its last one.
    """

    def __init__(
        self,
        arena_bytes: int,
        extent_bytes: int | None = None,
        backed_bytes: int | None = None,
        zero: Callable[[int, int], None] | None = None,
    ):
        if extent_bytes is None:
            wanted = max(arena_bytes // EXTENTS_PER_ARENA, MIN_EXTENT_BYTES)
            wanted = min(wanted, max(arena_bytes // MIN_EXTENTS, 1))
            unit = next((each for each in (ALIGNMENT, mmap.PAGESIZE) if each <= wanted), 1)
            extent_bytes = wanted // unit * unit
        self.extent_bytes = extent_bytes
        self.num_extents = arena_bytes // extent_bytes
        if not self.num_extents:
            raise ValueError(f"an arena of {arena_bytes} bytes holds no extent of {extent_bytes}")
        self.arena_bytes = self.num_extents * extent_bytes
        self.max_slots = min(MAX_SLOTS_PER_EXTENT, max(FEW_SLOTS // self.num_extents, extent_bytes // MIN_SLOT_BYTES))
        self.has_tenants = zero is not None
        self._zero = zero
        self._extents: list[Extent | None] = [None] * self.num_extents
        self._bytes_of: list[str | None] = [None] * self.num_extents  # Whose bytes lie there; None: zeros.
        self.num_backed = 0
        self._unused: list[int] = []
        self.back(self.arena_bytes if backed_bytes is None else backed_bytes)
        # By tenant and slot size, extents by start; those with free slots again, so that allocation never searches.
        self._by_class: dict[tuple[str, int], dict[int, Extent]] = {}
        self._with_room: dict[tuple[str, int], dict[int, Extent]] = {}
        self._incoming: dict[str, _Incoming] = {}
        self.limits: Mapping[str, int] = {}
        self._draining: Extent | None = None
        self._drained_for = ("", 0)
        self._num_reserved = 0  # 1: the drained extent is empty, and waits for its size.
        self.on_extent: Callable[[int, int], None] = lambda idx, slot_bytes: None

    def back(self, nbytes: int) -> None:
        """Says that the first `nbytes` are backed by memory: only those are allocated."""
        while self.num_backed < self.num_extents and (self.num_backed + 1) * self.extent_bytes <= nbytes:
            self._unused.insert(0, self.num_backed)
            self.num_backed += 1

    @property
    def unbacked_bytes(self) -> int:
        return (self.num_extents - self.num_backed) * self.extent_bytes

    def slots_per_extent(self, slot_bytes: int) -> int:
        return min(self.extent_bytes // slot_bytes, self.max_slots)

    def classes(self) -> list[tuple[str, int]]:
        return list(self._by_class)

    def sizes(self, tenant: str = "") -> list[int]:
        return [slot_bytes for owner, slot_bytes in self._by_class if owner == tenant]

    def extents(self, slot_bytes: int, tenant: str = "") -> list[Extent]:
        return list(self._by_class.get((tenant, slot_bytes), {}).values())

    def extents_of(self, tenant: str) -> Iterator[Extent]:
        return (extent for size in self.sizes(tenant) for extent in self.extents(size, tenant))

    def unused_extents(self) -> list[int]:
        """Indexes of extents without any allocated slot."""
        return list(self._unused)

    def tenants(self) -> dict[str, int]:
        """Each tenant that holds extents, and how many."""
        held = Counter({tenant: len(incoming) for tenant, incoming in self._incoming.items()})
        held.update(extent.tenant for extent in self._extents if extent is not None)
        return held

    def num_held(self, tenant: str) -> int:
        """Extents that are a tenant's, whatever lies in them: what nobody else can use."""
        return len(self._incoming.get(tenant, _NOTHING)) + sum(
            len(extents) for (owner, _), extents in self._by_class.items() if owner == tenant
        )

    def limit(self, tenant: str) -> int:
        return min(self.limits.get(tenant, self.num_extents), self.num_extents)

    def num_surplus(self, tenant: str) -> int:
        return max(0, self.num_held(tenant) - self.limit(tenant)) if self.limits else 0

    def num_free(self, slot_bytes: int, tenant: str = "") -> int:
        return sum(len(extent.free) for extent in self._with_room.get((tenant, slot_bytes), {}).values())

    def num_usable(self, slot_bytes: int, tenant: str = "") -> int:
        """Unused extents that a tenant may take for slots of this size, beside those that it has claimed."""
        reserved = 0 if (tenant, slot_bytes) == self._drained_for else self._num_reserved
        num_unused = len(self._unused) - reserved
        if tenant in self.limits:
            num_unused = min(num_unused, self.limit(tenant) - self.num_held(tenant))
        return max(0, num_unused)

    def available(self, slot_bytes: int, tenant: str = "") -> int:
        """Slots of this size that a tenant can be given, once `claim` says so."""
        num_extents = self.num_usable(slot_bytes, tenant) + len(self._incoming.get(tenant, _NOTHING))
        return self.num_free(slot_bytes, tenant) + num_extents * self.slots_per_extent(slot_bytes)

    def claim(self, slot_bytes: int, count: int, tenant: str = "") -> bool:
        """Whether `count` available slots can be allocated now, because no byte of another tenant lies there.

        If not, sets unused extents aside for the tenant. The put calls `start_claims`, then `zero_some` until it is
        False, claims again, and calls `end_claims` however it ends.
        """
        if not self.has_tenants:
            return True
        short = count - self.num_free(slot_bytes, tenant)
        num_extents = -(-short // self.slots_per_extent(slot_bytes))
        num_clean = sum(self._is_clean(idx, tenant) for idx in self._unused)
        incoming = self._incoming.get(tenant, _NOTHING)
        if num_extents <= num_clean + len(incoming.zeroed):
            return True
        incoming = self._incoming.setdefault(tenant, _Incoming())
        foreign = [idx for idx in self._unused if not self._is_clean(idx, tenant)]
        for idx in foreign[: max(0, num_extents - num_clean - len(incoming))]:
            self._unused.remove(idx)
            incoming.foreign.append(idx)
            if (tenant, slot_bytes) == self._drained_for:
                self._num_reserved = 0
        return False

    def start_claims(self, tenant: str) -> bool:
        """A put waits for what its tenant has claimed; False if that is nothing."""
        if (incoming := self._incoming.get(tenant)) is not None:
            incoming.num_puts += 1
        return incoming is not None

    def zero_some(self, tenant: str) -> bool:
        """Zeroes some of the extents that a tenant has claimed; False if none of them has another tenant's bytes."""
        incoming = self._incoming.get(tenant, _NOTHING)
        if not incoming.foreign:
            return False
        assert self._zero is not None
        idx, start = incoming.foreign[0], incoming.zeroed_bytes
        nbytes = min(ZEROED_AT_ONCE, self.extent_bytes - start)
        self._zero(idx * self.extent_bytes + start, nbytes)
        incoming.zeroed_bytes += nbytes
        if incoming.zeroed_bytes == self.extent_bytes:
            self._bytes_of[idx] = tenant
            incoming.zeroed.append(incoming.foreign.pop(0))
            incoming.zeroed_bytes = 0
        return True

    def end_claims(self, tenant: str) -> None:
        """Ends a waiting put. With a tenant's last waiting put, its claimed extents become unused again."""
        incoming = self._incoming[tenant]
        incoming.num_puts -= 1
        if not incoming.num_puts:
            self._unused += [*incoming.foreign, *incoming.zeroed]
            del self._incoming[tenant]

    def allocate(self, slot_bytes: int, count: int, tenant: str = "") -> list[int] | None:
        """Allocates `count` slots; returns their offsets. None if fewer are free: nothing has changed."""
        if count > self.available(slot_bytes, tenant):
            return None
        offsets: list[int] = []
        with_room = self._with_room.setdefault((tenant, slot_bytes), {})
        while len(offsets) < count:
            extent = next(iter(with_room.values()), None) or self._open(self._next_unused(tenant), (tenant, slot_bytes))
            while extent.free and len(offsets) < count:
                offsets.append(extent.start + extent.free.pop() * slot_bytes)
            if not extent.free:
                del with_room[extent.start]
        return offsets

    def reopen(self, idx: int, slot_class: tuple[str, int]) -> Extent | None:
        """An extent, which gets slots of a class if it is unused; None if it has no memory."""
        if idx in self._unused:
            self._unused.remove(idx)
            self._open(idx, slot_class)
        return self._extents[idx]

    def occupy(self, idx: int, owners: Sequence[Entry]) -> None:
        """Gives entries their slots in an extent, which are free."""
        if not owners or (extent := self._extents[idx]) is None:
            return
        free = np.frombuffer(extent.free, np.int32)
        is_free = np.zeros(len(extent.owners), np.bool_)
        is_free[free] = True
        for owner in owners:
            slot = (owner.offset - extent.start) // extent.slot_bytes
            extent.owners[slot] = owner
            is_free[slot] = False
        extent.free = array("i", free[is_free[free]].tobytes())
        if not extent.free:
            self._with_room[extent.slot_class].pop(extent.start, None)

    def distrust_unused(self) -> None:
        """Extents without slots may have bytes of any tenant, whatever was known before."""
        for idx, extent in enumerate(self._extents if self.has_tenants else ()):
            if extent is None:
                self._bytes_of[idx] = _UNKNOWN_TENANT

    def start_drain(self, extent: Extent, slot_class: tuple[str, int]) -> None:
        """Allocates no slot of an extent any more; once it is empty, reserves it for a class. One extent at a time."""
        assert self._draining is None and not self._num_reserved
        self._draining, self._drained_for = extent, slot_class
        self._with_room[extent.slot_class].pop(extent.start, None)

    def withheld(self, slot_class: tuple[str, int]) -> set[int]:
        """The start of the extent that is being drained, unless it is drained for this class."""
        return set() if self._draining is None or slot_class == self._drained_for else {self._draining.start}

    def num_freed_by(self, entries: Sequence[Entry], slot_class: tuple[str, int]) -> int:
        """How many slots a class can be given once these entries are dropped: none in an extent that is drained."""
        freed = [entry.offset for entry in entries if entry.group.slot_class == slot_class]
        if (drained := self._draining) is None:
            return len(freed)
        return sum(not drained.start <= offset < drained.start + self.extent_bytes for offset in freed)

    def end_drain(self) -> None:
        """Allocates from the extent as from any other again."""
        if (extent := self._draining) is not None and extent.free:
            self._with_room[extent.slot_class][extent.start] = extent
        self._draining, self._drained_for, self._num_reserved = None, ("", 0), 0

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
        """Frees a slot. An extent whose last slot is freed is open to every size, and to every tenant, again."""
        extent, slot = self._locate(offset)
        extent.owners[slot] = None
        extent.free.append(slot)
        key, idx = extent.slot_class, extent.start // self.extent_bytes
        if extent.num_used:
            if extent is not self._draining:
                self._with_room[key][extent.start] = extent
            return
        if extent is self._draining:
            self._draining, self._num_reserved = None, 1
        self._extents[idx] = None
        self._unused.append(idx)
        del self._by_class[key][extent.start]
        self._with_room[key].pop(extent.start, None)
        if not self._by_class[key]:
            del self._by_class[key], self._with_room[key]
        self.on_extent(idx, 0)

    @property
    def used_bytes(self) -> int:
        return sum(extent.num_used * extent.slot_bytes for extent in self._extents if extent is not None)

    def _is_clean(self, idx: int, tenant: str) -> bool:
        """Whether a tenant may get an unused extent as it is: no other tenant's bytes lie there."""
        return self._bytes_of[idx] in (None, tenant)

    def _next_unused(self, tenant: str) -> int:
        """Removes an unused extent without another tenant's bytes, if possible one that was the tenant's before."""
        if zeroed := self._incoming.get(tenant, _NOTHING).zeroed:
            return zeroed.pop()
        clean = [idx for idx in reversed(self._unused) if self._is_clean(idx, tenant)]
        idx = next((idx for idx in clean if self._bytes_of[idx] is not None), clean[0])
        self._unused.remove(idx)
        return idx

    def _open(self, idx: int, slot_class: tuple[str, int]) -> Extent:
        tenant, slot_bytes = slot_class
        assert self._is_clean(idx, tenant), f"extent {idx} has bytes of tenant {self._bytes_of[idx]!r}"
        if slot_class == self._drained_for:
            self._num_reserved = 0
        extent = Extent(idx * self.extent_bytes, slot_class, self.slots_per_extent(slot_bytes))
        self.on_extent(idx, slot_bytes)
        self._extents[idx] = extent
        self._bytes_of[idx] = tenant
        self._by_class.setdefault(slot_class, {})[extent.start] = extent
        self._with_room.setdefault(slot_class, {})[extent.start] = extent
        return extent

    def _locate(self, offset: int) -> tuple[Extent, int]:
        extent = self._extents[offset // self.extent_bytes]
        assert extent is not None, f"offset {offset} lies in no extent"
        slot, rest = divmod(offset - extent.start, extent.slot_bytes)
        assert rest == 0, f"offset {offset} is no slot of {extent.slot_bytes} bytes"
        return extent, slot
