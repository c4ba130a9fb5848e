"""How long requests would wait for their first tokens if stores cost nothing: what no arm can beat.

Engines share a device that computes tokens at a constant rate, in steps of at most so many tokens, first come, first
served. A hit costs no time, takes nothing from the device, and is there as soon as the step that computed it has ended.
Decoding, launching and copying, which real engines also need, are left out.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.measuring import percentile
from benchmarks.serving.oracle import block_ids
from benchmarks.serving.workloads import Request

ROUNDING_TOKENS = 1e-6


@dataclass(frozen=True, slots=True)
class Device:
    """What computes.

    Args:
        tokens_s: tokens per second, of all engines together.
        step_tokens: most of one step of an engine.
        cached_tokens: of each engine's own cache, LRU.
    """

    tokens_s: float
    step_tokens: int
    block_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class _Prefill:
    at: float
    tokens: float
    blocks: Sequence[int]
    has_begun: bool = False


@dataclass(slots=True)
class _Engine:
    """Args: left: tokens of the running step. ending: whose prefill ends with it."""

    device: Device
    waiting: deque[_Prefill] = field(default_factory=deque)
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    left: float = 0.0
    ending: list[_Prefill] = field(default_factory=list)

    def begin_step(self, shared: Collection[int]) -> None:
        room = float(self.device.step_tokens)
        while room and self.waiting:
            prefill = self.waiting[0]
            if not prefill.has_begun:
                hits = 0
                for block in prefill.blocks:
                    if block not in self.cached and block not in shared:
                        break
                    hits += 1
                prefill.tokens -= hits * self.device.block_tokens
                prefill.has_begun = True
            taken = min(room, prefill.tokens)
            prefill.tokens -= taken
            room -= taken
            self.left += taken
            if not prefill.tokens:
                self.ending.append(self.waiting.popleft())

    def end_step(self) -> list[_Prefill]:
        """Whose first tokens are there."""
        ended, self.ending, self.left = self.ending, [], 0.0
        for prefill in ended:
            for block in prefill.blocks:
                self.cached[block] = None
                self.cached.move_to_end(block)
        while len(self.cached) > self.device.cached_tokens // self.device.block_tokens:
            self.cached.popitem(last=False)
        return ended


def first_token_times(
    requests: Sequence[Request], routes: Sequence[int], rate: float, device: Device, *, is_shared: bool
) -> Mapping[str, float]:
    """Times to first token in seconds: "TTFT mean", "TTFT p90" and "TTFT p99".

    Args:
        routes: the engine of each request.
        rate: requests per second.
        is_shared: every engine finds what any has computed; if not, what itself has computed and still caches.
    """
    engines = [_Engine(device) for _ in range(max(routes) + 1)]
    blocks = [prompt.ids for prompt in block_ids(requests, device.block_tokens) if not prompt.is_put]
    arrivals = deque(zip(requests, routes, blocks, strict=True))
    shared: set[int] = set()
    times: list[float] = []
    now = 0.0
    while len(times) < len(requests):
        for engine in engines:
            if not engine.left:
                engine.begin_step(shared)
        busy = [engine for engine in engines if engine.left]
        speed = device.tokens_s / max(1, len(busy))
        ends = now + min((engine.left / speed for engine in busy), default=math.inf)
        arrives = arrivals[0][0].at / rate if arrivals else math.inf
        for engine in busy:
            engine.left -= (min(ends, arrives) - now) * speed
        now = min(ends, arrives)
        if arrives <= ends:
            request, route, ids = arrivals.popleft()
            engines[route].waiting.append(_Prefill(now, request.num_tokens, ids))
        for engine in busy:
            if engine.left > ROUNDING_TOKENS:
                continue
            for prefill in engine.end_step():
                times.append(now - prefill.at)
                if is_shared:
                    shared.update(prefill.blocks)
    times.sort()
    quantiles = {f"TTFT p{percent}": percentile(times, percent) for percent in (90, 99)}
    return {"TTFT mean": sum(times) / len(times), **quantiles}
