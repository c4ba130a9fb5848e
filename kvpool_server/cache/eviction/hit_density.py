"""Hit density: evicts the block whose slot is expected to serve the fewest hits for the time that it stays occupied.

Sources:
- N. Beckmann, H. Chen, A. Cidon, LHD: Improving Cache Hit Rate by Maximizing Hit Density, NSDI 2018: evict the lowest
  ratio of expected hits to expected time in the cache, learned by class and age.
- J. Gittins, Bandit Processes and Dynamic Allocation Indices, 1979: rank by the best ratio of reward to time over all
  horizons. It replaces LHD's estimate of when a block will be evicted.
- E. Kaplan, P. Meier, Nonparametric Estimation from Incomplete Observations, 1958: learn from waits not yet ended, too.
The kinds, the cohorts and learning from blocks after their eviction are ours.

The algorithm. A block **waits** from each use until its next hit; its age is how long it has waited, in calls of the
pool. The next turn of a conversation hits its blocks, or there is none. How likely that is, and when, depends on what
is known of the conversation, so each wait is of a **kind** (below).

1. Learn (`hit_density_model`): for each kind k, S_k(a), the share of waits that last longer than age a.
2. Rank: the hit density of a block of kind k and age a, in hits a call, is

                          S_k(a) - S_k(h)         hits expected until age h
     D_k(a) =  max     ---------------------  =  -------------------------------
              h > a     sum of S_k(t), t=a..h     calls that the slot is occupied

   It rises as the usual time of the next turn comes near and falls once that has passed. So a block that is due
   soon outlives one that was used after it.
3. Evict the candidate of the lowest density (`DensityQueue`).

A block that was evicted stays known for a while as a **ghost**: a put that stores it again ends its wait as a hit would
have done. Without ghosts the policy would never learn of hits that come later than its evictions.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.hit_density_model import NUM_PLACES, Ghosts, HitDensityModel
from kvpool_server.cache.eviction.policy import TICK, Policy, VictimQueue

FIRST_EPOCH_CALLS = 4
"""Length of an epoch at first, in calls: the width of the model's first age bin. It doubles with too many buckets."""
MAX_BUCKETS = 512
"""Buckets after a ranking; up to twice as many before it. Bounds a ranking to about half a millisecond."""
BUCKETS_RANKED_PER_CALL = 8
"""Of n buckets the ranking lives n / 8 calls or longer, so that on average a call pays for 8 densities at most."""

BucketKey = tuple[int, int]
"""(Epoch of the last use, kind)."""

# A kind has six bits, which are the part of a stamp below TICK:
#   bits 4 and 5: turn, how many hits the conversation has had, up to MAX_TURN.
#   bits 1 to 3: growth, log2 of how many blocks the turn has added, up to MAX_GROWTH; 0 after a hit.
#   bit 0: tail, set for the last block of a conversation that has had no hit since it was stored.
NUM_KINDS = TICK
TAIL = 1
_GROWTH_SHIFT, _GROWTH_MASK = 1, 7
_TURN_SHIFT, _TURN_MASK = 4, 3
MAX_TURN = 3
"""Largest turn, which two bits hold. Later turns count as this one."""
MAX_GROWTH = 6
"""Largest growth: 64 blocks or more."""
_DEPTHS = [1] + [base << shift for shift in range(24) for base in (2, 3)]
SAMPLES = {depth: after - depth for depth, after in itertools.pairwise(_DEPTHS)}
"""Depth in a prefix (its first block has depth 0) -> weight, in blocks. Only blocks at depths 1, 2, 3, 4, 6, 8, 12, 16,
24, ... are observed, each for all blocks up to the next: they share the prefix's fate, and observing all would cost
time and memory in proportion to its length."""
GHOSTS_PER_ENTRY = 0.5
"""Ghosts for each entry of the policy. On the Mooncake trace twice as many gave no more hits."""
MAX_FORGOTTEN = 8
"""Ghosts that are forgotten at a time: their number follows that of the entries, and one call pays for few."""
MIN_GHOSTS = 1_000
"""Ghosts that are kept however few entries there are, so that a small partition learns, too."""


