"""Extents that tenants and slot sizes with more than their share, or idle for longest, give up to those that need one.

`Donations` chooses only: the caller evicts what is in an extent. `ExtentDrain` empties one over time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvpool_server.cache.arena import Arena, Extent
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.partitions import Partition, Victims, oldest_stamp

MAX_DONATED_SLOTS = 4_096
"""Slots of an extent that one put empties. A larger one is drained, some slots at a time, while puts are refused."""
MAX_SEARCHED_SLOTS = 1 << 16
"""Slots that one put visits in search of extents without a held entry."""
DRAIN_S = 10.0

Donor = TypeVar("Donor", str, int)


class ExtentDrain:
    """Drains an extent for a slot size that has less than its share.

    Where every extent of a busy size holds a leased entry, no extent can be given up at once, and perhaps none ever: a
    new size would starve. So one extent is drained: none of its slots is allocated any more; entries without a hold are
    evicted, the others as soon as their readers and writers have ended; and the empty extent is then reserved for the
    size that waits. One extent at a time, and for a bounded time, because an entry may always be in use.

    An extent of another tenant is drained of leased and pending entries as well: nobody can lease or write them again,
    so the extent is empty when the leases and tickets have ended, whatever that tenant does.

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
        self._extent: Extent | None = None
        self._slot_class = ("", 0)

    def keep(self, extent: Extent, slot_class: tuple[str, int], now: float) -> None:
        """Drains an extent that a put empties over several steps, unless another one is being drained."""
        if self._extent is not None and self._slot_class == slot_class and not self._extent.num_used:
            self._end()  # The put needs more than that one.
        if not self.is_active:
            self.wanted_by = slot_class
            self.start(extent, now)

    def extent_for(self, slot_class: tuple[str, int]) -> list[Extent]:
        """The extent that is being drained for a tenant and slot size, if any, and if a put can empty it."""
        extent = self._extent if self._slot_class == slot_class else None
        return [extent] if extent is not None and extent.num_used and len(extent.owners) <= MAX_DONATED_SLOTS else []

    def start(self, extent: Extent, now: float) -> None:
        """Drains an extent for the size that waits for one."""
        assert self.wanted_by is not None
        self._arena.start_drain(extent, self.wanted_by)
        self._entries = deque(filter(None, extent.owners))
        self._is_foreign = extent.tenant != self.wanted_by[0]
        self._ends_at = now + DRAIN_S + (self._longest_hold_s if self._is_foreign else 0)
        self._extent, self._slot_class = extent, self.wanted_by
        self.wanted_by, self.is_active = None, True

    def victims(self, now: float, count: int) -> list[Entry]:
        """Those of the next `count` entries that can be evicted now; ends the drain when its time is over."""
        if not self.is_active:
            return []
        if now >= self._ends_at:
            self._end()
        victims: list[Entry] = []
        for _ in range(min(count, len(self._entries))):
            entry = self._entries.popleft()
            if entry.live and (entry.movable or self._is_foreign):
                victims.append(entry)
            elif entry.live:
                self._entries.append(entry)
        return victims

    def _end(self) -> None:
        self._arena.end_drain()
        self._entries, self._extent, self.is_active = deque(), None, False


