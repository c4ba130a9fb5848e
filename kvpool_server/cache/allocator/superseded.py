"""Namespaces whose weights were replaced and that nobody has used since: evicted before any other.

An engine that changes its weights in place, or comes back with new ones, opens a new namespace; nobody may ever come
back to the old one, and no policy can know that. Nothing is queued anew for it: a child always comes after its parent,
so whoever came last is a leaf, and a namespace is eaten from there.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.victims import Victims

MAX_SKIPPED = 256
"""So many entries in use, or with children that are, are stepped over in a group before it is left for the next put."""
SAMPLED_SLOTS = 32


class Superseded:
    """Groups of superseded namespaces, longest superseded first."""

    def __init__(self) -> None:
        self._groups: dict[Group, None] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    def add(self, groups: Sequence[Group]) -> None:
        self._groups.update(dict.fromkeys(groups))

    def remove(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._groups.pop(group, None)

    def take(self, groups: Container[Group], count: int, victims: Victims) -> int:
        """Adds up to `count` victims of those of these groups that are superseded; how many there were."""
        taken = 0
        for group in self._groups:
            if group not in groups:
                continue
            skipped = 0
            for entry in group.newest():
                if taken == count or skipped == MAX_SKIPPED:
                    break
                if entry.movable and victims.would_be_leaf(entry):
                    victims.add([entry])
                    taken += 1
                else:
                    skipped += 1
        return taken

    def extents(self, arena: Arena, slot_bytes: int) -> Iterator[Extent]:
        """Extents of other slot sizes in which there is nothing else, and nobody reads or writes."""
        for size in {group.spec.slot_bytes for group in self._groups if group.index} - {slot_bytes}:
            for extent in arena.extents(size):
                step = max(1, len(extent.owners) // SAMPLED_SLOTS)  # Most of the others are told from a few slots.
                if all(map(self._may_go, extent.owners[::step])) and all(map(self._may_go, extent.owners)):
                    yield extent

    def _may_go(self, owner: Entry | None) -> bool:
        return owner is None or (owner.live and owner.movable and owner.group in self._groups)