class Bucket:
    """Candidates of about the same density, those that were queued longest first.

    A bucket takes over another's candidates as they are, in a deque of their own: moving millions would take long.
    """

    __slots__ = ("_deques",)

    def __init__(self) -> None:
        self._deques: list[deque[tuple[int, Entry]]] = []  # None is empty.

    def __bool__(self) -> bool:
        return bool(self._deques)

    def __len__(self) -> int:
        return sum(map(len, self._deques))

    def push(self, entry: Entry) -> None:
        if not self._deques:
            self._deques.append(deque([(entry.used, entry)]))
        elif entry.used <= self._deques[0][0][0]:
            self._deques[0].appendleft((entry.used, entry))
        else:
            self._deques[-1].append((entry.used, entry))

    def pop(self) -> tuple[int, Entry]:
        first = self._deques[0]
        item = first.popleft()
        if not first:
            del self._deques[0]
        return item

    def rotate(self, keep: Callable[[Entry], bool]) -> bool:
        """Puts the first candidate behind the last one; False if `keep` is, and the candidate has been removed."""
        item = self.pop()
        if not keep(item[1]):
            return False
        if not self._deques:
            self._deques.append(deque())
        self._deques[-1].append(item)
        return True

    def extend(self, other: Bucket) -> None:
        self._deques += other._deques


