"""An engine, its link to a pool and requests that arrive, on a simulated clock: what a load policy makes of them.

The engine computes prompts in the order of arrival, in steps of a bounded number of tokens; the link carries one load
after the other beside it. A request whose first part is loaded waits for its load and is computed from there on. Loads
are reported when a step ends, as vLLM does it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from tests.support.clock import FakeClock
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.load_policy import Connection, LoadPolicy
from vllm_plugin.scheduler.prefill_queue import PrefillQueue, Stage

TOKEN_S = 1 / 25_000
"""Of a Llama-3.1-8B on an H200, about."""
TOKEN_BYTES = 131_072
STEP_TOKENS, STEP_S = 8_192, 0.004
LATENCY_S = 0.001
NUM_REQUESTS, MEAN_TOKENS = 400, 4_000
NUM_FIRST, FIRST_APART_S = 16, 20.0
"""Requests from which the policy learns the rates: each is served alone, and counts for nothing."""
LINK = Connection("tcp", 1)

Policy = Callable[["Served"], Callable[["Request"], int]]
"""Given the simulation, answers how many tokens of a request's hit are loaded."""


@dataclass(slots=True)
class Request:
    """A prompt of `num_tokens`, of which the pool has the first `hit`; `left` are still to be computed."""

    name: str
    at: float
    num_tokens: int
    hit: int
    left: int
    loaded: int = 0
    is_probe: bool = False
    began_at: float = 0.0


class Served:
    """Serves all requests on creation.

    Args:
        load: of the device: how much of its time all prompts would take, computed whole.
        link_bytes_s: of the link.
        hit_share: of a prompt, the part that is in the pool, in nine of ten requests.

    Attributes:
        mean_ttft_s: seconds from arrival to the end of the prompt.
    """

    def __init__(self, policy: Policy, load: float, link_bytes_s: float, hit_share: float, seed: int):
        self.clock = FakeClock()
        self.queue = PrefillQueue()
        self.learned = LoadPolicy(Recorder(), self.queue, self.clock)
        self._link_bytes_s = link_bytes_s
        self._answer = policy(self)
        self._arriving = deque(_arrivals(random.Random(seed), load, hit_share, self.clock()))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: list[tuple[float, int, Request]] = []  # By when each is there.
        self._link_free_at = 0.0
        took: dict[str, float] = {}
        while self._arriving or self._waiting or self._running or self._loading:
            took |= {request.name: self.clock() - request.at for request in self._step()}
        self.mean_ttft_s = fmean(seconds for name, seconds in took.items() if int(name) >= NUM_FIRST)

    def _step(self) -> list[Request]:
        """Computes one step, or waits for the next event; returns the requests that it ends."""
        now = self.clock()
        while self._arriving and self._arriving[0].at <= now:
            request = self._arriving.popleft()
            self.queue.put(request.name, Stage.WAITING, request.num_tokens)
            self._waiting.append(request)
        while self._loading and self._loading[0][0] <= now:
            self._report(heapq.heappop(self._loading)[2])
        scheduled: dict[str, int] = {}
        for request in self._running:
            self._schedule(request, scheduled)
        while self._waiting and sum(scheduled.values()) < STEP_TOKENS:
            request = self._waiting.popleft()
            self._admit(request)
            if not request.loaded:
                self._schedule(request, scheduled)
        num_tokens = self.queue.step(scheduled)
        self.learned.step_began(num_tokens, 0)
        if num_tokens:
            self.clock.advance(STEP_S + num_tokens * TOKEN_S)
        else:
            nexts = [self._arriving[0].at] if self._arriving else []
            nexts += [self._loading[0][0]] if self._loading else []
            self.clock.advance(max(1e-6, min(nexts, default=now) - now))
        self.learned.step_ended()
        ended = [request for request in self._running if not request.left]
        self._running = [request for request in self._running if request.left]
        return ended

    def _schedule(self, request: Request, scheduled: dict[str, int]) -> None:
        count = min(request.left, STEP_TOKENS - sum(scheduled.values()))
        if count:
            scheduled[request.name] = count
            request.left -= count

    def _admit(self, request: Request) -> None:
        request.loaded = self._answer(request) if request.hit else 0
        request.left -= request.loaded
        self.queue.admitted(request.num_tokens, request.left)
        self.queue.put(request.name, Stage.LOADING if request.loaded else Stage.RUNNING, request.left)
        if request.loaded:
            nbytes = request.loaded * TOKEN_BYTES
            self.learned.load_began(nbytes, LINK)
            request.began_at = max(self._link_free_at, self.clock())
            self._link_free_at = request.began_at + LATENCY_S + nbytes / self._link_bytes_s
            heapq.heappush(self._loading, (self._link_free_at, int(request.name), request))
        else:
            self._running.append(request)

    def _report(self, request: Request) -> None:
        nbytes = request.loaded * TOKEN_BYTES
        seconds = LATENCY_S + nbytes / self._link_bytes_s
        self.learned.load_ended(request.loaded, nbytes, seconds, True, request.is_probe, LINK)
        self.queue.put(request.name, Stage.RUNNING, request.left)
        self._running.append(request)


def always(_: Served) -> Callable[[Request], int]:
    return lambda request: request.hit


def never(_: Served) -> Callable[[Request], int]:
    return lambda request: 0


def constant(share: float) -> Policy:
    """Loads the same share of every hit: the best of these, in hindsight, is the oracle."""
    return lambda _: lambda request: int(share * request.hit)


def learned(served: Served) -> Callable[[Request], int]:
    """The connector's."""

    def answer(request: Request) -> int:
        verdict = served.learned.verdict(request.name, request.hit, request.hit * TOKEN_BYTES, LINK)
        request.is_probe = verdict.is_probe
        return verdict.num_tokens

    return answer


def mean_ttft_s(policy: Policy, load: float, link_bytes_s: float, hit_share: float, seeds: int = 3) -> float:
    """Over simulations with different arrivals."""
    return fmean(Served(policy, load, link_bytes_s, hit_share, seed).mean_ttft_s for seed in range(seeds))


def _arrivals(picks: random.Random, load: float, hit_share: float, at: float) -> list[Request]:
    found = []
    for nth in range(NUM_FIRST + NUM_REQUESTS):
        at += FIRST_APART_S if nth <= NUM_FIRST else picks.expovariate(load / (MEAN_TOKENS * TOKEN_S))
        num_tokens = int(MEAN_TOKENS * picks.uniform(0.3, 1.7))
        hit = int(hit_share * num_tokens) if picks.random() < 0.9 else 0
        found.append(Request(f"{nth:05}", at, num_tokens, hit, num_tokens))
    return found
