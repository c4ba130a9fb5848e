"""Whether a hit is worth loading: the rates of loading and of computing are learned while running, hit by hit.

`seconds` are seconds that a request waits, queueing and batching included. Each transport has rates of its own, which
are kept while loads go over another one.

Invariants:
- An unknown rate counts in the pool's favour: a hit is taken until both rates are known.
- A hit that is likely to be slower than computing it is computed, except for probes, by which the connector finds out
  that a pool has become fast. There is one probe at a time, and probes are paid from a credit: each hit that is judged
  too slow adds `PROBE_SHARE` of its compute time, a probe needs a credit of its expected loss (or, where it is larger
  than any known load, no debt), and its real loss is subtracted. So all probes together lose at most 5 % of the
  compute time of the hits judged too slow, plus what the last probe lost beyond its expected loss. Where loads take r
  times as long as computing, hits of one size are probed once in 20 * (r - 1).
- A probe that beats computing makes the next one free; three in a row bring the pool back, one or two do nothing.
- After each reconnection one probe is free, whatever earlier ones have cost: the server may be another one. So a pool
  that was too slow and has become fast with a new server, or over a new transport, is back after three loads.
- A pool that becomes slow is noticed when eight loads have ended since, or two far slower ones. While the pool is less
  than twice as slow as computing, up to 16 of the next 50 hits may be loaded.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple

from vllm_plugin.metrics import Recorder

MARGIN = 1.25
"""A hit is declined if loading it takes this many times as long as computing it: near equality either choice is fine,
and an estimate from a few noisy loads is good to about 10 %."""
PROBE_SHARE = 0.05
PROBES_TO_RETURN = 3
PROBE_TIMEOUT_S = 30.0
"""A probe that has not ended within this time was never loaded: its request was cut or aborted."""

MIN_PREFILL_TOKENS = 128
"""A step that prefills fewer tokens measures the launch of kernels rather than the tokens."""
MIN_STEPS = 5
NUM_STEPS = 24
MIN_LOADS = 3
NUM_LOADS = 24
NUM_LEVEL_LOADS = 8
LEARN_EVERY = 16
"""While no prefill was seen, because every prompt hits in full, one hit in this many is computed to measure one."""

MAX_STEPS_UNDER_WAY = 64
_MIN_SPREAD = 2.0
_MIN_PAIRS = 3

Sample = tuple[float, float]
"""(tokens or bytes, seconds)."""


class Connection(NamedTuple):
    """What a load goes over: a transport's name, and the boot token of the server; another one is a reconnection."""

    transport: str
    boot_token: int


