"""Room for new entries: which slots to take, and whom to evict for them.

Slot sizes share the arena fairly. A size that needs room takes it, in this order:
1. from slots and extents that are free;
2. an extent of a size whose every use is older than our own oldest candidate's (a model that is gone gives way);
3. while it has less than its share of extents: the coldest extent of the size that has most;
4. from its own entries, as the policy says.
Decides only: the pool drops the victims, then takes the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool_server.storage.arena import Arena, Extent
from kvpool_server.storage.entry import Entry
from kvpool_server.storage.eviction import Policy

SAMPLED_SLOTS = 32
"""How many entries say how cold an extent is: enough to rank extents, few enough for extents of any size."""


class Space:
    """The arena and, for each slot size, its eviction policy and the stamp of its last use."""

    def __init__(self, arena: Arena, policy: Callable[[], Policy]):
        self.arena = arena
        self._policy = policy
        self._policies: dict[int, Policy] = {}
        self._last_used: dict[int, int] = {}

    def policy(self, slot_bytes: int) -> Policy:
        """Of one slot size."""
        policy = self._policies.get(slot_bytes)
        if policy is None:
            policy = self._policies[slot_bytes] = self._policy()
        return policy

    def touch(self, slot_bytes: int, stamp: int) -> None:
        self._last_used[slot_bytes] = stamp

    def victims(self, slot_bytes: int, count: int) -> list[Entry] | None:
        """Who must go so that `count` slots of this size can be taken. None if that cannot be: nothing has changed."""
        short = count - self.arena.available(slot_bytes)
        chosen: list[Entry] = []
        if short <= 0:
            return chosen
        per_extent = self.arena.slots_per_extent(slot_bytes)
        for extent in self._donations(slot_bytes):
            if short <= 0:
                break
            chosen.extend(owner for owner in extent.owners if owner is not None)
            short -= per_extent
        if short <= 0:
            return chosen
        own = self.policy(slot_bytes).evict(short)
        return None if own is None else chosen + own

    def _donations(self, slot_bytes: int) -> Iterator[Extent]:
        """Extents that other sizes give up to this one, coldest first. Looks at a size only when it is to give."""
        held = {size: len(self.arena.extents(size)) for size in self.arena.sizes() if size != slot_bytes}
        if not held:
            return
        mine = len(self.arena.extents(slot_bytes))
        share = max(1, self.arena.num_extents // (len(held) + 1))
        our_oldest = self.policy(slot_bytes).oldest_stamp()
        colder = [] if our_oldest is None else [size for size in held if self._last_used.get(size, 0) < our_oldest]
        for size in sorted(colder, key=lambda size: self._last_used.get(size, 0)):
            del held[size]
            for extent in self._movable(size):
                mine += 1
                yield extent
        stocks: dict[int, list[Extent]] = {}
        while mine < share and held:
            size = max(held, key=held.__getitem__)
            if held[size] <= share:
                break
            stock = stocks[size] if size in stocks else stocks.setdefault(size, self._movable(size))
            if not stock:
                del held[size]
                continue
            held[size] -= 1
            mine += 1
            yield stock.pop(0)
        if mine == 0 and held:  # More sizes than extents: whoever was idle longest makes way.
            for size in sorted(held, key=lambda size: self._last_used.get(size, 0)):
                yield from self._movable(size)

    def _movable(self, slot_bytes: int) -> list[Extent]:
        """Extents in which nobody reads or writes, coldest first."""
        extents = [
            extent
            for extent in self.arena.extents(slot_bytes)
            if all(owner is None or (owner.live and owner.movable) for owner in extent.owners)
        ]
        return sorted(extents, key=_heat)


def _heat(extent: Extent) -> int:
    step = max(1, len(extent.owners) // SAMPLED_SLOTS)
    return max((owner.used for owner in extent.owners[::step] if owner is not None), default=0)
