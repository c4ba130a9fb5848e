"""An engine, its link to a pool and requests that arrive, on a simulated clock: what a load policy makes of them.

The engine computes prompts in the order of arrival, in steps of a bounded number of tokens; the link carries one load
after the other beside it. A request whose first part is loaded waits for its load and is computed from there on. Loads
are reported when a step ends that began after them, as vLLM does it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.clock import FakeClock
from tests.support.held import num_queued
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.load_policy import Connection, Load, LoadPolicy, PrefillQueue, Stage

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
    """A prompt of `num_tokens`, of which the pool has the first `hit`."""

    request_id: str
    at: float
    num_tokens: int
    hit: int
    num_computed_tokens: int = 0
    loaded: int = 0
    there_at: float = 0.0
    transfer_s: float = 0.0

    @property
    def left(self) -> int:
        return self.num_tokens - self.num_computed_tokens


@dataclass
class Served:
    """Serves requests on creation.

    Args:
        requests: in the order of arrival.
        link_bytes_s: of the link, at a time.
        token_s: of the device, at a time.

    Attributes:
        took: seconds from arrival to the end of the prompt, in the order of arrival.
    """

    policy: Policy
    requests: list[Request]
    link_bytes_s: Callable[[float], float]
    max_load_s: float = 5.0
    token_s: Callable[[float], float] = lambda _: TOKEN_S
    took: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.queue: Any = PrefillQueue(STEP_TOKENS)
        self.loading: dict[str, Load] = {}
        self.learned = LoadPolicy(Recorder(), self.queue, self.loading, self.max_load_s, self.clock)
        self._answer = self.policy(self)
        self._start = self.clock()
        self._arriving, self._waiting = deque(self.requests), deque[Request]()
        self._running: list[Request] = []
        self._on_link: deque[Request] = deque()
        self._link_free_at = 0.0
        took = {}
        while self._arriving or self._waiting or self._running or self._on_link:
            took |= {request.request_id: self.clock() - self._start - request.at for request in self._step()}
        assert not num_queued(self.queue) and not self.loading
        self.took = [took[request.request_id] for request in self.requests]

    def _step(self) -> list[Request]:
        """Computes one step, or waits for the next event; returns the requests that it ends."""
        now = self.clock() - self._start
        while self._arriving and self._arriving[0].at <= now:
            self._waiting.append(self._arriving.popleft())
            self.queue.put(self._waiting[-1], Stage.WAITING)
        scheduled: dict[str, int] = {}
        for request in self._running:
            self._schedule(request, scheduled)
        while self._waiting and sum(scheduled.values()) < STEP_TOKENS:
            request = self._waiting.popleft()
            self._admit(request, now)
            if not request.loaded:
                self._running.append(request)
                self._schedule(request, scheduled)
        there = [request for request in self._on_link if request.there_at <= now]
        num_tokens = self.queue.step(scheduled)
        self.learned.step_began(num_tokens, 0)
        if num_tokens:
            self.clock.advance(STEP_S + num_tokens * self.token_s(now))
        else:
            nexts = [request.at for request in list(self._arriving)[:1]] + [each.there_at for each in self._on_link]
            self.clock.advance(max(1e-6, min(nexts, default=now) - now))
        for request in self._running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
        for request in there:
            self._report(request)
        self.learned.step_ended()
        ended = [request for request in self._running if not request.left]
        self._running = [request for request in self._running if request.left]
        return ended

    def _schedule(self, request: Request, scheduled: dict[str, int]) -> None:
        if count := min(request.left, STEP_TOKENS - sum(scheduled.values())):
            scheduled[request.request_id] = count

    def _admit(self, request: Request, now: float) -> None:
        request.loaded = self._answer(request) if request.hit else 0
        self.queue.admitted(request, 0, request.loaded)
        if request.loaded:
            nbytes = request.loaded * TOKEN_BYTES
            self.loading[request.request_id] = Load(self.clock(), request.loaded, nbytes, LINK)
            began_at = max(self._link_free_at, now)
            request.transfer_s = LATENCY_S + nbytes / self.link_bytes_s(began_at)
            request.there_at = self._link_free_at = began_at + request.transfer_s
            self._on_link.append(request)

    def _report(self, request: Request) -> None:
        self._on_link.remove(request)
        self.learned.load_ended(self.loading.pop(request.request_id), request.transfer_s, True)
        request.num_computed_tokens = request.loaded
        self.queue.put(request, Stage.RUNNING, request.loaded)
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
        return served.learned.verdict(request.request_id, request.hit, request.hit * TOKEN_BYTES, LINK)

    return answer


def arrivals(
    seed: int, load: float, hit_share: float, num_first: int = NUM_FIRST, mean_tokens: int = MEAN_TOKENS
) -> list[Request]:
    """Requests of which nine in ten have a hit.

    Args:
        load: of the device: how much of its time all prompts would take, computed whole.
        hit_share: of a prompt, the part that is in the pool.
        num_first: requests that come one by one before all others.
    """
    picks, at, found = random.Random(seed), 0.0, []
    for nth in range(num_first + NUM_REQUESTS):
        at += FIRST_APART_S if nth <= num_first > 0 else picks.expovariate(load / (mean_tokens * TOKEN_S))
        num_tokens = int(mean_tokens * picks.uniform(0.3, 1.7))
        hit = int(hit_share * num_tokens) if picks.random() < 0.9 else 0
        found.append(Request(f"{nth:05}", at, num_tokens, hit))
    return found
