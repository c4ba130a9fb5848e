"""What the connector loses to a pool that is slower than computing, and what it knows of the prompts that wait."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.held import num_queued
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import Core, MakeCore, blocks, fill
from vllm_plugin.metrics import Recorder
from vllm_plugin.scheduler.load_policy import (
    GROWTH,
    MARGIN,
    MIN_LOADS,
    MIN_PREFILL_TOKENS,
    NO_CONNECTION,
    PLANNED_SHARE,
    Connection,
    Load,
    LoadPolicy,
    PrefillQueue,
    Stage,
)

TOKEN_S, TOKEN_BYTES = 1e-4, 1_000
CHUNK_TOKENS = 2_048
STEP_TOKENS = 60
LOADS_TO_NOTICE = 16


class Engine:
    """An engine that knows how fast it computes, and a pool whose loads take `load_s(tokens)`."""

    def __init__(self, load_s: Callable[[int], float], max_load_s: float = math.inf, seed: int = 0):
        self.load_s, self.connection = load_s, NO_CONNECTION
        self.clock, self.recorder, self.picks = FakeClock(), Recorder(), random.Random(seed)
        self.queue: Any = PrefillQueue()
        self.loading: dict[str, Load] = {}
        self.policy = LoadPolicy(self.recorder, self.queue, self.loading, max_load_s, self.clock)
        for _ in range(24):
            self.compute(self.picks.randint(512, CHUNK_TOKENS))

    def compute(self, num_tokens: int, num_decodes: int = 0, slower: float = 1.0) -> None:
        self.policy.step_began(num_tokens, num_decodes)
        self.clock.advance(slower * (0.005 + (num_tokens + num_decodes) * TOKEN_S))
        self.policy.step_ended()

    def verdict(self, num_tokens: int) -> int:
        return self.policy.verdict("r", num_tokens, num_tokens * TOKEN_BYTES, self.connection)

    def load(self, num_tokens: int, succeeds: bool = True) -> None:
        """A load, whatever the policy says."""
        load = self.loading["r"] = Load(self.clock(), num_tokens, num_tokens * TOKEN_BYTES, self.connection)
        seconds = self.load_s(num_tokens)
        self.clock.advance(seconds)
        del self.loading["r"]
        self.policy.load_ended(load, seconds, succeeds)

    def hit(self, num_tokens: int, succeeds: bool = True) -> int:
        """A request whose prompt is in the pool: loads or computes it; returns how much is loaded."""
        if loaded := self.verdict(num_tokens):
            self.load(loaded, succeeds)
        for at in range(loaded if succeeds else 0, num_tokens, CHUNK_TOKENS):
            self.compute(min(CHUNK_TOKENS, num_tokens - at))
        return loaded


def by_ratio(slower: float) -> Callable[[int], float]:
    """Loads that take `slower` times as long as computing."""
    return lambda num_tokens: slower * num_tokens * TOKEN_S


def test_small_loads_do_not_tell_that_a_large_one_is_slow() -> None:
    """Most of their time is latency. By their rate alone, the first dozen of documents would be computed."""
    engine = Engine(lambda num_tokens: 0.0165 + num_tokens * 1e-5)
    assert not [engine.hit(48) for _ in range(20)][-1]
    first, *others = [engine.hit(20_000) for _ in range(10)]
    assert first == 48 * GROWTH
    assert others == 9 * [20_000]
    for _ in range(20):
        engine.load(48)
    assert engine.hit(20_000) == 20_000, "and it is not forgotten"


@pytest.mark.parametrize("num_decodes", [0, 256])
def test_what_computing_costs_is_learned_from_steps_that_mostly_prefill(num_decodes: int) -> None:
    engine = Engine(by_ratio(1.0))
    for num_prefill, num_other in ((0, 0), (MIN_PREFILL_TOKENS - 1, 0), (200, 201), (0, 500)):
        for _ in range(10):
            engine.compute(num_prefill, num_other, slower=50.0)
    engine.compute(1_000, slower=100.0)  # It compiles.
    for num_tokens in (500, 800, 1_000, 1_500, 1_800):
        engine.compute(num_tokens, num_decodes)
    assert engine.policy.compute_seconds(1_000) == pytest.approx(1_000 * TOKEN_S, rel=0.1)
    assert LoadPolicy(Recorder(), PrefillQueue(), {}).compute_seconds(1) == math.inf


@given(slower=st.floats(0.2, 0.9), num_tokens=st.integers(10_000, 1_000_000))
def test_a_load_has_room_before_its_timeout(slower: float, num_tokens: int) -> None:
    engine = Engine(by_ratio(slower), max_load_s=0.5)
    for _ in range(MIN_LOADS):
        engine.load(1_000)
    assert engine.load_s(engine.verdict(num_tokens)) <= PLANNED_SHARE * 0.5 * 1.01


@pytest.mark.parametrize(("num_waiting", "share"), [(0, 0), (1, 400), (2, 600), (4, 1_000)])
def test_a_slow_link_carries_what_it_can_while_the_device_is_busy(num_waiting: int, share: int) -> None:
    """Until both ways end together: share * slower / MARGIN = waiting tokens + 1,000 - share."""
    engine = Engine(by_ratio(4 * MARGIN))
    for _ in range(10):
        engine.load(1_000)
    for nth in range(num_waiting):
        engine.queue.put(Prompt(f"waiting {nth}", 0, 1_000), Stage.WAITING)
    assert engine.verdict(1_000) == pytest.approx(share, abs=2)


def test_seconds_saved_and_lost_are_counted() -> None:
    engine = Engine(lambda _: 0.1)
    for num_tokens, succeeds in ((4_000, True), (500, True), (4_000, False)):
        engine.load(num_tokens, succeeds)
    taken = engine.recorder.take()
    assert taken is not None
    assert taken.data["saved_seconds"] == pytest.approx(4_000 * TOKEN_S - 0.1, rel=0.05)
    assert taken.data["lost_seconds"] == pytest.approx(0.1 - 500 * TOKEN_S + 0.1, rel=0.05)


@settings(max_examples=effort(15))
@given(
    connections=st.lists(
        st.tuples(st.sampled_from(["shm", "tcp", "grpc"]), st.floats(0.01, 0.5) | st.floats(1.6, 50)),
        min_size=2,
        max_size=8,
    ),
    seed=st.integers(0, 10_000),
)
@example(connections=[("shm", 2.0), ("shm", 0.5)], seed=0)
def test_each_connection_is_judged_by_its_own_rate_soon(connections: list[tuple[str, float]], seed: int) -> None:
    """Servers come and go. Each hit over a connection that pays is loaded; one that does not pay is noticed."""
    engine = Engine(by_ratio(1.0), seed=seed)
    for boot_token, (transport, slower) in enumerate(connections, 1):
        engine.connection, engine.load_s = Connection(transport, boot_token), by_ratio(slower)
        taken = [engine.hit(engine.picks.randint(64, 8_192)) > 0 for _ in range(40)]
        assert all(taken) if slower < 1 else sum(taken) <= LOADS_TO_NOTICE


# Which prompts wait for the device, beside a plain count over all of them

NAMES = st.sampled_from("abcdef")
NUM_TOKENS = 50


@dataclass
class Prompt:
    """What the queue reads of a request."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int = NUM_TOKENS


