"""What every eviction policy shares: only leaves go, and nobody under a lease.

Only an entry without live children is a candidate, so a prefix is eaten from its end and what remains stays usable.
Queues are lazy: an entry is in one at most once, under the stamp it had when it was queued; a use costs nothing here,
and whoever comes up with an old stamp is queued again with its new one.

Source: the leaf-first order is that of radix-tree caches (SGLang, RadixAttention).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvpool_server.storage.entry import Entry

TICK = 64
"""Stamps grow by so much from call to call: what is below says of which kind a use was, for policies that ask."""

SWEEP_AT_LEAST = 1_000


class Policy(ABC):
    """The candidates of one slot size, in an order. Decides only: whoever asks drops the entries.

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
            self._num_queued = self._sweep()
            self._num_dead = 0

    def add(self, entry: Entry) -> None:
        """Queues an entry that may have become a candidate."""
        if not entry.queued:
            entry.queued = True
            self._num_queued += 1
            self._push(entry)

    # What it is asked

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
        for victim in victims:
            victim.queued = True  # Nobody is to queue it again while its children are dropped before it.
        self._num_dead -= len(victims)  # They are counted as they are dropped, and are in no queue.
        return victims

    # What differs

    @abstractmethod
    def oldest_stamp(self) -> int | None:
        """No candidate was used before this; None if there is none. Not necessarily the next victim's."""

    @abstractmethod
    def _push(self, entry: Entry) -> None:
        """Takes an entry in under its present stamp."""

    @abstractmethod
    def _pop_next(self) -> tuple[int, Entry] | None:
        """Gives up the entry whose turn it is by the stamps it was pushed with, and that stamp."""

    @abstractmethod
    def _sweep(self) -> int:
        """Throws dead entries out; returns how many stay."""

    def _pop(self, children_gone: dict[Entry, int], aside: list[Entry]) -> Entry | None:
        # Leased entries are put aside, to be queued again by the caller; those that are no candidates leave.
        while (item := self._pop_next()) is not None:
            stamp, entry = item
            entry.queued = False
            self._num_queued -= 1
            self._num_dead -= not entry.live
            if not entry.live or entry.pending or entry.children != children_gone.get(entry, 0):
                continue
            if entry.used != stamp:
                self.add(entry)
            elif entry.leases:
                aside.append(entry)
            else:
                return entry
        return None

    def _requeue(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.add(entry)
