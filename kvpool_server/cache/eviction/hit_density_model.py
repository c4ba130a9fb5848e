"""Learns how long blocks of each kind wait for their next hit, and from that their hit density by age.

A wait starts with a use of a block and ends with its next hit; until then its age is the calls since its start. For
each kind the model counts the waits that started, and the hits by the age of the wait that they ended, in age bins.

1. Hazard of an age bin: hits in it / waits that were seen to reach it. A wait too young to have reached the bin is in
   neither number, so recent waits without a hit yet do not count as waits without a hit (Kaplan and Meier, 1958).
2. Survival S(a), the share of waits longer than a: the product of (1 - hazard) over the bins up to a. Counts of all
   kinds together are the prior of each kind, so that a rare kind is judged as all are until it has shown otherwise.
3. Density D(a) = max over h > a of (S(a) - S(h)) / (time lived between a and h): see `hit_density`.
4. Cohorts: the waits of a kind that start at the same time share more than their kind, such as a batch job. If c
   waits of a cohort have ended by hits, and of its kind e = (waits started) * (1 - S(a)) would have, D(a) is scaled by
   (W + c) / (W + e), W = COHORT_WEIGHT.

Old observations fade exponentially. Times are in calls of the pool: load speeds up hits and evictions alike.

Source: see `hit_density`. The prior and the cohorts are ours.
"""

from __future__ import annotations

import bisect
import functools
from array import array
from collections import OrderedDict

import numpy as np

NUM_BINS = 64
"""Age bins; the last ends at 5.1 million calls, beyond any wait that a pool could bridge."""
FIRST_BIN_CALLS, GROWTH = 4.0, 1.25
"""The first bin's width in calls, and the ratio of one bin's end to that before: every age is known to a quarter."""
PERIOD_CALLS = 256
"""Calls between two estimates: each takes about 1 ms, so on average a call pays 4 us."""
KEEP = 0.99
"""What a period leaves of the weight of older observations: half of it remains after 69 periods, or 17,700 calls."""
MAX_CHECKPOINTS = 512
"""Points in time for which the counts of started waits are kept; beyond it every second is deleted."""
COHORT_CALLS = 64
"""Waits of one kind that start within so many calls are a cohort."""
MAX_COHORTS = 4_096
"""Cohorts that are kept, the latest; older waits are judged by their kind alone."""
COHORT_WEIGHT = 30.0
"""W, in expected hits: a cohort's own hits weigh as much as its kind's when so many were to be expected."""
PRIOR_WEIGHT = 30.0
"""In blocks: a kind's own observations weigh as much as those of all kinds when so many of its waits were seen."""
PRIOR_HITS = 0.3
"""Before any observation: the share of waits that a hit ends, alike in every bin, so more likely sooner than later."""

EDGES = np.concatenate([[0.0], FIRST_BIN_CALLS * GROWTH ** np.arange(NUM_BINS)])
"""Bin b holds the ages [EDGES[b], EDGES[b + 1]), in calls. float64 [NUM_BINS + 1]."""
MAX_AGE = float(EDGES[-1])
_LEAST = 1e-12
"""Keeps quotients finite."""
NUM_PLACES = 1_024
MAX_OF_PLACE = 8_192
"""A client may choose names that all have one place: its ghosts forget each other."""


