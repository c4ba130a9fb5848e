"""What loading has saved, by requests whose hits were held out at random: with a confidence interval, or not at all.

For each size class of hits let d be the mean time to the first token of held-out requests minus that of loaded ones.
The loaded requests of the class, n of them, have saved n * d together. The variances of the two means, s^2 / count
each, add up, over all classes weighted with n^2; the interval is the sum of all n * d, plus and minus the 97.5 %
quantile of Student's t times the root of that variance. Degrees of freedom: (sum of v)^2 / (sum of v^2 / (count - 1)),
v being the weighted variance of each mean.

Source: B. L. Welch, The generalization of "Student's" problem when several different population variances are involved,
Biometrika 34 (1947); F. E. Satterthwaite, An approximate distribution of estimates of variance components, Biometrics
Bulletin 2 (1946). The quantile: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from kvpool.ledger import MeasuredSaving
from kvpool.reports import FirstTokenTimes
from kvpool_server.pairs import Pair
from kvpool_server.reports.totals import Measurements

MIN_REQUESTS = 20
"""Of each kind in a size class that is compared: with fewer, the variance of such skewed times is not known."""
MAX_SAVED_S = 1e9
"""Largest saving and end of an interval, either way: more than engines can save, and small enough for a reply."""
_QUANTILE = NormalDist().inv_cdf(0.975)


def measured(pair: Pair, measurements: Measurements) -> MeasuredSaving | None:
    """What is known of a model and tenant; None if nothing was measured. `num_compared` is 0 where too little was."""
    times = measurements.first_token_times
    if not times:
        return None
    loaded = {size: each for (size, is_held_out), each in times.items() if not is_held_out}
    held_out = {size: each for (size, is_held_out), each in times.items() if is_held_out}
    num_compared, saved_s = 0, 0.0
    variances: list[tuple[float, int]] = []  # Of each mean, weighted; with the count that it is from.
    for size, one in loaded.items():
        other = held_out.get(size)
        if other is None or min(one.count, other.count) < MIN_REQUESTS:
            continue
        num_compared += one.count
        saved_s += one.count * (_mean(other) - _mean(one))
        variances += [(one.count**2 * _variance(each) / each.count, each.count) for each in (one, other)]
    half_s = _half_interval(variances)
    return MeasuredSaving(
        pair.tenant,
        pair.model,
        num_loaded=sum(each.count for each in loaded.values()),
        num_held_out=sum(each.count for each in held_out.values()),
        num_compared=num_compared,
        saved_seconds=_bounded(saved_s),
        low_seconds=_bounded(saved_s - half_s),
        high_seconds=_bounded(saved_s + half_s),
        agreement=measurements.agreement,
    )


def _half_interval(variances: Sequence[tuple[float, int]]) -> float:
    """Half of the interval's width: by shares of the largest variance, whose squares neither vanish nor overflow."""
    largest = max((value for value, _ in variances), default=0.0)
    if not largest > 0:
        return 0.0
    shares = [(value / largest, count) for value, count in variances]
    total = math.fsum(share for share, _ in shares)
    freedom = total**2 / math.fsum(share**2 / (count - 1) for share, count in shares)
    return t_quantile(freedom) * math.sqrt(total) * math.sqrt(largest)


def _bounded(seconds: float) -> float:
    return max(-MAX_SAVED_S, min(MAX_SAVED_S, seconds))


def _mean(times: FirstTokenTimes) -> float:
    return times.sum_seconds / times.count


def _variance(times: FirstTokenTimes) -> float:
    """The unbiased estimate. Figures that an engine has made up may give a negative one."""
    squares = times.sum_square_seconds - times.sum_seconds**2 / times.count
    return max(0.0, squares / (times.count - 1))


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, good to 0.001 from 10 degrees of freedom on."""
    z = _QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
