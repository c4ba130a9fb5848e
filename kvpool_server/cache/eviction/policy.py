"""What an eviction policy implements: what it learns from uses, and the order in which candidates are evicted.

`PrefixLRU` is the smallest one. `Evictor` owns a policy and its queue, and sees to what all policies share: candidates
are leaves, and nothing that is leased or being written is evicted.

A stamp is `call * TICK + kind`: the number of the pool's call that used an entry and, if the policy tells uses apart,
the kind of use. So stamps order uses by call, whatever their kinds.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvpool_server.cache.entry import Entry

TICK = 64
"""Stamps from one call of the pool to the next."""
EXPIRED = -TICK
"""In place of the stamp of an entry that clients need no more; its next use replaces it. It has the kind 0."""


class VictimQueue(ABC):
    """Candidates in the order of their eviction. A use of an entry does not move it: `Evictor` queues it again."""

    @abstractmethod
    def push(self, entry: Entry) -> None:
        """Queues an entry under the stamp of its last use."""

    @abstractmethod
    def pop(self) -> tuple[int, Entry] | None:
        """Removes the next entry; returns it with the stamp under which it was queued. None: the queue is empty."""

    @abstractmethod
    def sweep(self, count: int, keep: Callable[[Entry], bool]) -> int:
        """Visits `count` queued entries, others with each call; removes those not to `keep`, and returns how many."""


class Policy(ABC):
    """An eviction policy for the entries of one slot size.

    `stored` and `used` must set `entry.used` to a stamp of the call, whatever the policy's order: `Donations`, the
    demoter and `Evictor` read it. A queue in another order keeps keys of its own, as `HitDensity`'s does.

    Attributes:
        summary: what it evicts, in a few words, for the help of `--policy`.
        queue: its candidates; a subclass sets it.
    """

    summary: ClassVar[str]
    queue: VictimQueue

    def stored(self, entries: Sequence[Entry], stamp: int) -> None:
        """New entries: consecutive blocks of one prefix. Without entries the call only tells the time."""
        for entry in entries:
            entry.used = stamp

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        """A lookup for a load has hit these entries: the leading blocks of a prefix, maybe with later ones of it."""
        for entry in entries:
            entry.used = stamp

    def dropped(self, entry: Entry, num_entries: int) -> None:  # noqa: B027 (most policies ignore it)
        """An entry was evicted or removed; `num_entries` remain."""

    def learned(self) -> bytes:
        """What it has learned, for `relearn` of another process's policy; empty: nothing that outlives it."""
        return b""

    def relearn(self, learned: bytes) -> None:  # noqa: B027 (most policies learn nothing)
        """Goes on from what another one had learned. Raises ValueError if that is nothing of this kind."""

    @abstractmethod
    def worth(self, entry: Entry, stamp: int) -> float:
        """What keeping a candidate is worth at a stamp; comparable between instances of the policy."""

    @abstractmethod
    def oldest_stamp(self, next_victim: Callable[[], Entry | None]) -> int | None:
        """A stamp before which no candidate was used; None if there is no candidate. May find the next victim."""


class PrefixLRU(Policy):
    """Evicts the least recently used block; of the blocks that one call used, the one that became a candidate first.

    In a prefix, blocks become candidates from its end, so its deepest block is evicted first.
    """

    summary = "the least recently used"

    def __init__(self) -> None:
        self.queue = StampHeap()

    def worth(self, entry: Entry, stamp: int) -> float:
        return entry.used

    def oldest_stamp(self, next_victim: Callable[[], Entry | None]) -> int | None:
        victim = next_victim()
        return None if victim is None else victim.used


class StampHeap(VictimQueue):
    """Candidates by stamp, in two heaps: a sweep moves entries from `_unswept`, item by item, to the other."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._unswept: list[tuple[int, int, Entry]] = []
        self._ties = itertools.count()

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.used, next(self._ties), entry))

    def pop(self) -> tuple[int, Entry] | None:
        heap = self._heap
        if self._unswept and (not heap or self._unswept[0] < heap[0]):
            heap = self._unswept
        if not heap:
            return None
        stamp, _, entry = heapq.heappop(heap)
        return stamp, entry

    def sweep(self, count: int, keep: Callable[[Entry], bool]) -> int:
        if not self._unswept:
            self._unswept, self._heap = self._heap, self._unswept
        removed = 0
        for _ in range(min(count, len(self._unswept))):
            item = self._unswept.pop()  # What remains of a heap without its last item is a heap.
            if keep(item[2]):
                heapq.heappush(self._heap, item)
            else:
                removed += 1
        return removed
