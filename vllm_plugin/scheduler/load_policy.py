"""How much of a hit is loaded, and how much is computed: the way that ends first, with what waits on both ways.

A link carries one load after the other, and the device computes one prompt after the other. A hit is loaded as a whole
if the load ends before the device has computed all that waits for it, the hit included; else the hit is cut so that
both ways end together. A hit is declined if its load, or a long prompt that begins meanwhile, delays the request by
more than its share of the device is worth to the request and to those behind it.

The rates of the device and of each transport are learned from what they do. Each hit adds `PROBE_SHARE` of the time of
its way to the credit of the other way, which pays for trying the other way once nothing is under way there. A
reconnection, and a load that has won against expectation, pay for one more load. While a rate is unknown hits are
loaded.
"""

from __future__ import annotations

import enum
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_plugin.metrics import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

MARGIN = 1.25
"""A link counts as so many times faster than measured: near equality either way is fine, and rates are noisy."""
PLANNED_SHARE = 0.9
"""Of the longest time that a load may take, by what was measured: a load that takes longer is in vain."""
OTHERS_WEIGHT = 3
"""A second of the device that a request is spared counts so much for each one behind it: more come than are seen."""
PROBE_SHARE = 0.05
MIN_PREFILL_TOKENS, FULL_STEP_TOKENS = 16, 512
"""A step with fewer prefill tokens than the first measures nothing. One with the second tells of hits of any size."""
MIN_LOADS = 3
"""A rate is known once so much work was measured; until then so many loads at once go over a link."""
DECAY = 0.8
"""Of the weight of a measurement, for each later one."""
FAR = 2
"""Work that takes so many times less, or more, than expected shows that the rate has changed, or has stalled."""
GROWTH = 8
"""Loads of one size do not tell how long a far larger one takes: one so many times as large does."""
MAX_STEPS_UNDER_WAY = 64
STEPS_TO_REPORT = 3
"""A load that was to end before the third last step began, and was not reported, is late. Any later is too early to
tell: a load waits for the step that it begins with, and is reported with a step that is launched after its end."""


class Stage(enum.Enum):
    """Where a request is on its way to its first token: without blocks, waiting for its load, or being computed."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


class PrefillQueue:
    """What waits for the device: prompt tokens that are not computed yet, by the stage of their request."""

    def __init__(self, step_tokens: float = math.inf) -> None:
        self._step_tokens = step_tokens  # The most that one step computes.
        self._left: dict[Stage, dict[str, tuple[Request, int]]] = {stage: {} for stage in Stage}
        self._new: dict[str, Request] = {}  # Waiting requests that `next_waiting` has not returned.
        self.tokens = dict.fromkeys(Stage, 0)  # Still to be computed; of waiting requests all: their hits are unknown.
        self._computed_share = 1.0  # How much of prompts' tokens was computed lately.

    def put(self, request: Request, stage: Stage, num_there: int = 0) -> None:
        """A request is in this stage, with the KV of so many tokens; once all is there it leaves."""
        self.drop(request.request_id)
        if (num_tokens := request.num_tokens - num_there) > 0:
            self._left[stage][request.request_id] = request, num_tokens
            self.tokens[stage] += num_tokens
            if stage is Stage.WAITING:
                self._new[request.request_id] = request

    def drop(self, request_id: str) -> None:
        self._new.pop(request_id, None)
        for stage, left in self._left.items():
            if request_id in left:
                self.tokens[stage] -= left.pop(request_id)[1]

    def next_waiting(self) -> Request | None:
        """The oldest waiting request that was not returned before, if there is one."""
        return self._new.pop(next(iter(self._new))) if self._new else None

    def admitted(self, request: Request, local: int, num_loaded: int) -> None:
        """A request was given blocks: of its tokens, what is neither `local` nor loaded is computed."""
        there = request.num_computed_tokens  # None, unless a load has ended.
        if not there:
            there = local + num_loaded
            self._computed_share += (1 - there / request.num_tokens - self._computed_share) / 20
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
        waiting, loading, num_overtaking = self._left[Stage.WAITING], self._left[Stage.LOADING], -self._step_tokens
        for other, (_, num_left) in waiting.items():
            if num_overtaking >= 0:
                break
            num_overtaking += self._computed_share * num_left * (other != request_id)
        own = waiting[request_id][1] if request_id in waiting else 0
        num_tokens = self._computed_share * (self.tokens[Stage.WAITING] - own) + self.tokens[Stage.LOADING]
        return len(waiting) - (own > 0) + len(loading), num_tokens, num_overtaking


class Connection(NamedTuple):
    """What a load goes over: a transport's name, and the boot token of the server; another one is a reconnection."""

    transport: str
    boot_token: int


