"""Eviction: least recently used first, and of one prefix the deepest block first.

Only an entry without live children is a candidate, so a prefix is eaten from its end and what remains stays usable.
The queue is lazy: an entry is in it at most once, under the tick it had when it was queued; a use costs nothing here,
and whoever comes up with an old tick is queued again with its new one.

Source: the leaf-first order is that of radix-tree caches (SGLang, RadixAttention).
"""

from __future__ import annotations

import heapq
import itertools

from kvpool_server.storage.entry import Entry

SWEEP_AT_LEAST = 1_000


class PrefixLRU:
    """Candidates of one slot size. Decides only: whoever asks drops the entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._num_dead = 0
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: Entry) -> None:
        """Queues an entry that may have become a candidate."""
        if not entry.queued:
            entry.queued = True
            heapq.heappush(self._heap, (entry.used, next(self._ties), entry))

    def note_dropped(self, entry: Entry) -> None:
        """Says that an entry, maybe queued, is dropped. Dead ones are swept before they outnumber the others."""
        self._num_dead += entry.queued
        if self._num_dead > len(self._heap) // 2 + SWEEP_AT_LEAST:
            self._heap = [item for item in self._heap if item[2].live]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def oldest(self) -> int | None:
        """The tick of the next victim; None if there is no candidate."""
        aside: list[Entry] = []
        entry = self._pop({}, aside)
        if entry is not None:
            aside.append(entry)
        self._requeue(aside)
        return entry.used if entry is not None else None

    def evict(self, count: int) -> list[Entry] | None:
        """Chooses `count` entries, to be dropped in this order. None if there are fewer: nothing has changed."""
        victims: list[Entry] = []
        aside: list[Entry] = []
        children_gone: dict[Entry, int] = {}
        while len(victims) < count:
            victim = self._pop(children_gone, aside)
            if victim is None:
                self._requeue(victims + aside)
                return None
            victims.append(victim)
            parent = victim.parent
            if parent is not None and parent.live:
                children_gone[parent] = children_gone.get(parent, 0) + 1
                if parent.children == children_gone[parent]:
                    self.add(parent)
        self._requeue(aside)
        return victims

    def _pop(self, children_gone: dict[Entry, int], aside: list[Entry]) -> Entry | None:
        # Leased entries are put aside, to be queued again by the caller; those that are no candidates leave.
        while self._heap:
            tick, _, entry = heapq.heappop(self._heap)
            entry.queued = False
            self._num_dead -= not entry.live
            if not entry.live or entry.pending or entry.children != children_gone.get(entry, 0):
                continue
            if entry.used != tick:
                self.add(entry)
            elif entry.leases:
                aside.append(entry)
            else:
                return entry
        return None

    def _requeue(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.add(entry)