@dataclass(eq=False)
class Donations:
    """Extents that tenants and slot sizes give up, the longest unused first (`Partitions.last_used`)."""

    _arena: Arena
    _drain: ExtentDrain
    _last_used: Callable[..., int]
    _clock: Callable[[], float]

    def share(self, tenant: str) -> int:
        """How many extents each tenant has if all of them, and this one, have the same."""
        return max(1, self._arena.num_extents // len({*self._arena.tenants(), tenant}))

    def extents(self, slot_class: tuple[str, int], mine: Sequence[Partition], victims: Victims) -> Iterator[Extent]:
        """Extents that other tenants, then other sizes of the tenant, give up to this one, coldest first.

        `mine` are the partitions of the class that needs an extent, `victims` what is to be evicted already.
        """
        search = Search(self._arena.withheld(slot_class))
        for extent in filter(search.is_unheld, self._drain.extent_for(slot_class)):
            search.given.add(extent.start)  # A put goes on with the extent that an earlier step has begun to empty.
            yield extent
        if self._arena.has_tenants:
            yield from self._of_tenants(slot_class, search)
        yield from self._of_sizes(slot_class, mine, victims, search)

    def _of_tenants(self, slot_class: tuple[str, int], search: Search) -> Iterator[Extent]:
        """Extents of tenants with more than their share, until this one has its share, or reaches its quota."""
        arena, (tenant, slot_bytes) = self._arena, slot_class
        share = self.share(tenant)
        wanted = min(share, arena.limit(tenant))
        num_mine = arena.num_held(tenant) + arena.num_usable(slot_bytes, tenant)
        num_held = arena.tenants()
        num_held.pop(tenant, None)
        is_short = num_mine < wanted and any(count > share for count in num_held.values())
        surplus = self._surplus(num_held, share, arena.extents_of, search)
        for extent in itertools.islice(surplus, max(0, wanted - num_mine)):
            num_mine += 1
            search.given.add(extent.start)
            yield extent
        if is_short and num_mine < wanted and not self._drain.is_active:
            self._drain.wanted_by = slot_class  # Each of their extents holds a leased or pending entry.
        if not num_mine and share == 1:  # More tenants than extents: the tenant idle longest gives up one of its own.
            idle = (self._unheld(arena.extents_of(each), search) for each in sorted(num_held, key=self._last_used))
            yield from itertools.islice(itertools.chain.from_iterable(idle), 1)

    def _of_sizes(
        self, slot_class: tuple[str, int], mine: Sequence[Partition], victims: Victims, search: Search
    ) -> Iterator[Extent]:
        """Extents that a tenant's other sizes give up to this one. Visits a size only when its turn has come."""
        arena, (tenant, slot_bytes) = self._arena, slot_class
        num_extents = {size: len(arena.extents(size, tenant)) for size in arena.sizes(tenant) if size != slot_bytes}
        if not num_extents:
            return
        num_mine = len(arena.extents(slot_bytes, tenant)) + arena.num_usable(slot_bytes, tenant)
        num_shared = max(arena.num_held(tenant), min(self.share(tenant), arena.limit(tenant)))
        share, before = max(1, num_shared // (len(num_extents) + 1)), dict(num_extents)
        our_oldest, now = oldest_stamp(mine, victims), self._clock()
        last_used = {size: self._last_used(tenant, size) for size in num_extents}
        colder = [] if our_oldest is None else [size for size in num_extents if last_used[size] < our_oldest]
        for size in sorted(colder, key=last_used.__getitem__):
            del num_extents[size]
            for extent in self._unheld(arena.extents(size, tenant), search):
                if extent.last_pin_end > now:
                    break  # As those behind it; what this size holds itself is evicted before.
                num_mine += 1
                yield extent
        surplus = self._surplus(num_extents, share, lambda size: arena.extents(size, tenant), search)
        for extent in itertools.islice(surplus, max(0, share - num_mine)):
            num_mine += 1
            yield extent
        if num_mine < share and any(count > share for count in before.values()) and not self._drain.is_active:
            self._drain.wanted_by = slot_class  # Each of their extents holds a leased or pending entry.
        if num_mine == 0 and num_extents:  # More sizes than extents: the size idle longest gives up its extents.
            for size in sorted(num_extents, key=last_used.__getitem__):
                yield from self._unheld(arena.extents(size, tenant), search)

    def _surplus(
        self,
        num_extents: dict[Donor, int],
        share: int,
        extents_of: Callable[[Donor], Iterable[Extent]],
        search: Search,
    ) -> Iterator[Extent]:
        """Unheld extents of the donor with most, then again of the one with most, while it has more than its share.

        Removes a donor without another unheld extent from `num_extents`.
        """
        unheld: dict[Donor, Iterator[Extent]] = {}
        while num_extents and num_extents[donor := max(num_extents, key=num_extents.__getitem__)] > share:
            if donor not in unheld:
                unheld[donor] = self._unheld(extents_of(donor), search)
            extent = next(unheld[donor], None)
            if extent is None:
                del num_extents[donor]
            else:
                num_extents[donor] -= 1
                yield extent

    def _unheld(self, extents: Iterable[Extent], search: Search) -> Iterator[Extent]:
        """Extents without a leased or pending entry that are not given yet, coldest first, those with pins last."""
        now = self._clock()
        candidates = (each for each in extents if each.start not in search.given)
        for extent in sorted(candidates, key=lambda each: (each.last_pin_end > now, each.last_use)):
            if extent.num_used > MAX_DONATED_SLOTS or search.is_unheld(extent):
                yield extent


class Search:
    """One put's search for extents; once it has visited `MAX_SEARCHED_SLOTS`, it takes all to be held."""

    def __init__(self, given: set[int]):
        self.given = given  # Starts of the extents that must not be given up again.
        self._num_slots = 0

    def is_unheld(self, extent: Extent) -> bool:
        self._num_slots += len(extent.owners)
        if self._num_slots > MAX_SEARCHED_SLOTS:
            return False
        return all(owner is None or (owner.live and owner.movable) for owner in extent.owners)