NO_CONNECTION = Connection("", 0)


@dataclass
class Load:
    """A load that waits for its link or is under way: when it began (monotonic seconds); bytes of one rank."""

    began_at: float
    num_tokens: int
    nbytes: int
    connection: Connection


@dataclass(eq=False)
class LoadPolicy:
    """Learns the rates of an engine's device and links, and judges hits by them."""

    recorder: Recorder
    queue: PrefillQueue
    loading: Mapping[str, Load]  # The loads that have not ended, the oldest first.
    max_load_s: float = math.inf  # What is expected to be there later is not loaded.
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Began at, prefill tokens, all tokens; the oldest first.
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=MAX_STEPS_UNDER_WAY)
        self._ended_steps = deque([-math.inf] * STEPS_TO_REPORT, STEPS_TO_REPORT)  # When the last ones began.
        self._device, self._connection, self._hit_tokens = _Resource(), NO_CONNECTION, FULL_STEP_TOKENS
        self._links: defaultdict[str, _Resource] = defaultdict(_Resource)

    def step_began(self, num_prefill_tokens: int, num_other_tokens: int) -> None:
        """A step was given to the device. Each begun step is ended once, in order, empty steps too."""
        self._steps.append((self.clock(), num_prefill_tokens, num_prefill_tokens + num_other_tokens))

    def step_ended(self) -> None:
        """The oldest step is done. It ran since it was given to the device, or since the step before it was done."""
        if not self._steps:
            return
        began_at, num_prefill, num_tokens = self._steps.popleft()
        self._ended_steps.append(began_at)
        now, device = self.clock(), self._device
        seconds, device.ended_at = now - max(began_at, device.ended_at), now
        # A step that mostly decodes is no measure of prefill.
        if num_prefill >= MIN_PREFILL_TOKENS and 2 * num_prefill >= num_tokens and seconds > 0:
            device.measured(num_prefill, seconds * num_prefill / num_tokens)
            if num_prefill >= min(self._hit_tokens / 4, FULL_STEP_TOKENS):
                device.credit_s = 0.0

    def compute_seconds(self, num_tokens: int) -> float:
        """Estimated seconds that so many tokens add to steps; infinite while unknown."""
        device = self._device
        # In steps too small to fill the device tokens look free, and are not.
        return num_tokens * max(device.unit_s, device.mean_s / device.mean_size / 2) if device.is_known else math.inf

    def verdict(self, request_id: str, num_tokens: int, nbytes: int, connection: Connection) -> int:
        """How many of a hit's tokens, from its first on, are loaded; of one rank the hit has `nbytes`.

        To be called once a hit: calls are counted.
        """
        link = self._links[connection.transport]
        if connection != self._connection:
            self._connection, link.credit_s = connection, math.inf
        loads = [load for load in self.loading.values() if load.connection.transport == connection.transport]
        ahead = self.queue.tokens[Stage.RUNNING] + sum(prefill for _, prefill, _ in self._steps)
        load_s, compute_s, self._hit_tokens = link.seconds(nbytes), self.compute_seconds(num_tokens), num_tokens
        share = num_tokens if len(loads) < MIN_LOADS else 0
        if link.is_known:
            wait_s = max(0.0, link.free_at(loads, self._ended_steps[0]) - self.clock()) + link.fixed_s / MARGIN
            load_token_s = max(1e-12, link.unit_s * nbytes / num_tokens / MARGIN)
            share = self._share(request_id, num_tokens, ahead, wait_s, load_token_s, compute_s / num_tokens)
            if not share and self._device.is_known:
                link.credit_s += PROBE_SHARE * compute_s
                part = link.credit_s / max(1e-9, load_s - compute_s)
                enough = 1.0 if link.tells_sizes_apart else min(1.0, GROWTH * link.mean_size / nbytes)
                if not loads and part >= enough:
                    share = num_tokens if part >= 1 else round(enough * num_tokens)
        if share and not ahead:  # Of a device that nothing else measures, half a hit tells the rate.
            self._device.credit_s += PROBE_SHARE * load_s
            if self._device.credit_s > (compute_s / 2 if self._device.is_known else load_s):
                self._device.credit_s, share = 0.0, min(share, num_tokens // 2)
        if not share:
            self.recorder.add("declined_loads")
        return share

    def _share(
        self, request_id: str, num_tokens: int, ahead: int, wait_s: float, load_token_s: float, token_s: float
    ) -> int:
        """How many tokens of a hit to load, by the seconds of one on each way."""
        num_behind, behind, num_overtaking = self.queue.behind(request_id)
        device_s = token_s * (ahead + behind + num_tokens)
        most = min(num_tokens, (PLANNED_SHARE * self.max_load_s / MARGIN - wait_s) / load_token_s)
        if wait_s + num_tokens * load_token_s > device_s:
            most = min(most, (device_s - wait_s) / (load_token_s + token_s))  # Both ways end together.
        share = int(most)
        spared = ahead + share * (1 + OTHERS_WEIGHT * num_behind)
        is_worth_it = wait_s + share * load_token_s < token_s * spared and num_overtaking < spared
        return share if share > 0 and is_worth_it else 0

    def load_ended(self, load: Load, seconds: float, succeeded: bool) -> None:
        """A load has ended, or has failed; its transfer alone took so many seconds in the slowest rank."""
        link, compute_s = self._links[load.connection.transport], self.compute_seconds(load.num_tokens)
        link.ended_at = max(link.ended_at, load.began_at) + seconds
        if math.isinf(compute_s):
            compute_s = seconds
        elif not succeeded:
            seconds += compute_s  # Loading in vain is paid on top of computing.
        self.recorder.add("saved_seconds", max(0.0, compute_s - seconds))
        self.recorder.add("lost_seconds", max(0.0, seconds - compute_s))
        if (expected_s := link.seconds(load.nbytes)) > compute_s:
            link.credit_s = math.inf if seconds <= compute_s else min(0.0, expected_s - seconds)
        link.measured(load.nbytes, seconds)


class _Resource:
    """The device or a link: how long its work takes, by size; `credit_s` is what trying it may cost."""

    def __init__(self) -> None:
        self.ended_at = -math.inf  # When the work that was reported last had ended.
        self.fixed_s, self.unit_s = 0.0, 1e-12
        self.credit_s = self.mean_size = self.mean_s = self._late_share = 0.0
        self.tells_sizes_apart = False  # Whether sizes were different enough to tell `fixed_s` from `unit_s`.
        self._num_measured = 0
        self._sums = [0.0] * 5  # Of 1, size, seconds, size², size * seconds.

    @property
    def is_known(self) -> bool:
        return self._num_measured >= MIN_LOADS

    def seconds(self, size: float) -> float:
        return self.fixed_s + self.unit_s * size

    def free_at(self, loads: Sequence[Load], reported_at: float) -> float:
        """When these loads will have ended, of which each that had ended by `reported_at` would be known."""
        free_at, late_s = self.ended_at, 0.0
        for load in loads:
            free_at = max(free_at, load.began_at) + self.seconds(load.nbytes)
            if load is loads[0]:
                late_s = max(0.0, reported_at - free_at)
        return free_at + 2 * late_s  # As late as it is, it may be again: else all hits would queue for a dead link.

    def measured(self, size: int, seconds: float) -> None:
        """Learns from a piece of work: the less from earlier ones, the faster it was.

        One that stalled is left out, unless a quarter of all did lately.
        """
        self._num_measured += 1
        size, seconds, keep = max(1, size), max(1e-9, seconds), DECAY
        if self.mean_s:
            guesses = self.seconds(size), self.seconds(size) if self.tells_sizes_apart else self.mean_s
            is_late = seconds > FAR * max(guesses)
            self._late_share += (1 - DECAY) * (is_late - self._late_share)
            if is_late and self._late_share < 0.25:
                return
            keep *= min(1.0, FAR * seconds / min(guesses)) ** 2
        new = 1.0, size, seconds, size * size, size * seconds
        self._sums = [keep * old + each for old, each in zip(self._sums, new, strict=True)]
        num, sizes, total_s, squares, products = self._sums
        self.mean_size, self.mean_s = sizes / num, total_s / num
        spread = num * squares - sizes * sizes
        if spread > 0.03 * sizes * sizes and (unit_s := (num * products - sizes * total_s) / spread) > 0:
            self.fixed_s = max(0.0, self.mean_s - unit_s * self.mean_size)
            self.unit_s = (self.mean_s - self.fixed_s) / self.mean_size
            self.tells_sizes_apart = True
        else:
            scale = self.mean_s / self.seconds(self.mean_size)
            self.fixed_s, self.unit_s = scale * self.fixed_s, scale * self.unit_s