class HitDensityModel:
    """Waits and hits of blocks of the kinds 0 to num_kinds - 1."""

    def __init__(self, num_kinds: int):
        self._hits = np.zeros((num_kinds, NUM_BINS))  # Blocks, by kind and by the age at the hit.
        self._started = np.zeros(num_kinds)  # Blocks, by kind.
        self._checkpoint_calls = [-1, 0]
        self._checkpoints = np.zeros((MAX_CHECKPOINTS + 1, num_kinds))  # Row n: _started at call _checkpoint_calls[n].
        self._inner_edges = EDGES[1:-1].tolist()
        self._learned_at = 0
        self._densities, self._hit_shares = _unlearned(num_kinds)
        self._cohorts: OrderedDict[tuple[int, int], list[float]] = OrderedDict()  # (Period, kind) -> [started, hits].

    def start(self, kind: int, now: int, count: float, observed: float = 1) -> None:
        """`count` blocks begin a wait of a kind; `observed` of them stand for all."""
        self._started[kind] += count
        key = (now // COHORT_CALLS, kind)
        cohort = self._cohorts.get(key)
        if cohort is None:
            cohort = self._cohorts[key] = [0, 0]
            if len(self._cohorts) > MAX_COHORTS:
                self._cohorts.popitem(last=False)
        cohort[0] += observed  # Not `count`: blocks of one prompt share its fate.

    def reclassify(self, kind: int, other: int, since: int, now: int, count: float) -> None:
        """The waits of `count` blocks that started as of a kind at `since` turn out to be of another."""
        weight = count * KEEP ** ((now - since) / PERIOD_CALLS)
        self._started[kind] -= weight
        self._started[other] += weight

    def hit(self, kind: int, since: int, now: int, count: float, observed: float = 1) -> None:
        """A hit ends the waits of `count` blocks that started at `since`; `observed` of them stand for all."""
        age = now - since
        if age < MAX_AGE:
            # Faded as much as the start of this wait has.
            self._hits[kind, bisect.bisect_right(self._inner_edges, age)] += count * KEEP ** (age / PERIOD_CALLS)
        if (cohort := self._cohorts.get((since // COHORT_CALLS, kind))) is not None:
            cohort[1] += observed

    def density(self, kind: int, since: int, now: int) -> float:
        """Hits a call that may be expected of the slot of a block whose wait started at `since`."""
        age_bin = bisect.bisect_right(self._inner_edges, now - since)
        density = self._densities[kind][age_bin]
        if (cohort := self._cohorts.get((since // COHORT_CALLS, kind))) is not None:
            started, hits = cohort
            density *= (COHORT_WEIGHT + hits) / (COHORT_WEIGHT + started * self._hit_shares[kind][age_bin])
        return density

    def learn_if_due(self, now: int) -> bool:
        """Estimates anew once in PERIOD_CALLS calls; True if it did."""
        if now - self._learned_at < PERIOD_CALLS:
            return False
        if not self._started.any():  # A model that was made late, or again, would take a millisecond to learn nothing.
            self._learned_at, self._checkpoint_calls = now, [now - 1, now]
            return False
        self.learn(now)
        return True

    def learn(self, now: int) -> None:
        """Estimates densities from the observations until now, and fades these."""
        self._densities, self._hit_shares = _estimate(self._hits, self._started_before(now - EDGES[:-1], now))
        keep = KEEP ** ((now - self._learned_at) / PERIOD_CALLS)
        self._learned_at = now
        self._hits *= keep
        self._started *= keep
        count = len(self._checkpoint_calls)
        self._checkpoints[:count] *= keep
        self._checkpoints[count] = self._started
        self._checkpoint_calls.append(now)
        if count == MAX_CHECKPOINTS:
            del self._checkpoint_calls[1::2]
            self._checkpoints[: len(self._checkpoint_calls)] = self._checkpoints[::2]

    def learned(self) -> bytes:
        """The observations, for `relearn`; cohorts are left out, as they are over soon."""
        count = len(self._checkpoint_calls)
        calls = np.array([self._learned_at, *self._checkpoint_calls], np.float64)
        return np.concatenate([calls, self._hits.ravel(), self._started, self._checkpoints[:count].ravel()]).tobytes()

    def relearn(self, learned: bytes) -> None:
        """Goes on from the observations of another model of as many kinds. Raises ValueError for anything else."""
        num_kinds = len(self._started)
        values = np.frombuffer(learned, np.float64)
        count, rest = divmod(len(values) - 1 - num_kinds * (NUM_BINS + 1), 1 + num_kinds)
        if rest or not 0 < count <= MAX_CHECKPOINTS or not (np.isfinite(values).all() and abs(values).max() < 1 << 53):
            raise ValueError(f"{len(learned)} bytes are not what a model of {num_kinds} kinds has learned")
        at = np.cumsum([1, count, num_kinds * NUM_BINS, num_kinds])
        calls = values[1 : at[1]].astype(np.int64)
        if (np.diff(calls) < 0).any():
            raise ValueError("calls do not ascend")
        self._learned_at, self._checkpoint_calls = int(values[0]), calls.tolist()
        self._hits[:] = values[at[1] : at[2]].reshape(num_kinds, NUM_BINS)
        self._started[:] = values[at[2] : at[3]]
        self._checkpoints[:count] = values[at[3] :].reshape(count, num_kinds)
        self.learn(self._learned_at)

    def _started_before(self, times: np.ndarray, now: int) -> np.ndarray:
        """Waits of each kind that started before each time, interpolated between checkpoints: [times, kinds]."""
        count = len(self._checkpoint_calls)
        calls = np.array([*self._checkpoint_calls, max(now, self._checkpoint_calls[-1] + 1)])
        counts = self._checkpoints[: count + 1]
        counts[count] = self._started
        after = np.clip(np.searchsorted(calls, times, side="right"), 1, count)
        part = np.clip((times - calls[after - 1]) / (calls[after] - calls[after - 1]), 0.0, 1.0)[:, None]
        return counts[after - 1] + part * (counts[after] - counts[after - 1])


class Ghosts:
    """When blocks that were evicted had last been used, the latest of them. A block is a number of 64 bits with sign.

    Python copies a dict when it grows, and again and again while keys come and go: in one dict, the ghosts of ten
    million entries would hold the event loop for tens of milliseconds. So blocks are kept by their place, one of
    `NUM_PLACES` (the same in every run, so that replays repeat), and the oldest of each place are forgotten in turn.

    Whatever empties the pool makes ghosts by the hundred thousand. Blocks and stamps are ints in plain dicts, which
    Python's garbage collector does not look into; the first key of a dict this small is found in a few microseconds.
    """

    __slots__ = ("_length", "_places")

    def __init__(self) -> None:
        self._places: OrderedDict[int, dict[int, int]] = OrderedDict()  # None is empty; oldest ghosts first.
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, place: int, block: int, stamp: int) -> None:
        """Remembers the stamp of a block's last use."""
        ghosts = self._places.get(place)
        if ghosts is None:
            ghosts = self._places[place] = {}
        self._length -= len(ghosts)
        ghosts.pop(block, None)
        ghosts[block] = stamp
        if len(ghosts) > MAX_OF_PLACE:
            del ghosts[next(iter(ghosts))]
        self._length += len(ghosts)

    def pop(self, place: int, block: int) -> int | None:
        """The stamp of a block's last use, which is forgotten; None if it is not known."""
        ghosts = self._places.get(place)
        if ghosts is None or (stamp := ghosts.pop(block, None)) is None:
            return None
        self._length -= 1
        if not ghosts:
            del self._places[place]
        return stamp

    def forget_one(self) -> None:
        """Forgets one of the oldest, of each place in turn. There must be one."""
        place, ghosts = self._places.popitem(last=False)
        del ghosts[next(iter(ghosts))]
        self._length -= 1
        if ghosts:
            self._places[place] = ghosts


def _estimate(hits: np.ndarray, reached: np.ndarray) -> tuple[list[array[float]], list[array[float]]]:
    """Densities, by kind and age bin; and 1 - S, by kind and bin edge. The arguments are those of `_survival`."""
    prior = np.full(NUM_BINS, PRIOR_HITS / NUM_BINS)
    of_all_kinds = _survival(hits.sum(0)[None], reached.sum(1)[:, None], prior)
    survival = _survival(hits, reached, -np.diff(of_all_kinds[0]))
    return _rows(_densities(survival)), _rows(1 - survival)


@functools.cache
def _unlearned(num_kinds: int) -> tuple[list[array[float]], list[array[float]]]:
    """The estimate without observations: one for all models, because it takes a millisecond."""
    return _estimate(np.zeros((num_kinds, NUM_BINS)), np.zeros((NUM_BINS, num_kinds)))


def _survival(hits: np.ndarray, reached: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """S at each bin edge, by kind: [kinds, bins + 1].

    Args:
        hits: [kinds, bins].
        reached: waits old enough to have reached each bin, with or without a hit before it: [bins, kinds].
        prior: share of waits that a hit ends in each bin: [bins].
    """
    ended = hits.T + PRIOR_WEIGHT * prior[:, None]
    reached = np.maximum(reached, 0.0)
    before = PRIOR_WEIGHT * (1 - np.cumsum(prior) + prior)
    survival = np.ones((NUM_BINS + 1, len(hits)))
    for nth in range(NUM_BINS):
        at_risk = reached[nth] * survival[nth] + before[nth]
        hazard = np.minimum(ended[nth] / np.maximum(at_risk, _LEAST), 1.0)
        np.multiply(survival[nth], 1.0 - hazard, out=survival[nth + 1])
    return survival.T


def _rows(values: np.ndarray) -> list[array[float]]:
    """The rows of a matrix of float64, whose items are found as fast as a list's and take a quarter of the memory."""
    return [array("d", row.tobytes()) for row in values]


def _densities(survival: np.ndarray) -> np.ndarray:
    """D at the start of each bin: [kinds, bins]."""
    survival = np.ascontiguousarray(survival.T)
    lived = (survival[:-1] + survival[1:]) / 2 * np.diff(EDGES)[:, None]
    lived_until = np.concatenate([np.zeros((1, survival.shape[1])), np.cumsum(lived, 0)])
    best = np.empty((NUM_BINS, survival.shape[1]))
    for nth in range(NUM_BINS):
        time = lived_until[nth + 1 :] - lived_until[nth]
        np.maximum(time, _LEAST, out=time)
        hits = survival[nth] - survival[nth + 1 :]
        np.divide(hits, time, out=hits).max(0, out=best[nth])
    return best.T
