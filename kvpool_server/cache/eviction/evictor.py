"""Chooses victims among the entries of one slot size, in the order of a policy.

Invariants, for every policy:
- Only a leaf, an entry without live children, is a candidate: a prefix is evicted from its end, so what remains of it
  can still be hit.
- No entry that is leased or being written is chosen.
- An entry is in the queue at most once, under the stamp that it had when it was queued.

The queue is lazy. A use does not move an entry; an entry that is popped with an outdated stamp is queued again under
its new one. A leased entry leaves the queue when it is popped, until its last lease ends: the entry table adds it then.
A dropped entry leaves the queue when it is popped, or when the queue is swept: while dropped entries are more than half
of a queue, each further drop visits a few queued entries. A choice, by however many evictors, that has visited many
entries in vain ends with `SearchCutError`; the next one goes on behind them. So no call visits them all.

An entry whose group moves to another evictor stays in the old queue, too, where it counts as dropped.

Hints of clients (`cache/hints.py`) come before the policy's order:
- **Expired** candidates are chosen first. They stay in the queue as well, so that a use has nothing to undo.
- **Pinned** candidates are chosen last, and only when they are asked for. One that the queue brings up is **parked**:
  it leaves the queue until its pin ends, so that each pin costs one step, however many there are and however often
  the evictor chooses. The ends of pins are looked for when the evictor chooses, some entries at a time.

Source: SGLang's RadixAttention evicts the leaves of its radix tree first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.policy import EXPIRED, TICK, Policy

MIN_DEAD_TO_SWEEP = 1_000
"""Dropped entries in a queue: with fewer the queue is not swept, however short it is."""
SWEPT_PER_DROP = 8
"""Queued entries that a drop visits while the queue is swept: at least one in three of them was dropped."""
UNPARKED_AT_ONCE = 64
"""Parked entries whose pin has ended that a choice queues again; more only where it finds no other candidate."""
MAX_VISITED = 2_048
"""Entries that are visited in vain for one `Chosen` at most, within about 3 ms."""
VICTIM = -1
"""In a `Chosen`: the entry itself is a victim. No entry has so many children."""


class SearchCutError(Exception):
    """A choice has visited many entries in vain, and has chosen none; the same choice after it finds others."""


class Chosen(dict[Entry, int]):
    """One choice: for each entry how many of its children are victims; `VICTIM` for the victims."""

    def __init__(self) -> None:
        super().__init__()
        self._num_visits_left = MAX_VISITED

    def visited_in_vain(self) -> None:
        """An evictor has visited an entry for this choice that is no victim. Raises SearchCutError if they are many."""
        self._num_visits_left -= 1
        if self._num_visits_left < 0:
            raise SearchCutError


class Evictor:
    """The entries under one policy. Decides only: the caller drops the victims, or gives them back with `restore`.

    `clock` is that of pins, in seconds.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float]):
        self.policy = policy
        self._clock = clock
        self._queue = policy.queue
        self.num_entries = 0  # Live ones, candidates or not.
        self._num_queued = 0
        self._num_dead = 0  # Entries in the queue that were dropped, or have moved to another evictor.
        self._expired: dict[Entry, None] = {}  # Some may have been used since, or be no candidates any more.
        self._unpopped: set[Entry] = set()  # Victims that were chosen as expired ones, and are still in the queue.
        self._parked: dict[int, dict[Entry, None]] = {}  # By the end of their pins.
        self._pin_ends: list[int] = []  # A heap: the keys of `_parked`.

    def __len__(self) -> int:
        """Queued entries, with those that were dropped since."""
        return self._num_queued

    def stored(self, entries: Sequence[Entry], stamp: int) -> None:
        self.num_entries += len(entries)
        self.policy.stored(entries, stamp)

    def renewed(self, entries: Sequence[Entry], stamp: int) -> None:
        """A put named entries that the pool had already: the call of their last use changes, its kind does not."""
        for entry in entries:
            entry.used = stamp | entry.used % TICK

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        self.policy.used(entries, stamp)

    def dropped(self, entry: Entry) -> None:
        if (queue := entry.queued) is not None:
            if entry.pinned_until or queue._expired or queue._unpopped:
                queue._forget(entry)
            else:
                queue._num_dead += 1
            entry.queued = None  # In a cycle of references an evictor without entries would stay.
        if self._num_dead > self._num_queued // 2 + MIN_DEAD_TO_SWEEP:
            removed = self._queue.sweep(SWEPT_PER_DROP, self._holds)
            self._num_queued -= removed
            self._num_dead -= removed
        self.num_entries -= 1
        self.policy.dropped(entry, self.num_entries)

    def add(self, entry: Entry) -> None:
        """Queues an entry that may have become a candidate."""
        if entry.used < 0:
            self._expired[entry] = None
        if entry.queued is not self:
            if entry.queued is not None:
                entry.queued._forget(entry)
            entry.queued = self
            self._num_queued += 1
            self._queue.push(entry)

    def expire(self, entry: Entry) -> None:
        """Has an entry chosen before others, once it is a candidate and unless it is used before."""
        entry.used = EXPIRED
        if entry.queued is self:
            self.pin_changed(entry, entry.pinned_until)  # A pin that has ended may have left it parked.
            self._expired[entry] = None

    def pin_changed(self, entry: Entry, before: int) -> None:
        """The end of an entry's pin has changed."""
        if (parked := self._parked.get(before)) and parked.pop(entry, self) is None:
            entry.queued = None
            self.add(entry)

    def _holds(self, entry: Entry) -> bool:
        return entry.live and entry.queued is self

    def _forget(self, entry: Entry) -> None:
        """An entry that is queued or parked here was dropped, or is queued elsewhere from now on."""
        if entry.pinned_until and self._parked.get(entry.pinned_until, {}).pop(entry, self) is None:
            return
        if self._expired:
            self._expired.pop(entry, None)
        if self._unpopped:
            self._unpopped.discard(entry)
        self._num_dead += 1

    def move_from(self, other: Evictor | None, num_entries: int, stamp: int) -> None:
        """Takes over the entries of a group; give those that may be candidates to `requeue`."""
        if other is not None:
            other.num_entries -= num_entries
        self.policy.stored([], stamp)
        self.num_entries += num_entries

    def requeue(self, entries: Iterable[Entry]) -> None:
        """Queues those of these entries that are candidates."""
        leaves = [entry for entry in entries if not entry.children and not entry.pending]
        for entry in sorted(leaves, key=lambda entry: entry.used):
            self.add(entry)

    def choose(self, count: int, chosen: Chosen, pinned: bool = False) -> list[Entry]:
        """Chooses up to `count` victims, children before their parents, and adds them to `chosen`, the victims so far.

        No later call chooses them again. With `pinned`, pinned ones as well, when there are no others.
        """
        victims: list[Entry] = []
        self._unpark()
        try:
            while len(victims) < count:
                # Most calls find one in the queue: no call of `_pop` for these.
                victim = None if self._expired else self._pop_queued(chosen)
                if victim is None and (victim := self._pop(chosen, pinned)) is None:
                    break
                chosen[victim] = VICTIM
                if victim.queued is self:
                    self._unpopped.add(victim)
                else:
                    self._num_dead -= 1  # `dropped` will count it, and it is not in the queue.
                    victim.queued = self  # Dropping its children before it must not queue it.
                victims.append(victim)
                parent = victim.parent
                if parent is not None and parent.live and (before := chosen.get(parent, 0)) != VICTIM:
                    chosen[parent] = before + 1
                    if parent.children == before + 1:
                        self.add(parent)
        except SearchCutError:
            self.restore(victims)
            raise
        return victims

    def restore(self, victims: Sequence[Entry]) -> None:
        """Makes victims that are not dropped after all candidates again."""
        for victim in victims:
            if victim in self._unpopped:
                self._unpopped.remove(victim)
            else:
                self._num_dead += 1
                victim.queued = None
                if victim.used >= 0 and victim.pinned_until > self._clock():
                    self._park(victim)  # In the queue, the next choice would visit it in vain again.
            self.add(victim)

    def least_worth(self, chosen: Chosen, stamp: int) -> float | None:
        """What the next victim is worth; None if there is no candidate but pinned ones."""
        victim = self._next_victim(chosen)
        if victim is None:
            return None
        return -math.inf if victim.used < 0 else self.policy.worth(victim, stamp)

    @property
    def first_pin_end(self) -> float:
        """No pin of a parked entry ends before this time; infinite if none is parked."""
        return self._pin_ends[0] if self._pin_ends else math.inf

    def oldest_stamp(self, chosen: Chosen) -> int | None:
        """A stamp before which no candidate was used; None if there is no candidate."""
        return self.policy.oldest_stamp(lambda: self._next_victim(chosen))

    def _next_victim(self, chosen: Chosen) -> Entry | None:
        if (victim := self._pop(chosen)) is not None:
            self.add(victim)
        return victim

    def _pop(self, chosen: Chosen, pinned: bool = False) -> Entry | None:
        if self._expired and (victim := self._pop_expired(chosen)) is not None:
            return victim
        while True:
            if (victim := self._pop_queued(chosen)) is not None:
                return victim
            if not self._unpark():
                return self._pop_parked(chosen) if pinned else None

    def _pop_expired(self, chosen: Chosen) -> Entry | None:
        """An expired candidate, which stays in the queue."""
        while self._expired:
            entry, _ = self._expired.popitem()
            if entry.used < 0 and self._holds(entry) and _can_go(entry, chosen):
                return entry
            chosen.visited_in_vain()
        return None

    def _pop_queued(self, chosen: Chosen) -> Entry | None:
        while (item := self._queue.pop()) is not None:
            stamp, entry = item
            self._num_queued -= 1
            if not self._holds(entry):
                self._num_dead -= 1
            elif self._unpopped and entry in self._unpopped:
                self._unpopped.remove(entry)
                self._num_dead -= 1
                continue  # A victim already: were it counted, a cut choice would not get further than the one before.
            else:
                entry.queued = None
                if _can_go(entry, chosen):
                    if entry.used != stamp:
                        self.add(entry)
                    elif entry.pinned_until and entry.pinned_until > self._clock():
                        self._park(entry)
                    else:
                        return entry
            chosen.visited_in_vain()
        return None

    def _park(self, entry: Entry) -> None:
        ends_at = entry.pinned_until
        if (parked := self._parked.get(ends_at)) is None:
            parked = self._parked[ends_at] = {}
            heapq.heappush(self._pin_ends, ends_at)
        parked[entry] = None
        entry.queued = self

    def _unpark(self) -> bool:
        """Queues some of the parked entries whose pin has ended; False if there are none."""
        if not self._pin_ends or self._pin_ends[0] > (now := self._clock()):
            return False
        num_left = UNPARKED_AT_ONCE
        while num_left and self._pin_ends and self._pin_ends[0] <= now:
            parked = self._parked[self._pin_ends[0]]
            while num_left and parked:
                entry, _ = parked.popitem()
                entry.queued = None
                self.add(entry)
                num_left -= 1
            if not parked:
                del self._parked[heapq.heappop(self._pin_ends)]
        return True

    def _pop_parked(self, chosen: Chosen) -> Entry | None:
        """A parked candidate, of the pin that ends first."""
        while self._pin_ends:
            parked = self._parked[self._pin_ends[0]]
            while parked:
                entry, _ = parked.popitem()
                entry.queued = None
                if _can_go(entry, chosen):
                    return entry
                chosen.visited_in_vain()
            del self._parked[heapq.heappop(self._pin_ends)]
        return None


def _can_go(entry: Entry, chosen: Chosen) -> bool:
    """Whether an entry is neither leased nor being written, and a leaf once its chosen children are dropped."""
    return not (entry.leases or entry.pending) and entry.children == chosen.get(entry, 0)
