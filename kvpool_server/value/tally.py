"""References and hits of one miniature, in groups of blocks: so that an estimate says how much the sample decides.

A block's group is in its key. The groups are as many independent samples, each of a `GROUPS`-th of the blocks: how far
the estimate moves when one group is left out is how far another sample would move it (the jackknife).

Sources: W. G. Cochran, Sampling Techniques, 1977, for strata; B. Efron, The Jackknife, the Bootstrap and Other
Resampling Plans, 1982.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Sequence

from kvpool_server.value.sample import Sampled

HITS, MISSES = 0, 1
"""Strata: what the pool has hit, and what it has not."""
GROUPS = 8
_SHIFT = 8
"""Other bits of the key than those that choose the sample (the highest) and ghosts (the lowest)."""
_ZEROS = bytes(8 * 2 * GROUPS)


def groups_of(blocks: Sampled) -> list[int]:
    """The group of each block."""
    return [key >> _SHIFT & (GROUPS - 1) for _, key in blocks]


class Tally:
    """References in one miniature and the hits among them, by stratum and group: each counts 1/R."""

    __slots__ = ("hits", "num_sampled", "references")

    def __init__(self) -> None:
        self.references = array("d", _ZEROS)  # Those of the stratum HITS first.
        self.hits = array("d", _ZEROS)
        self.num_sampled = [0.0, 0.0]

    def count(
        self, blocks: Sampled, groups: Sequence[int], num_hits: int, num_hits_in_pool: int, weight: float
    ) -> None:
        """Adds a run's sampled blocks, of which the first `num_hits` hit.

        Args:
            groups: `groups_of(blocks)`.
            num_hits_in_pool: leading blocks of the whole run that the pool has hit.
            weight: tokens for which each sampled block stands.
        """
        split = bisect.bisect_left(blocks, (num_hits_in_pool,))
        self.num_sampled[HITS] += split
        self.num_sampled[MISSES] += len(blocks) - split
        references, hits = self.references, self.hits
        for nth, group in enumerate(groups):
            if nth >= split:
                group += GROUPS
            references[group] += weight
            if nth < num_hits:
                hits[group] += weight

    def fade(self, keep: float) -> None:
        self.references = array("d", [keep * each for each in self.references])
        self.hits = array("d", [keep * each for each in self.hits])
        self.num_sampled = [keep * each for each in self.num_sampled]

    def simulated_hit_tokens(self, total: float) -> float:
        """What the simulation alone would have said, of so many tokens."""
        return sum(self.hits) + total - sum(self.references)

    def hit_tokens(self, tokens: Sequence[float]) -> float:
        """The estimate of `curve`, given all references by stratum."""
        return _estimate(_by_stratum(self.references), _by_stratum(self.hits), tokens)

    def standard_error(self, tokens: Sequence[float]) -> float:
        """Of `hit_tokens`, as far as the sample decides it, by the jackknife.

        A stratum of which hardly a block was sampled has groups that agree and know nothing: of n references, as much
        as 1 in n + 2 may be otherwise.
        """
        references, hits, scale = self.references, self.hits, GROUPS / (GROUPS - 1)
        referenced, missed_references = _by_stratum(references)
        own_hits, other_hits = _by_stratum(hits)
        # `_estimate` of each leave-one-out sample, written out: this runs for every tenant and size.
        all_lost = referenced - own_hits
        estimates = []
        for group in range(GROUPS):
            lost = (all_lost - references[group] + hits[group]) * scale
            found = min(max(tokens[HITS] - lost, 0.0), tokens[HITS])
            if (missed := missed_references - references[GROUPS + group]) > 0:
                found += tokens[MISSES] * min(max((other_hits - hits[GROUPS + group]) / missed, 0.0), 1.0)
            estimates.append(found)
        mean = sum(estimates) / GROUPS
        variance = sum([(each - mean) ** 2 for each in estimates]) / scale
        unknown = sum((share / (count + 2)) ** 2 for share, count in zip(tokens, self.num_sampled, strict=True))
        return math.sqrt(variance + unknown)


def _by_stratum(each: array[float]) -> list[float]:
    return [sum(each[:GROUPS]), sum(each[GROUPS:])]


def _estimate(references: Sequence[float], hits: Sequence[float], tokens: Sequence[float]) -> float:
    missing = tokens[HITS] - references[HITS]
    found = min(max(hits[HITS] + missing, 0.0), tokens[HITS])
    if references[MISSES] > 0:
        found += tokens[MISSES] * min(max(hits[MISSES] / references[MISSES], 0.0), 1.0)
    return found
