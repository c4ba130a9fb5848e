"""How much of a hit is loaded, and how much is computed: the way that ends first, with what waits on both ways.

The link carries one load after the other, and the device computes one prompt after the other. A hit is loaded as a
whole if that ends sooner than computing it behind all that waits for the device. Else it may be cut: its first part is
loaded while the device is busy, or while other requests gain more by a freer device than this one loses by its load.
So beside an idle device a slow link brings nothing, and beside a busy one it brings what it can carry meanwhile.

Rates are learned: of the device from its steps, of a transport from the transfers alone, as the ranks measure them. An
unknown rate counts in the pool's favour: hits are taken until both are known, a few at a time. A hit that is declined
teaches nothing, so each one adds `PROBE_SHARE` of its compute time to a credit, and a credit as large as what loading a
hit would lose pays for loading it as a probe. One after a reconnection is free, and one after a probe that has won.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import linear_regression, median
from typing import NamedTuple

from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.prefill_queue import PrefillQueue, Stage

MARGIN = 1.25
"""A link counts as so many times faster than measured: near equality either way is fine, and rates are noisy."""
OTHERS_WEIGHT = 4
"""A second of the device that a request is spared counts so much for each one behind it: more come than are seen."""
PROBE_SHARE = 0.05
PROBE_TIMEOUT_S = 30.0
"""A probe that has not ended within this time was never loaded: its request was cut or aborted."""
MIN_PREFILL_TOKENS = 128
"""A step that prefills fewer tokens measures the launch of kernels rather than the tokens."""
MIN_STEPS, NUM_STEPS = 5, 24
MIN_LOADS, NUM_LOADS = 3, 10
LEARN_EVERY = 16
"""While no prefill was seen, because every prompt hits in full, one hit in this many is computed to measure one."""
MAX_STEPS_UNDER_WAY = 64


class Connection(NamedTuple):
    """What a load goes over: a transport's name, and the boot token of the server; another one is a reconnection."""

    transport: str
    boot_token: int


NO_CONNECTION = Connection("", 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of a hit's tokens, from its first on, are loaded; as a probe although that is likely to be slower."""

    num_tokens: int
    is_probe: bool = False


class LoadPolicy:
    """One engine's.

    Args:
        queue: what waits for the device.
        clock: monotonic seconds.
    """

    def __init__(self, recorder: Recorder, queue: PrefillQueue, clock: Callable[[], float] = time.monotonic):
        self._recorder = recorder
        self._queue = queue
        self._clock = clock
        # Began at, prefill tokens, all tokens; the oldest first.
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=MAX_STEPS_UNDER_WAY)
        self._last_step_ended_at = -math.inf
        self._measured: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)  # Tokens and seconds of steps.
        self._token_s = math.inf
        self._num_unjudged = 0
        self._connection = NO_CONNECTION
        self._links: defaultdict[str, _Link] = defaultdict(_Link)

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
            self._measured.append((num_prefill, seconds * num_prefill / num_tokens))
            self._token_s = self._measured_token_s()

    def compute_seconds(self, num_tokens: int) -> float:
        """Estimated seconds of computing so many tokens; infinite while unknown."""
        return num_tokens * self._token_s

    def _measured_token_s(self) -> float:
        """Seconds that a token adds to a step; the request takes a step anyway.

        The median of the slopes between all steps of unlike sizes (Theil and Sen, 1968): a step that compiled or waited
        counts no more than another.
        """
        if len(self._measured) < MIN_STEPS:
            return math.inf
        token_s = median(seconds / num for num, seconds in self._measured)
        slopes = [
            (more_s - less_s) / (more - less)
            for (less, less_s), (more, more_s) in combinations(sorted(self._measured), 2)
            if more >= 2 * less
        ]
        if len(slopes) >= MIN_STEPS:  # In steps too small to fill the device tokens look free, and are not.
            token_s = max(median(slopes), token_s / 2)
        return token_s

    def verdict(self, request_id: str, num_tokens: int, nbytes: int, connection: Connection = NO_CONNECTION) -> Verdict:
        """Judges one hit. To be called once a hit: calls are counted.

        Args:
            num_tokens: tokens that need not be computed if the hit is loaded.
            nbytes: bytes that one rank would load for it.
            connection: what the hit would be loaded over.
        """
        link = self._links[connection.transport]
        if connection != self._connection:
            self._connection = connection
            link.has_free_probe = len(link.samples) >= MIN_LOADS
        now, compute_s = self._clock(), self.compute_seconds(num_tokens)
        if len(link.samples) < MIN_LOADS:
            share = num_tokens if link.num_loads < MIN_LOADS else 0
        elif math.isinf(compute_s):
            self._num_unjudged += num_tokens >= MIN_PREFILL_TOKENS
            share = num_tokens if self._num_unjudged % LEARN_EVERY else 0
        else:
            load_s = link.seconds(nbytes) / MARGIN
            share = self._share(request_id, num_tokens, compute_s, max(0.0, link.free_at - now), load_s)
            if not share and link.may_probe(compute_s, nbytes, now):
                return Verdict(num_tokens, is_probe=True)
        if not share:
            self._recorder.add("declined_loads")
        return Verdict(share)

    def _share(self, request_id: str, num_tokens: int, compute_s: float, wait_s: float, load_s: float) -> int:
        """How many tokens of a hit to load.

        Args:
            wait_s: seconds until the link is free for the hit.
            load_s: seconds of loading all of it then.
        """
        queue, token_s, byte_s = self._queue, compute_s / num_tokens, load_s / num_tokens
        ahead_s = token_s * (queue.tokens[Stage.RUNNING] + sum(prefill for _, prefill, _ in self._steps))
        num_behind, behind = queue.behind(request_id)
        device_s = ahead_s + token_s * behind

        def cost_s(share: int) -> float:
            """Seconds until the hit is there, and the device's seconds that all others wait for it."""
            there_s = max(ahead_s, wait_s + share * byte_s) if share else ahead_s
            return there_s + (num_tokens - share) * token_s * (1 + OTHERS_WEIGHT * num_behind)

        # At most until both ways end together, with all that waits for either.
        most = num_tokens if wait_s + load_s <= device_s + compute_s else int((device_s - wait_s) / byte_s)
        shares = (most, min(most, int((ahead_s - wait_s) / byte_s)), 0)
        return min((min(num_tokens, max(0, share)) for share in shares), key=cost_s)

    def load_began(self, nbytes: int, connection: Connection) -> None:
        """A load of so many bytes waits for the link, or is under way."""
        link = self._links[connection.transport]
        link.num_loads += 1
        link.free_at = max(link.free_at, self._clock()) + link.seconds(nbytes)

    def load_ended(
        self, num_tokens: int, nbytes: int, seconds: float, succeeded: bool, is_probe: bool, connection: Connection
    ) -> None:
        """A load has ended: the hit is there, or the load has failed and the hit will be computed.

        Args:
            num_tokens, nbytes: what was loaded; bytes of one rank.
            seconds: of the transfer alone, in the slowest rank.
            is_probe: as the verdict says.
            connection: what the load began over.
        """
        link, compute_s = self._links[connection.transport], self.compute_seconds(num_tokens)
        link.num_loads -= 1
        if not link.num_loads:
            link.free_at = self._clock()
        if math.isinf(compute_s):
            compute_s = seconds
        elif not succeeded:
            seconds += compute_s  # Loading in vain is paid on top of computing.
        self._recorder.add("saved_seconds", max(0.0, compute_s - seconds))
        self._recorder.add("lost_seconds", max(0.0, seconds - compute_s))
        if is_probe:
            link.probe_ended(seconds - compute_s)
        link.samples.append((nbytes, seconds))


