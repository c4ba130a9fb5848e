"""What every eviction policy shares: only leaves go, and nobody under a lease.

Only an entry without live children is a candidate, so a prefix is eaten from its end and what remains stays usable.
Queues are lazy: an entry is in one at most once, under the stamp it had when it was queued; a use costs nothing here,
and whoever comes up with an old stamp is queued again with its new one.

Source: the leaf-first order is that of radix-tree caches (SGLang, RadixAttention).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from kvpool_server.cache.entry import Entry, Group

TICK = 64
"""Stamps grow by so much from call to call: what is below says of which kind a use was, for policies that ask."""

SWEEP_AT_LEAST = 1_000
CHOSEN = -1
"""No entry has so many children."""


class Policy(ABC):
    """Candidates of one slot size, in an order. Decides only: whoever asks drops the entries.

    Stamps are ticks of the pool's calls, multiples of `TICK`; entries that were used by one call may have the same.
    """

    def __init__(self) -> None:
        self._num_queued = 0
        self._num_dead = 0

    def __len__(self) -> int:
        """Queued entries, dead ones among them."""
        return self._num_queued

    # What the pool tells

    def stored(self, entries: Sequence[Entry], parent: Entry | None, stamp: int) -> None:
        """New entries of one prefix, one after the other, behind `parent` if that is there."""
        self.renewed(entries, stamp)

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        """A reader wants these entries, the leading ones of one prefix and maybe some behind them."""
        self.renewed(entries, stamp)

    def renewed(self, entries: Sequence[Entry], stamp: int) -> None:
        """Somebody has stored again what is there."""
        for entry in entries:
            entry.used = stamp

    def dropped(self, entry: Entry) -> None:
        """An entry, maybe queued, is gone. Dead ones are swept before they outnumber the others."""
        self._num_dead += entry.queued
        if self._num_dead > self._num_queued // 2 + SWEEP_AT_LEAST:
            self._num_queued = self._sweep(lambda entry: entry.live)
            self._num_dead = 0

    def add(self, entry: Entry) -> None:
        """Queues an entry that may have become a candidate."""
        if not entry.queued:
            entry.queued = True
            self._num_queued += 1
            self._push(entry)

    def leave(self, groups: Collection[Group]) -> None:
        """The entries of some groups go over to another policy. Looks at all that are queued."""
        self._num_queued = self._sweep(lambda entry: entry.live and entry.group not in groups)
        self._num_dead = 0
        for group in groups:
            for entry in group.index.values():
                entry.queued = False

    def join(self, group: Group, stamp: int) -> None:
        """The entries of a group come over from another policy."""
        for entry in sorted(group.index.values(), key=lambda entry: entry.used):
            if not entry.children and not entry.pending:
                self.add(entry)

    # What it is asked

    def choose(self, count: int, gone: dict[Entry, int]) -> list[Entry]:
        """Chooses up to `count` entries, to be dropped in this order, or to be given back with `restore`.

        Args:
            gone: how many children of an entry were chosen already, and `CHOSEN` for who was; brought up to date.
        """
        chosen: list[Entry] = []
        aside: list[Entry] = []
        while len(chosen) < count:
            victim = self._pop(gone, aside)
            if victim is None:
                break
            gone[victim] = CHOSEN
            victim.queued = True  # Nobody is to queue it again while its children are dropped before it.
            chosen.append(victim)
            parent = victim.parent
            if parent is not None and parent.live and (before := gone.get(parent, 0)) != CHOSEN:
                gone[parent] = before + 1
                if parent.children == before + 1:
                    self.add(parent)
        self._requeue(aside)
        self._num_dead -= len(chosen)  # They are counted as they are dropped, and are in no queue.
        return chosen

    def restore(self, chosen: Sequence[Entry]) -> None:
        """Takes back what was chosen and is not dropped after all."""
        self._num_dead += len(chosen)
        for entry in chosen:
            entry.queued = False
        self._requeue(chosen)

    def least_worth(self, gone: dict[Entry, int], stamp: int) -> float | None:
        """What the next victim is worth, in a measure that all policies of a kind share; None if there is none."""
        aside: list[Entry] = []
        victim = self._pop(gone, aside)
        worth = None if victim is None else self._worth(victim, stamp)
        self._requeue(aside if victim is None else [victim, *aside])
        return worth

    # What differs

    @abstractmethod
    def oldest_stamp(self, gone: dict[Entry, int]) -> int | None:
        """No candidate was used before this; None if there is none. Not necessarily the next victim's. See `choose`."""

    @abstractmethod
    def _push(self, entry: Entry) -> None:
        """Takes an entry in under its present stamp."""

    @abstractmethod
    def _pop_next(self) -> tuple[int, Entry] | None:
        """Gives up the entry whose turn it is by the stamps it was pushed with, and that stamp."""

    @abstractmethod
    def _sweep(self, stays: Callable[[Entry], bool]) -> int:
        """Throws out who does not stay; returns how many do."""

    @abstractmethod
    def _worth(self, entry: Entry, stamp: int) -> float:
        """What a candidate is worth at a stamp."""

    def _pop(self, gone: dict[Entry, int], aside: list[Entry]) -> Entry | None:
        # Leased entries are put aside, to be queued again by the caller; those that are no candidates leave.
        while (item := self._pop_next()) is not None:
            stamp, entry = item
            entry.queued = False
            self._num_queued -= 1
            self._num_dead -= not entry.live
            if not entry.live or entry.pending or entry.children != gone.get(entry, 0):
                continue
            if entry.used != stamp:
                self.add(entry)
            elif entry.leases:
                aside.append(entry)
            else:
                return entry
        return None

    def _requeue(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.add(entry)