class Machine(RuleBasedStateMachine):
    """Requests that come, load, run and end in any order, some of them unknown to the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Any = PrefillQueue(STEP_TOKENS)
        self.prompts = {name: Prompt(name, 0) for name in "abcdef"}
        self.left: dict[str, tuple[Stage, int]] = {}

    @rule(name=NAMES, stage=st.sampled_from(Stage), num_there=st.integers(0, NUM_TOKENS))
    def put(self, name: str, stage: Stage, num_there: int) -> None:
        self.prompts[name].num_computed_tokens = num_there
        self.queue.put(self.prompts[name], stage, num_there)
        self._now_left(name, stage, NUM_TOKENS - num_there)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.queue.drop(name)
        self.left.pop(name, None)

    @rule(name=NAMES, num_tokens=st.integers(0, NUM_TOKENS))
    def there_is_more_or_less_than_was_known(self, name: str, num_tokens: int) -> None:
        """Another connector has loaded a part, or the request was preempted."""
        if name in self.left:
            self.prompts[name].num_computed_tokens = min(num_tokens, NUM_TOKENS - 1)

    @rule(scheduled=st.dictionaries(NAMES, st.integers(1, 20)))
    def step(self, scheduled: dict[str, int]) -> None:
        expected = 0
        for name, count in scheduled.items():
            if self.left.get(name, (Stage.WAITING, 0))[0] is Stage.RUNNING:
                left = NUM_TOKENS - self.prompts[name].num_computed_tokens
                expected += min(count, left)
                self._now_left(name, Stage.RUNNING, left - count)
        assert self.queue.step(scheduled) == expected
        for name, count in scheduled.items():
            self.prompts[name].num_computed_tokens += count

    @invariant()
    def counts(self) -> None:
        assert num_queued(self.queue) == len(self.left)
        for stage in Stage:
            assert self.queue.tokens[stage] == sum(num for at, num in self.left.values() if at is stage)

    @rule(name=NAMES)
    def behind(self, name: str) -> None:
        waiting = [num for other, (at, num) in self.left.items() if at is Stage.WAITING and other != name]
        loading = [num for at, num in self.left.values() if at is Stage.LOADING]
        begun = next((num for num in itertools.accumulate(waiting) if num >= STEP_TOKENS), sum(waiting))
        assert self.queue.behind(name) == (
            len(waiting) + len(loading),
            sum(waiting) + sum(loading),
            begun - STEP_TOKENS,
        )

    def _now_left(self, name: str, stage: Stage, num_tokens: int) -> None:
        self.left.pop(name, None)
        if num_tokens > 0:
            self.left[name] = stage, num_tokens


TestPrefillQueue = Machine.TestCase
TestPrefillQueue.settings = settings(max_examples=effort(50), stateful_step_count=30, deadline=None)


# As vLLM calls the connector


def queued(one: Core) -> dict[Stage, int]:
    """Tokens by stage, without the stages that have none."""
    return {stage: count for stage, count in one.side.queue.tokens.items() if count}


def test_a_request_is_counted_from_its_arrival_to_its_first_token(core: MakeCore) -> None:
    one, request = core(decline_slow_loads=False).connected(), make_request("r", tokens(100))
    fill(one, request.block_hashes[:4])
    one.side.arrived(request)
    assert queued(one) == {Stage.WAITING: 100}
    one.allocate(request, one.ask(request))
    assert queued(one) == {Stage.LOADING: 100 - blocks(4)}
    request.num_computed_tokens = blocks(4)
    one.report(finished_recving={"r"})
    one.allocate(request, 0)
    assert queued(one) == {Stage.RUNNING: 100 - blocks(4)}
    one.step((request, 30))
    assert queued(one) == {Stage.RUNNING: 70 - blocks(4)}
    one.step((request, 70 - blocks(4)))
    assert queued(one) == {}
    one.finish(request)


def test_a_hook_that_failed_leaves_nothing_of_the_request_before(one: Core) -> None:
    first, second = make_request("a", tokens(100)), make_request("b", tokens(100, 1))
    one.side.matched_tokens(first, blocks(3))
    one.side.miss(second)
    one.allocate(second, 0)
    assert queued(one) == {Stage.RUNNING: 100}
    one.finish(second)