NO_CONNECTION = Connection("", 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a hit.

    Args:
        take: load it; else compute it.
        compute_s: estimated seconds of computing it; infinite while unknown.
        load_s: estimated seconds of loading it, queueing included; 0 while unknown.
        is_probe: loaded although it is likely to be slower, to learn; to be passed to `load_ended`.
    """

    take: bool
    compute_s: float
    load_s: float
    is_probe: bool = False


class LoadPolicy:
    """One engine's.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic):
        self._recorder = recorder
        self._clock = clock
        # Began at, prefill tokens, all tokens; the oldest first.
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=MAX_STEPS_UNDER_WAY)
        self._last_step_ended_at = -math.inf
        self._compute = _ComputeRate()
        self._num_unjudged = 0
        self._connection = NO_CONNECTION
        self._transports: defaultdict[str, _Transport] = defaultdict(_Transport)

    # Steps

    def step_began(self, num_prefill_tokens: int, num_other_tokens: int) -> None:
        """A step was given to the device. Each begun step is ended once, in order, empty steps too."""
        self._steps.append((self._clock(), num_prefill_tokens, num_prefill_tokens + num_other_tokens))

    def step_ended(self) -> None:
        """The oldest step is done. It ran since it was given to the device, or since the step before it was done."""
        if not self._steps:
            return
        began_at, num_prefill, num_tokens = self._steps.popleft()
        now = self._clock()
        seconds = now - max(began_at, self._last_step_ended_at)
        self._last_step_ended_at = now
        # A step that mostly decodes is no measure of prefill.
        if num_prefill >= MIN_PREFILL_TOKENS and 2 * num_prefill >= num_tokens and seconds > 0:
            self._compute.add(num_prefill, seconds * num_prefill / num_tokens)

    def compute_seconds(self, num_tokens: int) -> float:
        """Estimated seconds of computing so many tokens; infinite while unknown."""
        return self._compute.seconds(num_tokens)

    # A hit

    def verdict(self, num_tokens: int, nbytes: int, connection: Connection = NO_CONNECTION) -> Verdict:
        """Judges one hit. To be called once a hit: calls are counted.

        Args:
            num_tokens: tokens that need not be computed if the hit is loaded.
            nbytes: bytes that one rank would load for it.
            connection: what the hit would be loaded over.
        """
        over = self._transports[connection.transport]
        if connection != self._connection:
            self._connection = connection
            over.reconnected()
        compute_s, load_s = self._compute.seconds(num_tokens), over.load.seconds(nbytes)
        if math.isinf(compute_s):
            take = not self._is_sample_due(num_tokens, over)
        else:
            take = load_s <= MARGIN * compute_s
            if not take and over.may_probe(compute_s, load_s, nbytes, self._clock()):
                return Verdict(True, compute_s, load_s, is_probe=True)
        if not take:
            self._recorder.add("declined_loads")
        return Verdict(take, compute_s, load_s)

    def load_ended(
        self,
        num_tokens: int,
        nbytes: int,
        seconds: float,
        succeeded: bool,
        is_probe: bool = False,
        connection: Connection = NO_CONNECTION,
    ) -> None:
        """A load has ended: the hit is there, or the load has failed and the hit will be computed.

        Args:
            num_tokens, nbytes: as for `verdict`; less than was judged if the engine had no room.
            seconds: from the allocation of its blocks to the report that they are there.
            is_probe: as the verdict says.
            connection: what the load began over.
        """
        compute_s = self._compute.seconds(num_tokens)
        is_known = not math.isinf(compute_s)
        if not succeeded and is_known:
            seconds += compute_s  # Loading in vain is paid on top of computing.
        lost_s = seconds - compute_s if is_known else 0.0
        if lost_s > 0:
            self._recorder.add("lost_seconds", lost_s)
        else:
            self._recorder.add("saved_seconds", -lost_s)
        over = self._transports[connection.transport]
        over.load.add((nbytes, seconds))
        if is_probe:
            over.probe_ended((nbytes, seconds), lost_s)

    def _is_sample_due(self, num_tokens: int, over: _Transport) -> bool:
        if not over.load.is_known or num_tokens < MIN_PREFILL_TOKENS:
            return False
        self._num_unjudged += 1
        return self._num_unjudged % LEARN_EVERY == 0


class _Transport:
    """Loads over one transport: their rate, and the probes that correct it.

    Attributes:
        load: the rate of its loads.
    """

    def __init__(self) -> None:
        self.load = _LoadRate()
        self._credit_s = 0.0
        self._probe_until = -math.inf
        self._won_probes: list[Sample] = []
        self._is_free = False  # A probe, because of a reconnection.

    def reconnected(self) -> None:
        """Loads go over this transport again, or to another server: what is known of it may be out of date."""
        self._is_free = self.load.is_known
        self._credit_s = max(0.0, self._credit_s)
        self._won_probes = []
        self._probe_until = -math.inf

    def may_probe(self, compute_s: float, load_s: float, nbytes: int, now: float) -> bool:
        """Whether a hit that is too slow is loaded to learn. Counts the hit; if so, the probe begins."""
        self._credit_s += PROBE_SHARE * compute_s
        if now < self._probe_until:
            return False
        # The credit suffices for small probes first, which say little of large loads.
        cost_s = 0.0 if self._is_free or self.load.is_beyond(nbytes) else load_s - compute_s
        if not self._won_probes and self._credit_s < cost_s:
            return False
        self._probe_until = now + PROBE_TIMEOUT_S
        return True

    def probe_ended(self, sample: Sample, lost_s: float) -> None:
        """A probe took as long as `sample` says: `lost_s` longer than computing it, or shorter if negative."""
        self._is_free = False
        self._probe_until = -math.inf
        self._credit_s -= max(0.0, lost_s)
        self._won_probes = [*self._won_probes, sample] if lost_s <= 0 else []
        if len(self._won_probes) == PROBES_TO_RETURN:
            # The samples of the slow pool are out of date.
            self.load.replace(self._won_probes)
            self._won_probes = []


