"""How much of a hit is loaded, and how much is computed: the way that ends first, with what waits on both ways.

The link carries one load after the other, and the device computes one prompt after the other. A hit is loaded as a
whole if that ends before the device has computed all that waits for it, the hit included; else the hit is cut so that
both ways end together. It is declined if that, or a long prompt that begins meanwhile, delays the request by more than
its share of the device is worth to the request and to those behind it. So beside an idle device a slow link brings
nothing, and beside a busy one what it can.

Rates are learned: of the device from its steps, of a transport from the transfers alone, as the ranks measure them. An
unknown rate counts in the pool's favour: over a new transport hits are taken a few at a time, and while the device's
rate is unknown all that come in time. A hit that is declined teaches nothing, so each one adds `PROBE_SHARE` of its
compute time to a credit, and a credit as large as what loading a hit would lose pays for loading it as a probe. One
after a reconnection is free, one after a probe that has won, and a part of a hit far larger than any load so far.
"""

from __future__ import annotations

import enum
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import TYPE_CHECKING, NamedTuple

from vllm_plugin.metrics import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

MARGIN = 1.25
"""A link counts as so many times faster than measured: near equality either way is fine, and rates are noisy."""
PLANNED_SHARE = 0.9
"""Of the longest time that a load may take, by what was measured: one that takes longer is in vain."""
OTHERS_WEIGHT = 3
"""A second of the device that a request is spared counts so much for each one behind it: more come than are seen."""
PROBE_SHARE = 0.05
MIN_PREFILL_TOKENS = 128
"""A step that prefills fewer tokens measures the launch of kernels rather than the tokens. Where no hit is twice as
long, half of the longest hit measures what such hits cost."""
MIN_STEPS, NUM_STEPS = 5, 24
MIN_LOADS, NUM_LOADS = 3, 10
GROWTH = 8
"""Loads of one size do not tell how much of their time is waiting, and by the rate of small ones every large hit would
be declined: of a larger hit, so many times the largest load is a probe, which tells."""
LEARN_EVERY = 16
"""While no prefill was seen, because every prompt hits in full, one hit in this many is computed to measure one."""
MAX_STEPS_UNDER_WAY = 64
SHARE_DECAY = 0.95
"""Of the share of prompts that is computed, for each prompt that is admitted."""
STEPS_TO_REPORT = 3
"""A load that was to end before the third last step began, and was not reported, is late. Any later is too early to
tell: a load waits for the step that it begins with, and is reported with a step that is launched after its end."""


class Stage(enum.Enum):
    """Where a request is on its way to its first token."""

    WAITING = "arrived, and without blocks"
    LOADING = "the rest is computed once its load has ended"
    RUNNING = "computed in the order of arrival"


