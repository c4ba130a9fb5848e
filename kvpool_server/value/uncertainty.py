"""How far estimated hit ratios may be off, by size: so much that nearly all measured errors are within it.

What makes an estimate wrong:

- Which blocks the sample has: of the hits in a miniature, the jackknife of `tally`.
- How large the pool is that the miniature stands for. What one of n blocks holds varies with which they are, and what
  fits together: it may be a pool that is larger or smaller by `SIZE_ERROR` in the square root of n. Where the curve is
  steep, another size is another hit ratio. A cliff between two sizes makes both uncertain.
- What a sample cannot have: policies that decide by whole prefixes. At the present size, the distance between the
  simulation and what the pool has counted says how much, and it is taken to be as much at the others.

The weights are ours, from errors of `benchmarks.cases.value` with samples of other seeds than those that it reports.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvpool.value import USUAL_ERROR

STANDARD_ERRORS = 3.0
SIZE_ERROR = 4.5
MAX_BEND = 2.0
"""Beyond the smallest and the largest size, the curve is at most so many times as steep as before it: a loop's is."""


def uncertainties(
    ratios: Sequence[float], errors: Sequence[float], samples: Sequence[tuple[float, int]], off: float
) -> list[float]:
    """How far each ratio may be off, within 0 and 1.

    Args:
        ratios: by size, each size twice the one before.
        errors: standard errors of the ratios, of the hits in samples.
        samples: (rate, sampled blocks) by size.
        off: what the simulation is off at the present size.
    """
    found = []
    for error, (rate, num_blocks), slope in zip(errors, samples, slopes(ratios), strict=True):
        unseen = math.sqrt(max(0.0, 1 - rate))
        doublings = math.log2(1 + SIZE_ERROR / math.sqrt(max(num_blocks, 1)))
        by_sample = math.hypot(STANDARD_ERRORS * error * unseen, doublings * slope)
        found.append(min(max(USUAL_ERROR, off, by_sample), 1.0))
    return found


def slopes(ratios: Sequence[float]) -> list[float]:
    """How steep the curve is at each size, a doubling: on the steeper side of it."""
    steps = [abs(after - before) for before, after in itertools.pairwise(ratios)]
    if not steps:
        return [0.0] * len(ratios)
    sides = [_beyond(steps[0], steps[1:2]), *steps, _beyond(steps[-1], steps[-2:-1])]
    return [max(left, right) for left, right in itertools.pairwise(sides)]


def _beyond(last: float, before: Sequence[float]) -> float:
    """The step after the last one, if the curve goes on to bend as it did."""
    bend = last / before[0] if before and before[0] else MAX_BEND
    return last * min(bend, MAX_BEND)