class _ComputeRate:
    """Seconds that a prefilled token adds to a step, from the last `NUM_STEPS` that are samples.

    Medians: a step that compiled or waited does not count more than another.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=NUM_STEPS)
        self._a_token_s: float | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        self._samples.append((num_tokens, seconds))
        self._a_token_s = None

    def seconds(self, num_tokens: int) -> float:
        """Seconds of computing so many tokens more; infinite while unknown."""
        if len(self._samples) < MIN_STEPS:
            return math.inf
        if self._a_token_s is None:
            overall = median(seconds / num for num, seconds in self._samples)
            line = _line(self._samples)
            # The request takes a step anyway, so the fixed part is not saved. But steps too small to fill the device
            # must not make tokens look free.
            self._a_token_s = max(line[1], overall / 2) if line else overall
        return num_tokens * self._a_token_s


class _LoadRate:
    """Fixed latency and seconds a byte, from the last `NUM_LOADS`; how busy the pool is, from `NUM_LEVEL_LOADS`."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=NUM_LOADS)
        self._level: float | None = None
        self._line: tuple[float, float] = (0.0, 0.0)

    @property
    def is_known(self) -> bool:
        return len(self._samples) >= MIN_LOADS

    def is_beyond(self, nbytes: int) -> bool:
        """Whether a load is much larger than any known one."""
        return nbytes > _MIN_SPREAD * max(size for size, _ in self._samples)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._level = None

    def replace(self, samples: Collection[Sample]) -> None:
        self._samples.clear()
        self._samples.extend(samples)
        self._level = None

    def seconds(self, nbytes: int) -> float:
        """Seconds of loading so many bytes; 0 while unknown.

        Medians say how seconds depend on bytes. How busy the pool is, a mean over the last loads says: where one load
        in three stalls, a median sees nothing. The worst load counts like the second worst, so that one stall is none.
        """
        if not self.is_known:
            return 0.0
        if self._level is None:
            ratios = self._fit()
            if ratios[0] > MARGIN or ratios[-1] < 1 / MARGIN:
                # All of the last loads are worse than most, or all are better: the earlier samples are out of date.
                self.replace(list(self._samples)[-NUM_LEVEL_LOADS:])
                ratios = self._fit()
            self._level = fmean([*ratios[:-1], ratios[-2]])
        return self._level * self._on_line(nbytes)

    def _fit(self) -> list[float]:
        """Fits the line; returns the last loads' seconds in proportion to the line, the best first."""
        # Where sizes are too alike to tell latency from bandwidth, all is bandwidth.
        self._line = _line(self._samples) or (0.0, median(seconds / max(size, 1) for size, seconds in self._samples))
        last = list(self._samples)[-NUM_LEVEL_LOADS:]
        return sorted(seconds / max(self._on_line(size), 1e-9) for size, seconds in last)

    def _on_line(self, nbytes: float) -> float:
        return self._line[0] + self._line[1] * nbytes


def _line(samples: Collection[Sample]) -> tuple[float, float] | None:
    """(seconds at size 0, seconds a unit of size), neither negative; None if the sizes are too alike.

    Source: the Theil-Sen estimator (Sen, 1968): the median of the slopes of all pairs. Pairs of like sizes, whose
    slope is all noise, are left out.
    """
    slopes = [
        (seconds - other_seconds) / (size - other_size)
        for (size, seconds), (other_size, other_seconds) in combinations(samples, 2)
        if max(size, other_size) >= _MIN_SPREAD * max(1.0, min(size, other_size))
    ]
    if len(slopes) < _MIN_PAIRS:
        return None
    slope = max(0.0, median(slopes))
    return max(0.0, median(seconds - slope * size for size, seconds in samples)), slope
