"""When blocks are asked for again: learned by kind from what was seen, as hit densities by age.

For each kind: of those that were not asked for until an age, how many were at that age (the hazard of survival
analysis; blocks that are too young to have reached an age say nothing about it). From these follows what a slot is
worth to a block of that age: over the best horizon, the hits to be expected for the time that the slot is taken. Blocks
that came together share a fate: where fewer of them have been asked for than of their kind, all count for less.

Ages are in calls of the pool, in bins that grow with them. What was seen counts less with time.

Source: E. Kaplan, P. Meier, Nonparametric estimation from incomplete observations, 1958.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict

import numpy as np

NUM_BINS = 64
FIRST_BIN_CALLS, GROWTH = 4.0, 1.25
MAX_CHECKPOINTS = 512
PERIOD_CALLS, KEEP = 256, 0.99
"""What each period leaves of the weight of what was seen before."""
COHORT_CALLS, MAX_COHORTS = 64, 4_096
"""Blocks of a kind came together that came within so many calls."""
COHORT_WEIGHT = 30.0
"""So many sampled blocks ought to have been asked for before their own fate counts as much as that of their kind."""
PRIOR_HITS = 0.3
"""Before anything is known: the share of blocks that is asked for again, sooner rather than later."""
PRIOR_WEIGHT = 30.0
"""Blocks of a kind that have to be seen before they count as much as what all kinds have in common."""

EDGES = np.concatenate([[0.0], FIRST_BIN_CALLS * GROWTH ** np.arange(NUM_BINS)])
"""Bin b holds ages [EDGES[b], EDGES[b + 1])."""


class HazardModel:
    """What is known of some kinds of blocks."""

    def __init__(self, num_kinds: int):
        self._asked = np.zeros((num_kinds, NUM_BINS))
        self._began = np.zeros(num_kinds)
        self._checkpoints: list[tuple[int, np.ndarray]] = [(-1, self._began.copy())]
        self._edges = EDGES[1:-1].tolist()
        self._learned_at = 0
        self._densities: list[list[float]] = []
        self._cohorts: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self.learn(0)

    def began(self, kind: int, now: int, count: int) -> None:
        """Blocks have become of a kind."""
        self._began[kind] += count
        key = (now // COHORT_CALLS, kind)
        cohort = self._cohorts.get(key)
        if cohort is None:
            cohort = self._cohorts[key] = [0, 0]
            if len(self._cohorts) > MAX_COHORTS:
                self._cohorts.popitem(last=False)
        cohort[0] += 1  # Not `count`: the blocks of one prompt share its fate, and are no more proof than one of them.

    def changed(self, kind: int, other: int, since: int, now: int, count: int) -> None:
        """Blocks that had become of a kind at `since` have turned out to be of another."""
        weight = count * KEEP ** ((now - since) / PERIOD_CALLS)
        self._began[kind] -= weight
        self._began[other] += weight

    def asked(self, kind: int, since: int, now: int, count: int) -> None:
        """Blocks that had become of a kind at `since` were asked for, and begin anew."""
        age = now - since
        if age < EDGES[-1]:
            # As much as they count for that had become of the kind with it.
            self._asked[kind, bisect.bisect_right(self._edges, age)] += count * KEEP ** (age / PERIOD_CALLS)
        if (cohort := self._cohorts.get((since // COHORT_CALLS, kind))) is not None:
            cohort[1] += 1

    def density(self, kind: int, since: int, now: int) -> float:
        """Hits a call that the slot of a block may be expected to serve that became of a kind at `since`."""
        nth = bisect.bisect_right(self._edges, now - since)
        density = self._densities[kind][nth]
        if (cohort := self._cohorts.get((since // COHORT_CALLS, kind))) is not None:
            began, asked = cohort
            density *= (COHORT_WEIGHT + asked) / (COHORT_WEIGHT + began * self._shares[kind][nth])
        return density

    def learn(self, now: int) -> None:
        """Makes densities of what was seen until now."""
        began = self._began_before(now - EDGES[:-1], now)  # [bins, kinds]
        prior = np.full(NUM_BINS, PRIOR_HITS / NUM_BINS)
        common = _survival(self._asked.sum(0)[None], began.sum(1)[:, None], prior[None], PRIOR_WEIGHT)
        alike = -np.diff(common)
        survival = _survival(self._asked, began, alike, PRIOR_WEIGHT)
        self._densities = _densities(survival).tolist()
        self._shares = (1 - survival).tolist()
        keep = KEEP ** ((now - self._learned_at) / PERIOD_CALLS)
        self._learned_at = now
        self._asked *= keep
        self._began *= keep
        for _, counts in self._checkpoints:
            counts *= keep
        self._checkpoints.append((now, self._began.copy()))
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            del self._checkpoints[1::2]

    def _began_before(self, times: np.ndarray, now: int) -> np.ndarray:
        """How many of each kind had begun at these times: [times, kinds]."""
        calls = np.array([*(call for call, _ in self._checkpoints), max(now, self._checkpoints[-1][0] + 1)])
        counts = np.stack([*(counts for _, counts in self._checkpoints), self._began])
        after = np.clip(np.searchsorted(calls, times, side="right"), 1, len(calls) - 1)
        part = np.clip((times - calls[after - 1]) / (calls[after] - calls[after - 1]), 0.0, 1.0)[:, None]
        return counts[after - 1] + part * (counts[after] - counts[after - 1])


def _survival(asked: np.ndarray, began: np.ndarray, prior: np.ndarray, prior_weight: float) -> np.ndarray:
    """Which share is not asked for until each edge: [kinds, bins + 1]."""
    shares = [np.ones(len(asked))]
    for nth in range(NUM_BINS):
        at_risk = np.maximum(began[nth], 0.0) * shares[-1] + prior_weight * (1 - prior[:, :nth].sum(1))
        hits = asked[:, nth] + prior_weight * prior[:, nth]
        shares.append(shares[-1] * (1 - np.minimum(hits / np.maximum(at_risk, 1e-12), 1.0)))
    return np.stack(shares, 1)


def _densities(survival: np.ndarray) -> np.ndarray:
    """The best ratio of hits to time over all horizons, from the start of each bin: [kinds, bins]."""
    widths = np.diff(EDGES)
    lifetimes = (survival[:, :-1] + survival[:, 1:]) / 2 * widths
    hits_until = 1 - survival
    life_until = np.concatenate([np.zeros((len(survival), 1)), np.cumsum(lifetimes, 1)], 1)
    best = np.zeros((len(survival), NUM_BINS))
    for nth in range(NUM_BINS):
        hits = hits_until[:, nth + 1 :] - hits_until[:, nth : nth + 1]
        life = life_until[:, nth + 1 :] - life_until[:, nth : nth + 1]
        best[:, nth] = (hits / np.maximum(life, 1e-12)).max(1)
    return best