class DensityQueue(VictimQueue):
    """Candidates in buckets of one kind and one epoch each, the bucket of lowest density first.

    Blocks of one kind that were used at about the same time have about the same density. So a victim is found by
    ranking buckets, of which there are at most some hundred, without visiting the other candidates. Densities change
    with time and with what the model learns; the ranking is made anew when an epoch has passed, and after the model has
    learned. The policy sets the time, `now`, in calls of the pool.
    """

    def __init__(self, model: HitDensityModel) -> None:
        self.now = 0
        self.rank_at = 0  # The time of the next ranking.
        self._model = model
        self._epoch_calls = FIRST_EPOCH_CALLS
        self._buckets: dict[BucketKey, Bucket] = {}
        self._unswept: list[BucketKey] = []
        self._num_unswept = 0  # Items of the bucket that is being swept, `_unswept[-1]`, which are still to be visited.
        self._ranking: list[tuple[float, BucketKey]] = []  # Ascending by negated density: the lowest density is last.

    def push(self, entry: Entry) -> None:
        key = self._key(entry)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket()
            bisect.insort(self._ranking, (-self._bucket_density(key), key))
            if len(self._buckets) > 2 * MAX_BUCKETS:
                self._rank()  # Where nothing is evicted, no `pop` does it, and the first eviction would pay for all.
                bucket = self._buckets[self._key(entry)]
        bucket.push(entry)

    def pop(self) -> tuple[int, Entry] | None:
        if self.now >= self.rank_at:
            self._rank()
        while self._ranking:
            key = self._ranking[-1][1]
            bucket = self._buckets[key]
            if bucket:
                return bucket.pop()
            del self._buckets[key]
            self._ranking.pop()
        return None

    def sweep(self, count: int, keep: Callable[[Entry], bool]) -> int:
        removed = 0
        for _ in range(count):
            bucket = self._buckets.get(self._unswept[-1]) if self._unswept else None
            if not bucket or not self._num_unswept:
                self._sweep_next_bucket()
                continue
            self._num_unswept -= 1
            removed += not bucket.rotate(keep)
        return removed

    def _sweep_next_bucket(self) -> None:
        if self._unswept:
            self._unswept.pop()
        if not self._unswept:
            self._unswept = list(self._buckets)
        bucket = self._buckets.get(self._unswept[-1]) if self._unswept else None
        self._num_unswept = len(bucket) if bucket else 0

    def density(self, entry: Entry) -> float:
        """Hits a call expected of the slot of an entry: the density of its bucket."""
        return self._bucket_density(self._key(entry))

    def oldest_stamp(self) -> int | None:
        """The start of the oldest epoch; None if the queue is empty."""
        epochs = [epoch for (epoch, _), bucket in self._buckets.items() if bucket]
        return min(epochs) * self._epoch_calls * TICK if epochs else None

    def _key(self, entry: Entry) -> BucketKey:
        return entry.used // TICK // self._epoch_calls, entry.used % TICK

    def _bucket_density(self, key: BucketKey) -> float:
        epoch, kind = key
        return self._model.density(kind, min(epoch * self._epoch_calls, self.now), self.now)

    def _rank(self) -> None:
        while len(self._buckets) > MAX_BUCKETS:
            self._merge_epochs()
        self.rank_at = self.now + max(self._epoch_calls, len(self._buckets) // BUCKETS_RANKED_PER_CALL)
        self._ranking = sorted((-self._bucket_density(key), key) for key in self._buckets)

    def _merge_epochs(self) -> None:
        self._epoch_calls *= 2
        finer, self._buckets = self._buckets, {}
        for epoch, kind in sorted(finer):
            self._buckets.setdefault((epoch // 2, kind), Bucket()).extend(finer[epoch, kind])


class HitDensity(Policy):
    """Evicts the block of the lowest hit density."""

    summary = "the fewest hits expected for the time in the arena, as learned from the traffic"

    def __init__(self) -> None:
        self._model = HitDensityModel(NUM_KINDS)
        self.queue: DensityQueue = DensityQueue(self._model)
        self._ghosts = Ghosts()

    def stored(self, entries: Sequence[Entry], stamp: int) -> None:
        now = self._advance(stamp)
        if not entries:
            return
        turn = num_before = 0
        parent = entries[0].parent
        if parent is not None:
            turn = turn_of(parent)
            num_before = (1 << (parent.used >> _GROWTH_SHIFT & _GROWTH_MASK)) - 1
            if parent.used & TAIL:
                if (weight := SAMPLES.get(parent.depth)) is not None:
                    kind = parent.used % TICK
                    self._model.reclassify(kind, kind & ~TAIL, parent.used // TICK, now, weight)
                parent.used &= ~TAIL
        growth = min((num_before + len(entries)).bit_length() - 1, MAX_GROWTH)
        for entry in entries:
            if entry.depth not in SAMPLES:
                continue
            if (ghost := self._ghosts.pop(*_ghost(entry))) is not None:
                self._model.hit(ghost % TICK, ghost // TICK, now, SAMPLES[entry.depth])
                turn = max(turn, min((ghost >> _TURN_SHIFT & _TURN_MASK) + 1, MAX_TURN))
        last = entries[-1]
        for entry in entries:
            kind = turn << _TURN_SHIFT | growth << _GROWTH_SHIFT | (entry is last)
            entry.used = stamp | kind
            if (weight := SAMPLES.get(entry.depth)) is not None:
                self._model.start(kind, now, weight)

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        if not entries:
            return
        now = self._advance(stamp)
        last = entries[-1]
        # Several children: the hit ends in a beginning that conversations share, and what follows is a new one.
        turn = min(turn_of(last) + 1, MAX_TURN) if last.children <= 1 else 0
        kind = turn << _TURN_SHIFT
        first = entries[0].depth
        observed: dict[int, list[int]] = {}  # Weights by stamp: mostly one stamp, and the model is told of it once.
        for depth, weight in SAMPLES.items():
            if depth - first >= len(entries):
                break
            if depth >= first:
                observed.setdefault(entries[depth - first].used, []).append(weight)
        for used, weights in observed.items():
            if used >= 0:  # Else its wait was ended by a hint, and is not what others are like.
                self._model.hit(used % TICK, used // TICK, now, sum(weights), len(weights))
            self._model.start(kind, now, sum(weights), len(weights))
        stamp |= kind
        for entry in entries:
            entry.used = stamp

    def dropped(self, entry: Entry, num_entries: int) -> None:
        if entry.depth in SAMPLES and entry.used >= 0:
            self._ghosts.add(*_ghost(entry), entry.used)
            for _ in range(MAX_FORGOTTEN):
                if len(self._ghosts) <= MIN_GHOSTS + GHOSTS_PER_ENTRY * num_entries:
                    break
                self._ghosts.forget_one()

    def learned(self) -> bytes:
        return self._model.learned()

    def relearn(self, learned: bytes) -> None:
        self._model.relearn(learned)

    def worth(self, entry: Entry, stamp: int) -> float:
        self._advance(stamp)  # The policy may not have been called for long.
        return self.queue.density(entry)

    def oldest_stamp(self, next_victim: Callable[[], Entry | None]) -> int | None:
        return self.queue.oldest_stamp()  # The next victim need not be the oldest candidate.

    def _advance(self, stamp: int) -> int:
        """Sets the time to a stamp's call, and returns it."""
        now = self.queue.now = stamp // TICK
        if self._model.learn_if_due(now):
            self.queue.rank_at = now
        return now


def _ghost(entry: Entry) -> tuple[int, int]:
    """The place of a block's ghost, and the block as a number."""
    name = entry.block_hash
    return (name[-2] << 8 | name[-1]) % NUM_PLACES, hash((entry.group, name))


def turn_of(entry: Entry) -> int:
    """How many hits the conversation of an entry has had, up to MAX_TURN."""
    return entry.used >> _TURN_SHIFT & _TURN_MASK