class _Link:
    """Loads over one transport.

    Attributes:
        samples: bytes and seconds of the last loads.
        num_loads, free_at: loads that have not ended, and when they will have, in monotonic seconds.
        has_free_probe: another server, or the way to it, may be faster than what was measured.
    """

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=NUM_LOADS)
        self.num_loads = 0
        self.free_at = -math.inf
        self.has_free_probe = False
        self._credit_s = 0.0
        self._probe_until = -math.inf

    def seconds(self, nbytes: int) -> float:
        """Seconds of loading so many bytes; 0 while unknown. The load that is slowest for its size is left out: one
        stall is none, and of several the mean knows."""
        if len(self.samples) < MIN_LOADS:
            return 0.0
        latency_s, byte_s = _line(list(self.samples))
        latency_s, byte_s = _line(sorted(self.samples, key=lambda load: load[1] - latency_s - byte_s * load[0])[:-1])
        return latency_s + byte_s * nbytes

    def may_probe(self, compute_s: float, nbytes: int, now: float) -> bool:
        """Whether a hit that is too slow is loaded to learn. Counts the hit; if so, the probe begins."""
        self._credit_s += PROBE_SHARE * compute_s
        is_paid = self.has_free_probe or self._credit_s >= self.seconds(nbytes) - compute_s
        if now < self._probe_until or not is_paid:
            return False
        self.has_free_probe = False
        self._probe_until = now + PROBE_TIMEOUT_S
        return True

    def probe_ended(self, lost_s: float) -> None:
        """A probe took so much longer than computing, or was faster if negative."""
        self._probe_until = -math.inf
        self._credit_s -= max(0.0, lost_s)
        self.has_free_probe = lost_s <= 0


def _line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(latency, seconds a byte) by least squares; all is bandwidth where sizes are too alike to tell them apart."""
    sizes, seconds = zip(*samples, strict=True)
    if max(sizes) >= 2 * min(sizes):
        byte_s, latency_s = linear_regression(sizes, seconds)
        if byte_s > 0 < latency_s:
            return latency_s, byte_s
    return 0.0, sum(seconds) / max(1, sum(sizes))
