"""Lowest hit density first: whose slot will serve the fewest hits for the time that it is taken.

A conversation's blocks are asked for again when its next turn comes, or never. How long that takes and how likely it is
depends on what is known of it: how many turns there have been, how much the last one added, and how long ago that was.
So blocks are told apart by kind, and for each kind the policy learns from what it sees how many of those that have
waited for so long are still asked for, and when (`hazards`). What has waited longer than such blocks ever do goes, and
what is about to be asked for stays, though it was used before what has only just come.

Some of the blocks that were evicted are remembered for a while, so that it learns also what it could not keep.

Candidates are kept in buckets by kind and time, so that a victim is found without looking at the others.

Source: N. Beckmann, H. Chen, A. Cidon, LHD: improving cache hit rate by maximizing hit density, NSDI 2018; ranking by
the best horizon is J. Gittins's index. The kinds, and learning from evicted blocks, are ours.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction.base import TICK, Policy
from kvpool_server.cache.eviction.hit_density_model import PERIOD_CALLS, HazardModel

NUM_KINDS = TICK
"""What a stamp says of a use, in the bits below a tick: turn, step, and whether it was the last block of a store.

The step is the logarithm of how many blocks a store added; 0 for those that a reader found."""
TAIL = 1
_STEP_SHIFT, _STEP_MASK = 1, 7
_TURN_SHIFT, _TURN_MASK = 4, 3
MAX_STEP, MAX_TURN = 6, 3

_DEPTHS = [1] + [base << shift for shift in range(24) for base in (2, 3)]
SAMPLES = {depth: after - depth for depth, after in itertools.pairwise(_DEPTHS)}
"""Of a prefix's blocks those at depths 1, 2, 3, 4, 6, 8, 12, 16, 24, ... teach, for all until the next: the others have
the same fate, and memory is dear."""
GHOSTS_A_BLOCK, MIN_GHOSTS = 0.5, 1_000
"""Evicted blocks that are remembered, for each that is there: twice as many were no better."""
EPOCH_CALLS = 4
"""Of a bucket, to begin with: twice as many whenever there are too many buckets."""
MAX_BUCKETS = 512
BUCKETS_RANKED_A_CALL = 8
"""To rank them all is not to cost a call more than this."""


class HitDensity(Policy):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0  # In calls.
        self._epoch_calls = EPOCH_CALLS
        self._buckets: dict[tuple[int, int], deque[tuple[int, Entry]]] = {}
        self._ranking: list[tuple[float, tuple[int, int]]] = []  # Ascending by negated density: the next victims last.
        self._rank_at = 0
        self._ghosts: OrderedDict[tuple[Group, bytes], int] = OrderedDict()
        self._num_resident = 0
        self._hazards = HazardModel(NUM_KINDS)
        self._learned_at = 0

    # What the pool tells

    def stored(self, entries: Sequence[Entry], parent: Entry | None, stamp: int) -> None:
        self._pass_time(stamp)
        turn = step = 0
        if parent is not None:
            turn = parent.used >> _TURN_SHIFT & _TURN_MASK
            step = (1 << (parent.used >> _STEP_SHIFT & _STEP_MASK)) - 1
            if parent.used & TAIL:
                if (weight := SAMPLES.get(parent.depth)) is not None:
                    kind = parent.used % TICK
                    self._hazards.changed(kind, kind & ~TAIL, parent.used // TICK, self._now, weight)
                parent.used &= ~TAIL
        step = min((step + len(entries)).bit_length() - 1, MAX_STEP) << _STEP_SHIFT
        for entry in entries:
            if (
                entry.depth in SAMPLES
                and (ghost := self._ghosts.pop((entry.group, entry.block_hash), None)) is not None
            ):
                self._hazards.asked(ghost % TICK, ghost // TICK, self._now, SAMPLES[entry.depth])
                turn = max(turn, min((ghost >> _TURN_SHIFT & _TURN_MASK) + 1, MAX_TURN))
        last = entries[-1]
        for entry in entries:
            kind = turn << _TURN_SHIFT | step | (entry is last)
            entry.used = stamp | kind
            if (weight := SAMPLES.get(entry.depth)) is not None:
                self._hazards.began(kind, self._now, weight)
        self._num_resident += len(entries)

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        if not entries:
            return
        self._pass_time(stamp)
        last = entries[-1]
        # Where prefixes part, a shared beginning ends: what follows is a new conversation.
        turn = min((last.used >> _TURN_SHIFT & _TURN_MASK) + 1, MAX_TURN) if last.children <= 1 else 0
        kind = turn << _TURN_SHIFT
        first = entries[0].depth
        for depth, weight in SAMPLES.items():
            if depth - first >= len(entries):
                break
            if depth >= first:
                entry = entries[depth - first]
                self._hazards.asked(entry.used % TICK, entry.used // TICK, self._now, weight)
                self._hazards.began(kind, self._now, weight)
        stamp |= kind
        for entry in entries:
            entry.used = stamp

    def renewed(self, entries: Sequence[Entry], stamp: int) -> None:
        for entry in entries:
            entry.used = stamp | entry.used % TICK

    def dropped(self, entry: Entry) -> None:
        super().dropped(entry)
        self._num_resident -= 1
        if entry.depth in SAMPLES:
            self._ghosts[entry.group, entry.block_hash] = entry.used
            while len(self._ghosts) > MIN_GHOSTS + GHOSTS_A_BLOCK * self._num_resident:
                self._ghosts.popitem(last=False)

    def leave(self, groups: Collection[Group]) -> None:
        super().leave(groups)
        self._num_resident -= sum(len(group.index) for group in groups)

    def join(self, group: Group, stamp: int) -> None:
        self._pass_time(stamp)
        self._num_resident += len(group.index)
        super().join(group, stamp)

    def _pass_time(self, stamp: int) -> None:
        self._now = stamp // TICK
        if self._now - self._learned_at >= PERIOD_CALLS:
            self._learned_at = self._now
            self._hazards.learn(self._now)
            self._rank_at = self._now

    # Candidates

    def oldest_stamp(self, gone: dict[Entry, int]) -> int | None:
        epochs = [epoch for (epoch, _), bucket in self._buckets.items() if bucket]
        return min(epochs) * self._epoch_calls * TICK if epochs else None

    def _push(self, entry: Entry) -> None:
        key = (entry.used // TICK // self._epoch_calls, entry.used % TICK)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = deque()
            bisect.insort(self._ranking, (-self._density(key), key))
            if len(self._buckets) > 2 * MAX_BUCKETS:
                self._rank()  # Also where nothing is evicted: the first eviction is not to pay for all.
                key = (entry.used // TICK // self._epoch_calls, entry.used % TICK)
                bucket = self._buckets[key]
        if bucket and entry.used <= bucket[0][0]:
            bucket.appendleft((entry.used, entry))
        else:
            bucket.append((entry.used, entry))

    def _pop_next(self) -> tuple[int, Entry] | None:
        if self._now >= self._rank_at:
            self._rank()
        while self._ranking:
            key = self._ranking[-1][1]
            bucket = self._buckets[key]
            if bucket:
                return bucket.popleft()
            del self._buckets[key]
            self._ranking.pop()
        return None

    def _rank(self) -> None:
        while len(self._buckets) > MAX_BUCKETS:
            self._coarsen()
        self._rank_at = self._now + max(self._epoch_calls, len(self._buckets) // BUCKETS_RANKED_A_CALL)
        self._ranking = sorted((-self._density(key), key) for key in self._buckets)

    def _density(self, key: tuple[int, int]) -> float:
        epoch, kind = key
        return self._hazards.density(kind, min(epoch * self._epoch_calls, self._now), self._now)

    def _coarsen(self) -> None:
        """Longer epochs, so that there are fewer buckets."""
        self._epoch_calls *= 2
        finer, self._buckets = self._buckets, {}
        for epoch, kind in sorted(finer):
            self._buckets.setdefault((epoch // 2, kind), deque()).extend(finer[epoch, kind])

    def _worth(self, entry: Entry, stamp: int) -> float:
        self._pass_time(stamp)  # It may not have been called for long.
        return self._density((entry.used // TICK // self._epoch_calls, entry.used % TICK))

    def _sweep(self, stays: Callable[[Entry], bool]) -> int:
        self._buckets = {
            key: kept
            for key, bucket in self._buckets.items()
            if (kept := deque(item for item in bucket if stays(item[1])))
        }
        self._rank()
        return sum(map(len, self._buckets.values()))
