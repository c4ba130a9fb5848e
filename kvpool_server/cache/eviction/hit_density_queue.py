"""Candidates of the hit-density policy: in buckets of one kind and one epoch each, the bucket of lowest density first.

Blocks of one kind that were used at about the same time have about the same density. So a victim is found by ranking
buckets, of which there are at most some hundred, without visiting the other candidates. Densities change with time and
with what the model learns; the ranking is made anew when an epoch has passed, and after the model has learned.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import TICK, VictimQueue
from kvpool_server.cache.eviction.hit_density_model import HitDensityModel

FIRST_EPOCH_CALLS = 4
"""Length of an epoch at first, in calls: the width of the model's first age bin. It doubles with too many buckets."""
MAX_BUCKETS = 512
"""Buckets after a ranking; up to twice as many before it. Bounds a ranking to about half a millisecond."""
BUCKETS_RANKED_PER_CALL = 8
"""Of n buckets the ranking lives n / 8 calls or longer, so that on average a call pays for 8 densities at most."""

BucketKey = tuple[int, int]
"""(Epoch of the last use, kind)."""


class DensityQueue(VictimQueue):
    """See the module.

    Attributes:
        now: the time, in calls of the pool; the policy sets it.
        rank_at: the time of the next ranking.
    """

    def __init__(self, model: HitDensityModel) -> None:
        self.now = 0
        self.rank_at = 0
        self._model = model
        self._epoch_calls = FIRST_EPOCH_CALLS
        self._buckets: dict[BucketKey, deque[tuple[int, Entry]]] = {}
        self._ranking: list[tuple[float, BucketKey]] = []  # Ascending by negated density: the lowest density is last.

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def push(self, entry: Entry) -> None:
        key = self._key(entry)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = deque()
            bisect.insort(self._ranking, (-self._bucket_density(key), key))
            if len(self._buckets) > 2 * MAX_BUCKETS:
                self._rank()  # Where nothing is evicted, no `pop` does it, and the first eviction would pay for all.
                bucket = self._buckets[self._key(entry)]
        if bucket and entry.used <= bucket[0][0]:
            bucket.appendleft((entry.used, entry))
        else:
            bucket.append((entry.used, entry))

    def pop(self) -> tuple[int, Entry] | None:
        if self.now >= self.rank_at:
            self._rank()
        while self._ranking:
            key = self._ranking[-1][1]
            bucket = self._buckets[key]
            if bucket:
                return bucket.popleft()
            del self._buckets[key]
            self._ranking.pop()
        return None

    def filter(self, keep: Callable[[Entry], bool]) -> int:
        self._buckets = {
            key: kept
            for key, bucket in self._buckets.items()
            if (kept := deque(item for item in bucket if keep(item[1])))
        }
        self._rank()
        return sum(map(len, self._buckets.values()))

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
        """Merges each two epochs into one."""
        self._epoch_calls *= 2
        finer, self._buckets = self._buckets, {}
        for epoch, kind in sorted(finer):
            self._buckets.setdefault((epoch // 2, kind), deque()).extend(finer[epoch, kind])
