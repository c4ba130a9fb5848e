"""The entries to evict for one put, chosen one after the other; undone if they are too few."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.evictor import VICTIM, Chosen, Evictor


class Victims:
    """Distinct entries.

    Attributes:
        entries: in the order in which they are to be dropped: children before their parents.
        chosen: the same entries and their parents, as evictors count them.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.chosen: Chosen = {}
        self._by_evictor: list[tuple[Evictor, list[Entry]]] = []
        self._added: list[Entry] = []

    def choose(self, evictor: Evictor, count: int) -> int:
        """Adds up to `count` victims that an evictor chooses; returns how many."""
        victims = evictor.choose(count, self.chosen)
        self._by_evictor.append((evictor, victims))
        self.entries += victims
        return len(victims)

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds entries that no evictor has chosen; those that are victims already keep their position."""
        for entry in entries:
            if self.chosen.get(entry) == VICTIM:
                continue
            self.chosen[entry] = VICTIM
            self.entries.append(entry)
            self._added.append(entry)
            parent = entry.parent
            if parent is not None and parent.live and (before := self.chosen.get(parent, 0)) != VICTIM:
                self.chosen[parent] = before + 1

    def would_be_leaf(self, entry: Entry) -> bool:
        """True if an entry is no victim, and a leaf once the victims are dropped."""
        return entry.children == self.chosen.get(entry, 0)

    def nbytes(self, counts: Callable[[Group], bool]) -> int:
        """Bytes of the slots of the victims for whose group `counts` is True."""
        return sum(entry.group.spec.slot_bytes for entry in self.entries if counts(entry.group))

    def undo(self, evictor_of: Callable[[Group], Evictor]) -> None:
        """Evicts none of them: all become candidates again."""
        for evictor, victims in self._by_evictor:
            evictor.restore(victims)
        for entry in self._added:
            # An evictor that popped this entry since has removed it from its queue.
            if not entry.children and not entry.pending:
                evictor_of(entry.group).add(entry)