class PrefillQueue:
    """What waits for the device: prompt tokens that are not computed yet, by the stage of their request.

    Args:
        step_tokens: the most tokens that one step computes.

    Attributes:
        tokens: still to be computed, by stage; of waiting requests all, since their hits are not known.
        computed_share: of the tokens of prompts, how many were computed lately.
    """

    def __init__(self, step_tokens: float = math.inf) -> None:
        self._step_tokens = step_tokens
        self._left: dict[Stage, dict[str, tuple[Request, int]]] = {stage: {} for stage in Stage}
        self._new: dict[str, Request] = {}  # They wait, and `next_waiting` has not returned them.
        self.tokens = dict.fromkeys(Stage, 0)
        self.computed_share = 1.0

    def put(self, request: Request, stage: Stage, num_there: int = 0) -> None:
        """A request is in another stage, or has the KV of more tokens; once all is there it leaves."""
        self.drop(request.request_id)
        if (num_tokens := request.num_tokens - num_there) > 0:
            self._left[stage][request.request_id] = request, num_tokens
            self.tokens[stage] += num_tokens
            if stage is Stage.WAITING:
                self._new[request.request_id] = request

    def drop(self, request_id: str) -> None:
        """A request has ended, or is about to be in another stage."""
        self._new.pop(request_id, None)
        for stage, left in self._left.items():
            if request_id in left:
                self.tokens[stage] -= left.pop(request_id)[1]

    def next_waiting(self) -> Request | None:
        """The oldest request that waits and was not returned before; None: there is none."""
        return self._new.pop(next(iter(self._new))) if self._new else None

    def admitted(self, request: Request, local: int, num_loaded: int) -> None:
        """A request was given blocks: of its tokens, what is neither `local` nor loaded is computed."""
        there = request.num_computed_tokens  # None, unless a load has ended.
        if not there:
            there = local + num_loaded
            share = 1 - there / request.num_tokens
            self.computed_share += (1 - SHARE_DECAY) * (share - self.computed_share)
        self.put(request, Stage.LOADING if num_loaded else Stage.RUNNING, there)

    def step(self, scheduled: Mapping[str, int]) -> int:
        """A step computes so many tokens of each request; returns how many of them are of prompts."""
        num_prefill, running = 0, self._left[Stage.RUNNING]
        for request_id in running.keys() & scheduled.keys():
            request, count = running[request_id][0], scheduled[request_id]
            # What vLLM says is there, not what it was admitted with: another connector may have loaded a part.
            num_prefill += min(count, request.num_tokens - request.num_computed_tokens)
            self.put(request, Stage.RUNNING, request.num_computed_tokens + count)
        return num_prefill

    def behind(self, request_id: str) -> tuple[int, float, float]:
        """(requests, tokens to be computed, tokens that overtake it) behind one that is about to be admitted.

        While it loads, a step begins with those that wait; what the step leaves of a prompt comes before all others.
        """
        waiting, num_overtaking = self._left[Stage.WAITING], 0.0
        own = waiting[request_id][1] if request_id in waiting else 0
        num_requests = len(waiting) - (own > 0) + len(self._left[Stage.LOADING])
        for other, (_, num_left) in waiting.items():
            if num_overtaking >= self._step_tokens:
                break
            num_overtaking += self.computed_share * num_left * (other != request_id)
        num_tokens = self.computed_share * (self.tokens[Stage.WAITING] - own) + self.tokens[Stage.LOADING]
        return num_requests, num_tokens, num_overtaking - self._step_tokens


class Connection(NamedTuple):
    """What a load goes over: a transport's name, and the boot token of the server; another one is a reconnection."""

    transport: str
    boot_token: int


NO_CONNECTION = Connection("", 0)


class Verdict(NamedTuple):
    """How many of a hit's tokens, from its first on, are loaded; as a probe although that is likely to be slower."""

    num_tokens: int
    is_probe: bool = False


@dataclass
class Load:
    """A load that waits for its link or is under way.

    Args:
        began_at: monotonic seconds.
        num_tokens, nbytes: what is loaded; bytes of one rank.
        is_probe: see `Verdict`.
    """

    began_at: float
    num_tokens: int
    nbytes: int
    is_probe: bool
    connection: Connection


