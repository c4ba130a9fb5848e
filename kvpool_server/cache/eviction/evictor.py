"""Chooses victims among the entries of one slot size, in the order of a policy.

Invariants, for every policy:
- Only a leaf, an entry without live children, is a candidate: a prefix is evicted from its end, so what remains of it
  can still be hit.
- No entry that is leased or being written is chosen.
- An entry is in the queue at most once, under the stamp that it had when it was queued.

The queue is lazy. A use does not move an entry; an entry that is popped with an outdated stamp is queued again under
its new one. A dropped entry leaves the queue when it is popped, or when dropped entries outnumber half the queue.

Source: SGLang's RadixAttention evicts the leaves of its radix tree first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.base import TICK, Policy

MIN_DEAD_TO_SWEEP = 1_000
"""Dropped entries in a queue: with fewer the queue is not swept, however short it is."""
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
        self._num_dead = 0  # Dropped entries in the queue.

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
        self._num_dead += entry.queued
        if self._num_dead > self._num_queued // 2 + MIN_DEAD_TO_SWEEP:
            self._num_queued = self._queue.filter(lambda entry: entry.live)
            self._num_dead = 0
        self._num_entries -= 1
        self._policy.dropped(entry, self._num_entries)

    def add(self, entry: Entry) -> None:
        """Queues an entry that may have become a candidate."""
        if not entry.queued:
            entry.queued = True
            self._num_queued += 1
            self._queue.push(entry)

    def remove_groups(self, groups: Collection[Group]) -> None:
        """The entries of these groups move to other policies. Visits every queued entry."""
        self._num_queued = self._queue.filter(lambda entry: entry.live and entry.group not in groups)
        self._num_dead = 0
        for group in groups:
            self._num_entries -= len(group.index)
            for entry in group.index.values():
                entry.queued = False

    def add_group(self, group: Group, stamp: int) -> None:
        """The entries of a group move here from another policy."""
        self._policy.stored([], stamp)
        self._num_entries += len(group.index)
        for entry in sorted(group.index.values(), key=lambda entry: entry.used):
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
            victim.queued = True  # Dropping its children before it must not queue it.
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
            victim.queued = False
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
            entry.queued = False
            self._num_queued -= 1
            self._num_dead -= not entry.live
            if not entry.live or entry.pending or entry.children != chosen.get(entry, 0):
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
