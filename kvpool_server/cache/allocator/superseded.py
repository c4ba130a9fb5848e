"""Namespaces whose weights were replaced and that no engine has used since: evicted before any other.

An engine that changes its weights in place, or restarts with new ones, opens a new namespace; the old one may never be
used again, which no policy can know. Superseding queues no entry anew: a child always enters its group's index after
its parent, so the index, read from its end, yields leaves first.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.partitions import Victims

MAX_SKIPPED = 256
"""Entries of a group that are skipped, because they or their children are held, before the next group is tried."""
SAMPLED_SLOTS = 32


class Superseded:
    """Groups of superseded namespaces, longest superseded first."""

    def __init__(self) -> None:
        self._groups: dict[Group, None] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        self._groups.update(dict.fromkeys(groups))

    def remove(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._groups.pop(group, None)

    def choose(self, groups: Container[Group], count: int, victims: Victims) -> int:
        """Adds up to `count` victims of the superseded ones of these groups; returns how many."""
        chosen = 0
        for group in self._groups:
            if group not in groups:
                continue
            skipped = 0
            for entry in group.newest():
                if chosen == count or skipped == MAX_SKIPPED:
                    break
                if entry.movable and victims.would_be_leaf(entry):
                    victims.add([entry])
                    chosen += 1
                else:
                    skipped += 1
        return chosen

    def extents(self, arena: Arena, slot_bytes: int) -> Iterator[Extent]:
        """Extents of other slot sizes that hold superseded entries only, none of them leased or pending."""
        for size in {group.spec.slot_bytes for group in self._groups if group.index} - {slot_bytes}:
            for extent in arena.extents(size):
                step = max(1, len(extent.owners) // SAMPLED_SLOTS)  # A few slots rule out most extents.
                if all(map(self._is_evictable, extent.owners[::step])) and all(map(self._is_evictable, extent.owners)):
                    yield extent

    def _is_evictable(self, owner: Entry | None) -> bool:
        return owner is None or (owner.live and owner.movable and owner.group in self._groups)
