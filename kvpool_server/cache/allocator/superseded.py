"""Namespaces whose weights were replaced and that no engine has used since: evicted before any other.

An engine that changes its weights in place, or restarts with new ones, opens a new namespace; the old one may never be
used again, which no policy can know. Superseding queues no entry anew: the index is searched for leaves, some entries
at a time, and from a leaf the search follows its prefix towards the beginning.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvpool_server.cache.allocator.arena import Arena, Extent
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.partitions import Victims

MAX_SKIPPED = 256
"""Entries of a group that are skipped, because they or their children are held, before the next group is tried."""
SAMPLED_SLOTS = 32
MAX_VISITED_SLOTS = 1 << 16
"""Slots that are visited in search of extents to give up, which happens within one put."""


class Superseded:
    """Groups of superseded namespaces, longest superseded first."""

    def __init__(self) -> None:
        self._groups: dict[Group, Iterator[Entry]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._groups.setdefault(group, _search(group))

    def remove(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._groups.pop(group, None)

    def choose(self, groups: Container[Group], count: int, victims: Victims) -> int:
        """Adds up to `count` victims of the superseded ones of these groups; returns how many."""
        chosen = 0
        for group, search in self._groups.items():
            skipped = 0
            while group.index and group in groups and chosen < count and skipped < MAX_SKIPPED:
                entry: Entry | None = next(search)
                before = chosen
                while entry is not None and chosen < count and _is_victim(entry, group, victims):
                    victims.add([entry])
                    chosen += 1
                    entry = entry.parent
                skipped += chosen == before
        return chosen

    def extents(self, arena: Arena, slot_class: tuple[str, int]) -> Iterator[Extent]:
        """A tenant's extents of other slot sizes that hold superseded entries only, none of them leased or pending."""
        num_visited, (tenant, slot_bytes) = 0, slot_class
        sizes = {group.spec.slot_bytes for group in self._groups if group.index and group.tenant == tenant}
        for size in sizes - {slot_bytes}:
            for extent in arena.extents(size, tenant):
                num_visited += len(extent.owners)
                if num_visited > MAX_VISITED_SLOTS:
                    return
                sampled = extent.sample(SAMPLED_SLOTS)  # A few slots rule out most extents.
                if all(map(self._is_evictable, sampled)) and all(map(self._is_evictable, extent.owners)):
                    yield extent

    def _is_evictable(self, owner: Entry | None) -> bool:
        return owner is None or (owner.live and owner.movable and owner.group in self._groups)


def _search(group: Group) -> Iterator[Entry]:
    """Entries of a group, again and again: those of one part of its index after the other, the newest of it first."""
    while True:
        for entries in group.index.parts():
            yield from reversed(entries)


def _is_victim(entry: Entry, group: Group, victims: Victims) -> bool:
    return entry.live and entry.group is group and entry.movable and victims.would_be_leaf(entry)