class LoadPolicy:
    """Learns the rates of an engine's device and links, and judges hits by them.

    Args:
        queue: what waits for the device.
        loading: the loads that have not ended, the oldest first.
        max_load_s: what is expected to be there later is not loaded.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        queue: PrefillQueue,
        loading: Mapping[str, Load],
        max_load_s: float = math.inf,
        clock: Callable[[], float] | None = None,
    ):
        self._recorder = recorder
        self._queue = queue
        self._loading = loading
        self._max_load_s = max_load_s
        self._clock = clock or time.monotonic
        # Began at, prefill tokens, all tokens; the oldest first.
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=MAX_STEPS_UNDER_WAY)
        self._last_step_ended_at = -math.inf
        self._ended_steps = deque([-math.inf] * STEPS_TO_REPORT, STEPS_TO_REPORT)  # When the last ones began.
        self._prefill = _Rate(MIN_STEPS, NUM_STEPS, keeps_largest=False)
        self._num_unmeasured = self._longest_hit = 0
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
        self._ended_steps.append(began_at)
        # A step that mostly decodes is no measure of prefill.
        least = min(MIN_PREFILL_TOKENS, self._longest_hit // 2 or MIN_PREFILL_TOKENS)
        if num_prefill >= least and 2 * num_prefill >= num_tokens and seconds > 0:
            self._prefill.add(num_prefill, seconds * num_prefill / num_tokens)

    def compute_seconds(self, num_tokens: int) -> float:
        """Estimated seconds that so many tokens add to steps; infinite while unknown."""
        if not self._prefill.is_known:
            return math.inf
        # In steps too small to fill the device tokens look free, and are not.
        return num_tokens * max(self._prefill.unit_s, self._prefill.mean_s / 2)

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
            link.has_free_probe = link.rate.is_known
        loads = [load for load in self._loading.values() if load.connection.transport == connection.transport]
        compute_s = self.compute_seconds(num_tokens)
        if not link.rate.is_known:
            share = num_tokens if len(loads) < MIN_LOADS else 0
        elif self._is_measure_due(num_tokens):
            share = 0
        else:
            share = self._share(request_id, num_tokens, nbytes, compute_s / num_tokens, link, loads)
            if not share and self._prefill.is_known and (probed := link.probe_bytes(compute_s, nbytes, loads)):
                link.has_free_probe = False
                return Verdict(num_tokens * probed // nbytes, is_probe=True)
        if not share:
            self._recorder.add("declined_loads")
        return Verdict(share)

    def _is_measure_due(self, num_tokens: int) -> bool:
        """Whether a hit is computed to learn how fast that is. Counts the hit."""
        if self._prefill.is_known:
            return False
        self._longest_hit = max(self._longest_hit, num_tokens)
        self._num_unmeasured += 1
        return self._num_unmeasured % LEARN_EVERY == 0

    def _share(
        self, request_id: str, num_tokens: int, nbytes: int, token_s: float, link: _Link, loads: Sequence[Load]
    ) -> int:
        """How many tokens of a hit to load, if computing one takes `token_s`; infinite while unknown."""
        num_behind, behind, num_overtaking = self._queue.behind(request_id)
        ahead = self._queue.tokens[Stage.RUNNING] + sum(prefill for _, prefill, _ in self._steps)
        device_s = token_s * (ahead + behind + num_tokens)
        wait_s = max(0.0, link.free_at(loads, self._ended_steps[0]) - self._clock()) + link.rate.fixed_s / MARGIN
        load_token_s = max(1e-12, link.rate.unit_s * nbytes / num_tokens / MARGIN)
        most = (PLANNED_SHARE * self._max_load_s / MARGIN - wait_s) / load_token_s
        if wait_s + num_tokens * load_token_s > device_s:
            most = min(most, (device_s - wait_s) / (load_token_s + token_s))  # Both ways end together.
        share = int(min(num_tokens, most))
        spared = ahead + share * (1 + OTHERS_WEIGHT * num_behind)
        is_worth_it = wait_s + share * load_token_s < token_s * spared and num_overtaking < spared
        return share if share > 0 and is_worth_it else 0

    def load_ended(self, load: Load, seconds: float, succeeded: bool) -> None:
        """A load has ended: the hit is there, or the load has failed and the hit will be computed.

        Args:
            seconds: of the transfer alone, in the slowest rank.
        """
        link, compute_s = self._links[load.connection.transport], self.compute_seconds(load.num_tokens)
        link.ended_at = max(link.ended_at, load.began_at) + seconds
        if math.isinf(compute_s):
            compute_s = seconds
        elif not succeeded:
            seconds += compute_s  # Loading in vain is paid on top of computing.
        self._recorder.add("saved_seconds", max(0.0, compute_s - seconds))
        self._recorder.add("lost_seconds", max(0.0, seconds - compute_s))
        if load.is_probe:
            link.credit_s -= max(0.0, seconds - compute_s)
            link.has_free_probe = seconds <= compute_s
        link.rate.add(load.nbytes, seconds)


class _Link:
    """Loads over one transport.

    Attributes:
        ended_at: when the load that was reported last left the link, in monotonic seconds.
        has_free_probe: another server, or the way to it, may be faster than what was measured.
        credit_s: what probes may lose.
    """

    def __init__(self) -> None:
        self.rate = _Rate(MIN_LOADS, NUM_LOADS, keeps_largest=True)
        self.ended_at = -math.inf
        self.has_free_probe = False
        self.credit_s = 0.0
        self._grown_from = (0, 0.0)

    def free_at(self, loads: Sequence[Load], reported_at: float) -> float:
        """When these loads will have ended, of which each that had ended by `reported_at` would be known."""
        free_at, late_s = self.ended_at, 0.0
        for load in loads:
            free_at = max(free_at, load.began_at) + self.rate.seconds(load.nbytes)
            if load is loads[0]:
                late_s = max(0.0, reported_at - free_at)
        return free_at + 2 * late_s  # As late as it is, it may be again: else all hits would queue for a dead link.

    def probe_bytes(self, compute_s: float, nbytes: int, loads: Sequence[Load]) -> int:
        """How much of a hit that looks too slow is loaded nevertheless. Counts the hit."""
        self.credit_s += PROBE_SHARE * compute_s
        largest, most = self.rate.largest, 2 * self.rate.largest[0]
        is_new = nbytes > most and not self.rate.tells_sizes_apart and largest != self._grown_from
        if is_new and all(load.nbytes <= most for load in loads):
            self._grown_from = largest  # Once: the hit may have no boundary there.
            return min(nbytes, GROWTH * largest[0])
        if loads:  # They teach what a probe would.
            return 0
        return nbytes if self.has_free_probe or self.credit_s >= self.rate.seconds(nbytes) - compute_s else 0


class _Rate:
    """Seconds of work by its size, from what was measured last. Work that took twice as long as it should is left out,
    a quarter of all at most: steps compile, and loads stall.

    Attributes:
        fixed_s, unit_s: of any work, and of each unit of its size; all is by size where sizes are too alike to tell.
        mean_s: of each unit, `fixed_s` included.
        tells_sizes_apart: whether sizes were not too alike.
        largest: size and seconds of the newest work that is at least half as large as the one before.
    """

    def __init__(self, at_least: int, at_most: int, *, keeps_largest: bool):
        self._at_least = at_least
        self._keeps_largest = keeps_largest
        self._measured: deque[tuple[int, float]] = deque(maxlen=at_most)
        self.fixed_s = self.unit_s = self.mean_s = 0.0
        self.tells_sizes_apart = False
        self.largest = 0, 0.0

    @property
    def is_known(self) -> bool:
        return len(self._measured) >= self._at_least

    def seconds(self, size: int) -> float:
        return self.fixed_s + self.unit_s * size

    def add(self, size: int, seconds: float) -> None:
        self._measured.append((size, seconds))
        if 2 * size >= self.largest[0]:
            self.largest = size, seconds
        measured = list(self._measured)
        if self._keeps_largest and self.largest not in measured:
            measured.append(self.largest)
        self._fit(measured)
        by_excess = sorted(measured, key=lambda work: work[1] - self.seconds(work[0]))
        num_kept = len(by_excess) - (len(by_excess) + 1) // 4
        slowest = [work for work in by_excess[num_kept:] if work[1] <= 2 * self.seconds(work[0])]
        self._fit(by_excess[:num_kept] + slowest)

    def _fit(self, measured: Iterable[tuple[int, float]]) -> None:
        sizes, seconds = zip(*measured, strict=True)
        self.fixed_s, self.unit_s = 0.0, sum(seconds) / max(1, sum(sizes))
        self.mean_s = self.unit_s
        self.tells_sizes_apart = False
        if max(sizes) >= 2 * min(sizes) > 0:
            unit_s, fixed_s = linear_regression(sizes, seconds)
            self.tells_sizes_apart = unit_s > 0
            if unit_s > 0 < fixed_s:
                self.fixed_s, self.unit_s = fixed_s, unit_s
