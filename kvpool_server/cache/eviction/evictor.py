"""Chooses victims among the entries of one slot size, in the order of a policy.

Invariants, for every policy:
- Only a leaf, an entry without live children, is a candidate: a prefix is evicted from its end, so what remains of it
  can still be hit.
- No entry that is leased or being written is chosen.
- An entry is in the queue at most once, under the stamp that it had when it was queued.

The queue is lazy. A use does not move an entry; an entry that is popped with an outdated stamp is queued again under
its new one. A dropped entry leaves the queue when it is popped, or when the queue is swept: while dropped entries are
more than half of a queue, each further drop visits a few queued entries. So no call visits them all.

An entry whose group moves to another evictor stays in the old queue, too, where it counts as dropped.

Source: SGLang's RadixAttention evicts the leaves of its radix tree first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import TICK, Policy

MIN_DEAD_TO_SWEEP = 1_000
"""Dropped entries in a queue: with fewer the queue is not swept, however short it is."""
SWEPT_PER_DROP = 8
"""Queued entries that a drop visits while the queue is swept: at least one in three of them was dropped."""
VICTIM = -1
"""In a `Chosen`: the entry itself is a victim. No entry has so many children."""

Chosen = dict[Entry, int]
"""For each entry how many of its children are victims; `VICTIM` for the victims."""


class Evictor:
    """The entries under one policy. Decides only: the caller drops the victims, or gives them back with `restore`."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._queue = policy.queue
        self._num_entries = 0
        self._num_queued = 0
        self._num_dead = 0  # Entries in the queue that were dropped, or have moved to another evictor.

    def __len__(self) -> int:
        """Queued entries, with those that were dropped since."""
        return self._num_queued

    def stored(self, entries: Sequence[Entry], stamp: int) -> None:
        self._num_entries += len(entries)
        self._policy.stored(entries, stamp)

    def renewed(self, entries: Sequence[Entry], stamp: int) -> None:
        """A put named entries that the pool had already: the call of their last use changes, its kind does not."""
        for entry in entries:
            entry.used = stamp | entry.used % TICK

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        self._policy.used(entries, stamp)

    def dropped(self, entry: Entry) -> None:
        if entry.queued is not None:
            entry.queued._num_dead += 1
        if self._num_dead > self._num_queued // 2 + MIN_DEAD_TO_SWEEP:
            removed = self._queue.sweep(SWEPT_PER_DROP, self._holds)
            self._num_queued -= removed
            self._num_dead -= removed
        self._num_entries -= 1
        self._policy.dropped(entry, self._num_entries)

    def add(self, entry: Entry) -> None:
        """Queues an entry that may have become a candidate."""
        if entry.queued is not self:
            if entry.queued is not None:
                entry.queued._num_dead += 1
            entry.queued = self
            self._num_queued += 1
            self._queue.push(entry)

    def _holds(self, entry: Entry) -> bool:
        return entry.live and entry.queued is self

    def move_from(self, other: Evictor | None, num_entries: int, stamp: int) -> None:
        """Takes over the entries of a group, but for the candidates: give them to `requeue`."""
        if other is not None:
            other._num_entries -= num_entries
        self._policy.stored([], stamp)
        self._num_entries += num_entries

    def requeue(self, entries: Iterable[Entry]) -> None:
        """Queues those of these entries that are candidates."""
        for entry in sorted(entries, key=lambda entry: entry.used):
            if not entry.children and not entry.pending:
                self.add(entry)

    def choose(self, count: int, chosen: Chosen) -> list[Entry]:
        """Chooses up to `count` victims, children before their parents, and adds them to `chosen`, the victims so far.

        No later call chooses them again.
        """
        victims: list[Entry] = []
        leased: list[Entry] = []
        while len(victims) < count:
            victim = self._pop(chosen, leased)
            if victim is None:
                break
            chosen[victim] = VICTIM
            victim.queued = self  # Dropping its children before it must not queue it.
            victims.append(victim)
            parent = victim.parent
            if parent is not None and parent.live and (before := chosen.get(parent, 0)) != VICTIM:
                chosen[parent] = before + 1
                if parent.children == before + 1:
                    self.add(parent)
        self._add_all(leased)
        self._num_dead -= len(victims)  # `dropped` will count them, and they are not in the queue.
        return victims

    def restore(self, victims: Sequence[Entry]) -> None:
        """Makes victims that are not dropped after all candidates again."""
        self._num_dead += len(victims)
        for victim in victims:
            victim.queued = None
        self._add_all(victims)

    def least_worth(self, chosen: Chosen, stamp: int) -> float | None:
        """What the next victim is worth; None if there is no candidate."""
        victim = self._next_victim(chosen)
        return None if victim is None else self._policy.worth(victim, stamp)

    def oldest_stamp(self, chosen: Chosen) -> int | None:
        """A stamp before which no candidate was used; None if there is no candidate."""
        return self._policy.oldest_stamp(lambda: self._next_victim(chosen))

    def _next_victim(self, chosen: Chosen) -> Entry | None:
        leased: list[Entry] = []
        victim = self._pop(chosen, leased)
        self._add_all(leased if victim is None else [victim, *leased])
        return victim

    def _pop(self, chosen: Chosen, leased: list[Entry]) -> Entry | None:
        # The caller adds the leased entries again once it has popped all it needs.
        while (item := self._queue.pop()) is not None:
            stamp, entry = item
            self._num_queued -= 1
            if not self._holds(entry):
                self._num_dead -= 1
                continue
            entry.queued = None
            if entry.pending or entry.children != chosen.get(entry, 0):
                continue
            if entry.used != stamp:
                self.add(entry)
            elif entry.leases:
                leased.append(entry)
            else:
                return entry
        return None

    def _add_all(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.add(entry)
