"""What the connector loses to a pool that is slower than computing, and what it knows of the prompts that wait."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
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
    PROBE_SHARE,
    Connection,
    Load,
    LoadPolicy,
    PrefillQueue,
    Stage,
)

TOKEN_BYTES = 1_000
STEP_S, STEP_TOKENS = 0.005, 60
CHUNK_TOKENS = 2_048
HIT_TOKENS = (64, 8_192)
LOADS_TO_NOTICE = 16

EXAMPLES = effort(15)

Noise = Callable[[random.Random], float]


def quiet(_: random.Random) -> float:
    return 1.0


def half(picks: random.Random) -> float:
    return picks.uniform(0.5, 1.5)


@dataclass
class World:
    """An engine that serves one request after another, and a pool.

    Args:
        token_s: true seconds a prefilled token.
        latency_s, byte_s: true cost of a load.
        connection: what loads go over.
        max_load_s: see `LoadPolicy`.
        noise, load_noise: factor on each step, and on each load if it is another.
        lost_s: true seconds lost by loads that were taken, each against computing it.
        gain_s: the opposite.
        asked_s: true compute time of all hits.
    """

    token_s: float = 1e-4
    latency_s: float = 0.0
    byte_s: float = 1e-8
    connection: Connection = NO_CONNECTION
    noise: Noise = quiet
    load_noise: Noise | None = None
    seed: int = 0
    max_load_s: float = math.inf
    clock: FakeClock = field(default_factory=FakeClock)
    lost_s: float = 0.0
    gain_s: float = 0.0
    asked_s: float = 0.0
    verdicts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.picks = random.Random(self.seed)
        self.recorder = Recorder()
        self.queue: Any = PrefillQueue()
        self.loading: dict[str, Load] = {}
        self.load_policy = LoadPolicy(self.recorder, self.queue, self.loading, self.max_load_s, self.clock)
        self.counted: dict[str, float] = {}

    def compute(self, num_tokens: int, num_decodes: int = 0) -> None:
        while num_tokens > 0:
            chunk = min(num_tokens, CHUNK_TOKENS)
            self.load_policy.step_began(chunk, num_decodes)
            self.clock.advance((STEP_S + (chunk + num_decodes) * self.token_s) * self.noise(self.picks))
            self.load_policy.step_ended()
            num_tokens -= chunk

    def warm_up(self) -> World:
        for _ in range(24):
            self.compute(self.picks.randint(512, CHUNK_TOKENS))
        return self

    def load_s(self, num_tokens: int) -> float:
        return self.latency_s + num_tokens * TOKEN_BYTES * self.byte_s

    def hit(self, num_tokens: int = 0, succeeds: bool = True) -> int:
        """A request whose prompt is in the pool: loads or computes it."""
        num_tokens = num_tokens or self.picks.randint(*HIT_TOKENS)
        nbytes = num_tokens * TOKEN_BYTES
        loaded = self.load_policy.verdict("r", num_tokens, nbytes, self.connection)
        self.verdicts.append(loaded)
        self.asked_s += num_tokens * self.token_s
        if loaded:
            seconds = self.load_s(loaded) * (self.load_noise or self.noise)(self.picks)
            self.load(loaded, seconds, succeeds)
            lost_s = seconds - (loaded * self.token_s if succeeds else 0.0)
            self.lost_s += max(0.0, lost_s)
            self.gain_s += max(0.0, -lost_s)
        self.compute(num_tokens - loaded if succeeds else num_tokens)
        return loaded

    def load(self, num_tokens: int, seconds: float, succeeds: bool = True) -> None:
        """A load of a hit, whatever the policy says."""
        nbytes = num_tokens * TOKEN_BYTES
        load = self.loading["r"] = Load(self.clock(), num_tokens, nbytes, self.connection)
        self.clock.advance(seconds)
        del self.loading["r"]
        self.load_policy.load_ended(load, seconds, succeeds)

    @property
    def computed_s(self) -> float:
        """True compute time of what was not loaded."""
        return self.asked_s - sum(self.verdicts) * self.token_s

    def hits(self, count: int) -> list[int]:
        return [self.hit() for _ in range(count)]

    def count(self, name: str) -> float:
        if (taken := self.recorder.take()) is not None:
            for key, value in taken.data.items():
                self.counted[key] = self.counted.get(key, 0) + value
        return self.counted.get(name, 0)


def ratio(world: World, slower: float) -> World:
    """Sets the pool's bandwidth so that loads take `slower` times as long as computing."""
    world.latency_s = 0.0
    world.byte_s = slower * world.token_s / TOKEN_BYTES
    return world


SEEDS = st.integers(0, 10_000)


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(0.001, 0.5), token_s=st.sampled_from([1e-5, 1e-4, 1e-3]), seed=SEEDS)
def test_a_pool_that_is_faster_is_never_declined(slower: float, token_s: float, seed: int) -> None:
    world = ratio(World(token_s=token_s, seed=seed), slower).warm_up()
    assert all(world.hits(200))
    most_s = 1.01 * PROBE_SHARE * slower * world.asked_s + HIT_TOKENS[1] / 2 * token_s
    assert world.computed_s <= most_s, "what measures the device"
    assert world.count("declined_loads") == 0
    assert world.count("lost_seconds") == world.lost_s == 0


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(0.001, 0.2), token_s=st.sampled_from([1e-5, 1e-4, 1e-3]), seed=SEEDS)
def test_noise_hides_a_fast_pool_from_the_smallest_hits_at_most(slower: float, token_s: float, seed: int) -> None:
    """Whose latency drowns in the noise of the large ones: a hundredth of what there is to gain."""
    world = ratio(World(token_s=token_s, noise=half, seed=seed), slower).warm_up()
    world.hits(200)
    measuring_s = 1.5 * PROBE_SHARE * slower * world.asked_s
    assert world.computed_s <= 0.01 * world.asked_s + measuring_s


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(1.6, 200), token_s=st.sampled_from([1e-5, 1e-4, 1e-3]), seed=SEEDS)
def test_a_pool_that_is_much_slower_costs_its_first_loads_and_a_twentieth(
    slower: float, token_s: float, seed: int
) -> None:
    """Against never using it: `MIN_LOADS` hits, 5 % of the compute time of the others, and one probe in advance."""
    world = ratio(World(token_s=token_s, seed=seed), slower).warm_up()
    assert all(world.hits(MIN_LOADS))
    world.lost_s = world.asked_s = 0.0
    rest = world.hits(300)
    largest_loss_s = (slower - 1) * HIT_TOKENS[1] * token_s
    assert world.lost_s <= 1.05 * PROBE_SHARE * world.asked_s + largest_loss_s
    assert world.count("declined_loads") == rest.count(0)


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(1.6, 20), seed=SEEDS)
def test_probing_a_slow_pool_is_as_cheap_with_noise(slower: float, seed: int) -> None:
    """Beyond its share, it may lose what one probe loses more than was expected of it."""
    world = ratio(World(noise=half, seed=seed), slower).warm_up()
    world.hits(MIN_LOADS)
    world.lost_s = world.asked_s = 0.0
    world.hits(300)
    overshoot_s = 1.5 * slower * HIT_TOKENS[1] * world.token_s
    assert world.lost_s <= 1.5 * PROBE_SHARE * world.asked_s + overshoot_s


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(1.6, 50), faster=st.floats(0.01, 0.5), seed=SEEDS)
def test_a_pool_that_turns_slow_is_noticed_and_one_that_turns_fast_is_found_again(
    slower: float, faster: float, seed: int
) -> None:
    """Found again: with a probe after 20 * (r - 1) hits of one size, three times that for mixed ones, and two more."""
    world = ratio(World(seed=seed), faster).warm_up()
    world.hits(20)
    ratio(world, slower)
    assert sum(map(bool, world.hits(50))) <= LOADS_TO_NOTICE
    ratio(world, faster)
    bound = math.ceil(3 * (slower - 1) / PROBE_SHARE) + 20
    verdicts = world.hits(bound)
    assert verdicts[-1]
    assert all(world.hits(50)), "and it stays found"


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(0.8, 1.2), seed=SEEDS)
def test_noise_around_equality_loses_little(slower: float, seed: int) -> None:
    """Loads ±50 % around computing: what is lost in the mean is less than the margin, and nothing is gained by luck."""
    world = ratio(World(noise=half, seed=seed), slower).warm_up()
    world.hits(400)
    everything_s = world.asked_s
    assert world.lost_s - world.gain_s <= (MARGIN - 1) * everything_s


@settings(max_examples=EXAMPLES)
@given(latency_s=st.floats(0.01, 0.2), seed=SEEDS)
def test_a_pool_with_a_long_way_to_it_is_used_for_long_prompts_only(latency_s: float, seed: int) -> None:
    world = World(latency_s=latency_s, seed=seed).warm_up()
    world.hits(40)
    even = latency_s / (world.token_s - TOKEN_BYTES * world.byte_s)
    short, long = int(even / 3), int(even * 3)
    loaded = [[world.hit(num_tokens) for _ in range(5)] for num_tokens in (short, long)]
    assert sum(map(bool, loaded[0])) <= 1 and all(loaded[1])


def test_small_loads_do_not_tell_that_a_large_one_is_slow() -> None:
    """Most of their time is latency. By their rate alone, the first dozen of documents would be computed."""
    world = World(token_s=3e-5, latency_s=0.005, byte_s=3e-9).warm_up()
    assert not [world.hit(48) for _ in range(20)][-1]
    first, *others = [world.hit(20_000) for _ in range(10)]
    assert first == 48 * GROWTH
    assert others == 9 * [20_000]
    for _ in range(20):
        world.load(48, world.load_s(48))
    assert world.hit(20_000) == 20_000, "and it is not forgotten"


def test_a_part_that_no_hit_can_end_with_is_not_waited_for() -> None:
    """Of models whose hits end at few boundaries: declined hits pay for a whole one."""
    world = World(token_s=3e-5, latency_s=0.005, byte_s=1e-8).warm_up()
    for _ in range(20):
        world.hit(48)
    asked = [world.load_policy.verdict("r", 20_000, 20_000 * TOKEN_BYTES) for _ in range(100)]
    assert asked[0] == 48 * GROWTH
    assert 20_000 in asked


@pytest.mark.parametrize("latency_s", [0.0, 0.005])
def test_a_slow_link_stays_slow_for_large_loads_too(latency_s: float) -> None:
    """What a larger load than any before may lose is some of what a small one takes."""
    world = World(token_s=3e-5, latency_s=latency_s, byte_s=1e-7).warm_up()
    for _ in range(20):
        world.hit(48)
    world.lost_s = 0.0
    verdicts = [world.hit(20_000) for _ in range(10)]
    assert max(verdicts) <= 48 * GROWTH
    assert world.lost_s <= 2 * GROWTH * world.load_s(48)


def test_a_third_of_the_loads_being_very_slow_counts() -> None:
    """A median would not see it."""
    world = ratio(World(), 0.2).warm_up()
    world.load_noise = lambda picks: picks.choice([1.0, 1.0, 50.0])
    world.hits(300)
    assert sum(map(bool, world.verdicts[100:])) < 100


def test_one_stall_does_not_change_its_mind() -> None:
    world = ratio(World(), 0.5).warm_up()
    world.hits(20)
    world.load(1_000, 5.0)
    assert all(world.hits(50))


@pytest.mark.parametrize("slow", range(MIN_LOADS))
def test_one_of_the_first_loads_may_be_slow(slow: int) -> None:
    """Connections are made, and memory is touched for the first time."""
    world = ratio(World(), 0.5).warm_up()
    for nth in range(MIN_LOADS):
        world.load(1_000, 5.0 if nth == slow else world.load_s(1_000))
    assert all(world.hits(50))


@pytest.mark.parametrize(("latency_s", "byte_s"), [(0.0, 0.0), (0.001, 0.0)])
def test_loads_may_take_no_time_or_as_long_whatever_their_size(latency_s: float, byte_s: float) -> None:
    world = World(latency_s=latency_s, byte_s=byte_s).warm_up()
    assert all(world.hits(50))


def test_hits_do_not_queue_behind_a_load_that_is_late() -> None:
    world = ratio(World(), 0.5).warm_up()
    world.hits(20)
    world.loading["stalled"] = Load(world.clock(), 1_000, 1_000 * TOKEN_BYTES, NO_CONNECTION)
    assert world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)
    for _ in range(20):
        world.compute(1_000)
    assert not world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)
    world.loading.clear()
    assert world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)


def test_a_load_is_not_late_while_vllm_cannot_know_that_it_has_ended() -> None:
    """Beside a busy device a report takes three steps, each far longer than a load."""
    world = ratio(World(), 0.01).warm_up()
    world.hits(20)
    world.loading["r0"] = Load(world.clock(), 1_000, 1_000 * TOKEN_BYTES, NO_CONNECTION)
    for _ in range(3):
        world.compute(CHUNK_TOKENS)
        assert world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)


def test_first_steps_that_compile_do_not_make_computing_look_slow() -> None:
    world = World(noise=lambda _: 100.0)
    for _ in range(2):
        world.compute(1_000)
    world.noise = quiet
    for num_tokens in (500, 800, 1_000, 1_500, 1_800):
        world.compute(num_tokens)
    assert world.load_policy.compute_seconds(1_000) == pytest.approx(1_000 * world.token_s, rel=0.1)


def test_others_decoding_is_not_the_prefills_cost() -> None:
    world = World()
    for num_tokens in (500, 800, 1_000, 1_500, 1_800):
        world.compute(num_tokens, num_decodes=256)
    assert world.load_policy.compute_seconds(1_000) == pytest.approx(1_000 * world.token_s, rel=0.1)


@pytest.mark.parametrize(("num_prefill", "num_other"), [(0, 0), (MIN_PREFILL_TOKENS - 1, 0), (200, 201), (0, 500)])
def test_steps_that_say_nothing_teach_nothing(num_prefill: int, num_other: int) -> None:
    clock = FakeClock()
    load_policy = LoadPolicy(Recorder(), PrefillQueue(), {}, clock=clock)
    for _ in range(10 * MIN_LOADS):
        load_policy.step_began(num_prefill, num_other)
        clock.advance(1.0)
        load_policy.step_ended()
    assert load_policy.compute_seconds(1_000) == math.inf


@settings(max_examples=EXAMPLES)
@given(idle_s=st.lists(st.floats(0, 100), min_size=MIN_LOADS, max_size=20), depth=st.integers(1, 4))
def test_overlapping_steps_and_idle_time_are_told_apart(idle_s: list[float], depth: int) -> None:
    """Bursts of steps, `depth` of them given ahead; the device takes 1 s for each, and between bursts there is rest."""
    clock = FakeClock()
    load_policy = LoadPolicy(Recorder(), PrefillQueue(), {}, clock=clock)
    for rest_s in idle_s:
        clock.advance(rest_s)
        for _ in range(depth):
            load_policy.step_began(1_000, 0)
        for _ in range(3):
            clock.advance(1.0)
            load_policy.step_ended()
            load_policy.step_began(1_000, 0)
        for _ in range(depth):
            clock.advance(1.0)
            load_policy.step_ended()
    assert load_policy.compute_seconds(1_000) == pytest.approx(1.0)


def test_an_end_without_a_step_is_nothing() -> None:
    load_policy = LoadPolicy(Recorder(), PrefillQueue(), {}, clock=FakeClock())
    load_policy.step_ended()
    assert load_policy.verdict("r", 1_000, 1) == 1_000


def test_a_pool_that_has_everything_lets_some_prefill_be_seen() -> None:
    """Else nobody would ever learn that computing is faster."""
    world = ratio(World(), 10)
    verdicts = world.hits(180)
    assert world.load_policy.compute_seconds(1_000) < math.inf
    assert sum(map(bool, verdicts[-50:])) <= 1


@pytest.mark.parametrize("num_tokens", [64, 1_280])
def test_hits_are_taken_while_no_rate_is_known(num_tokens: int) -> None:
    """But for one in so many, which teaches; of short ones, whose steps would teach nothing beside longer ones, too."""
    world = ratio(World(), 0.5)
    taken = [world.hit(num_tokens) for _ in range(MIN_LOADS + round(MIN_LOADS / PROBE_SHARE) + 1)]
    assert sum(loaded < num_tokens for loaded in taken) == MIN_LOADS
    assert world.load_policy.compute_seconds(num_tokens) < math.inf


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(0.2, 0.9), num_tokens=st.integers(10_000, 1_000_000))
def test_a_load_has_room_before_its_timeout(slower: float, num_tokens: int) -> None:
    world = ratio(World(max_load_s=0.5), slower).warm_up()
    for _ in range(MIN_LOADS):
        world.load(1_000, world.load_s(1_000))
    verdict = world.load_policy.verdict("r", num_tokens, num_tokens * TOKEN_BYTES)
    assert world.load_s(verdict) <= PLANNED_SHARE * 0.5 * 1.01


def test_while_only_the_link_is_known_no_more_is_loaded_than_comes_in_time() -> None:
    world = ratio(World(max_load_s=0.5), 1.0)
    for _ in range(MIN_LOADS):
        world.load(1_000, world.load_s(1_000))
    for nth in range(15):
        verdict = world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)
        if verdict:
            world.loading[f"r{nth}"] = Load(world.clock(), verdict, verdict * TOKEN_BYTES, NO_CONNECTION)
    total = sum(load.num_tokens for load in world.loading.values())
    assert world.load_s(total) == pytest.approx(PLANNED_SHARE * 0.5, rel=0.25)


# With queues


def busy(slower: float, num_waiting: int, max_load_s: float = math.inf) -> World:
    """An engine with so many prompts of 1,000 tokens that wait, which knows that loads take `slower` times as long."""
    world = ratio(World(max_load_s=max_load_s), slower).warm_up()
    for _ in range(10):
        world.load(1_000, world.load_s(1_000))
    for nth in range(num_waiting):
        waiting: Any = SimpleNamespace(request_id=f"waiting {nth}", num_tokens=1_000)
        world.queue.put(waiting, Stage.WAITING)
    return world


@pytest.mark.parametrize(("num_waiting", "share"), [(0, 0), (1, 400), (2, 600), (4, 1_000)])
def test_a_slow_link_carries_what_it_can_while_the_device_is_busy(num_waiting: int, share: int) -> None:
    """Until both ways end together: share * slower / MARGIN = waiting tokens + 1,000 - share."""
    world = busy(4 * MARGIN, num_waiting)
    assert world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES) == pytest.approx(share, abs=2)


def test_what_would_come_too_late_is_not_loaded() -> None:
    world = busy(MARGIN, 100, max_load_s=0.05)
    share = world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)
    assert world.load_s(share) == pytest.approx(PLANNED_SHARE * 0.05, rel=0.01)
    world.loading["r"] = Load(world.clock(), 1_000, 1_000 * TOKEN_BYTES, NO_CONNECTION)
    assert not world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES)


def test_seconds_saved_and_lost_are_counted() -> None:
    world = World(latency_s=0.1, byte_s=0.0).warm_up()
    world.hit(4_000)
    assert world.count("saved_seconds") == pytest.approx(4_000 * world.token_s - 0.1, rel=0.05)
    assert world.count("lost_seconds") == 0
    world.hit(500)
    assert world.count("lost_seconds") == pytest.approx(0.1 - 500 * world.token_s, rel=0.05)
    saved_s, lost_s = world.count("saved_seconds"), world.count("lost_seconds")
    world.hit(4_000, succeeds=False)
    assert world.count("saved_seconds") == saved_s
    assert world.count("lost_seconds") - lost_s == pytest.approx(0.1)


def test_loads_that_fail_late_are_declined_and_ones_that_fail_at_once_cost_little() -> None:
    late = World(latency_s=1.0, byte_s=0.0).warm_up()
    for _ in range(100):
        late.hit(4_000, succeeds=False)
    assert sum(map(bool, late.verdicts)) <= MIN_LOADS + 1 + 100 * PROBE_SHARE * 4_000 * late.token_s / late.latency_s
    at_once = World(latency_s=0.001, byte_s=0.0).warm_up()
    for _ in range(100):
        at_once.hit(4_000, succeeds=False)
    assert at_once.lost_s <= 100 * 0.001 + 1e-6


def test_a_slow_link_is_not_tried_beside_a_load_and_one_that_never_begins_is_not_waited_for() -> None:
    world = ratio(World(), 2).warm_up()
    world.hits(10)

    def ask_until_loaded(tries: int) -> bool:
        return any(world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES) for _ in range(tries))

    assert ask_until_loaded(100)
    world.loading["r"] = Load(world.clock(), 1_000, 1_000 * TOKEN_BYTES, NO_CONNECTION)
    assert not ask_until_loaded(1_000)
    world.loading.clear()
    assert ask_until_loaded(1)


def test_a_load_that_stalls_is_paid_for_before_another_is_tried() -> None:
    world = ratio(World(), 2).warm_up()
    world.hits(10)
    world.load_noise = lambda picks: 50.0
    world.lost_s = 0.0
    while not world.hit():
        pass
    world.load_noise, world.asked_s = None, 0.0
    while not world.hit():
        pass
    assert PROBE_SHARE * world.asked_s >= 0.95 * world.lost_s


def test_a_lucky_load_is_followed_by_few_that_are_not() -> None:
    world = ratio(World(), 3).warm_up()
    world.hits(10)
    while not world.hit():
        pass
    ratio(world, 0.1)
    while not world.hit():
        pass
    ratio(world, 3)
    world.asked_s = world.lost_s = 0.0
    world.hits(200)
    overshoot_s = 3 * HIT_TOKENS[1] * world.token_s
    assert world.lost_s <= 1.1 * PROBE_SHARE * world.asked_s + overshoot_s


# Over one transport, then over another

FAST, SLOW = st.floats(0.01, 0.5), st.floats(1.6, 50)


def over(world: World, transport: str, boot_token: int, slower: float) -> World:
    """Lets loads go over a connection on which they take `slower` times as long as computing."""
    world.connection = Connection(transport, boot_token)
    return ratio(world, slower)


@settings(max_examples=EXAMPLES)
@given(slow=SLOW, fast=FAST, seed=SEEDS)
def test_a_transport_that_was_used_before_is_known(slow: float, fast: float, seed: int) -> None:
    world = over(World(seed=seed), "shm", 1, fast).warm_up()
    world.hits(20)
    over(world, "tcp", 2, slow)
    world.hits(20)
    over(world, "shm", 3, fast)
    assert all(world.hits(20))
    over(world, "tcp", 4, slow)
    world.asked_s = world.lost_s = 0.0
    world.hits(20)
    assert world.lost_s <= 1.05 * PROBE_SHARE * world.asked_s + 2 * (slow - 1) * HIT_TOKENS[1] * world.token_s


@settings(max_examples=EXAMPLES)
@given(slower=st.floats(1.6, 20), seed=SEEDS, num_servers=st.integers(1, 20))
def test_a_new_server_that_is_slow_costs_one_load(slower: float, seed: int, num_servers: int) -> None:
    world = over(World(seed=seed), "tcp", 0, slower).warm_up()
    world.hits(MIN_LOADS)
    world.asked_s = world.lost_s = 0.0
    for boot_token in range(1, num_servers + 1):
        over(world, "tcp", boot_token, slower)
        verdicts = world.hits(10)
        assert verdicts[0]
    largest_loss_s = (slower - 1) * HIT_TOKENS[1] * world.token_s
    assert world.lost_s <= 1.05 * PROBE_SHARE * world.asked_s + (num_servers + 1) * largest_loss_s


@settings(max_examples=EXAMPLES)
@given(
    connections=st.lists(
        st.tuples(st.sampled_from(["shm", "tcp", "grpc"]), FAST | SLOW, st.integers(30, 60)), min_size=2, max_size=8
    ),
    noise=st.sampled_from([quiet, lambda picks: picks.uniform(0.85, 1.15)]),
    seed=SEEDS,
)
@example(connections=[("shm", 2.0, 30), ("shm", 0.5, 30)], noise=quiet, seed=0)
def test_each_connection_is_judged_by_its_own_rate_soon(
    connections: list[tuple[str, float, int]], noise: Noise, seed: int
) -> None:
    """Servers come and go. Each hit over a connection that pays is loaded; one that does not pay is noticed."""
    world = World(noise=noise, seed=seed).warm_up()
    for boot_token, (transport, slower, count) in enumerate(connections, 1):
        verdicts = over(world, transport, boot_token, slower).hits(count)
        if slower < 1:
            assert noise is not quiet or all(verdicts)
        else:
            assert sum(map(bool, verdicts)) <= LOADS_TO_NOTICE


def test_a_load_counts_for_the_connection_that_it_began_over() -> None:
    world = over(World(), "tcp", 1, 0.1).warm_up()
    world.hits(10)
    shm = Connection("shm", 2)
    world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES, shm)
    for _ in range(10):
        world.load(1_000, 5.0)
    assert world.load_policy.verdict("r", 1_000, 1_000 * TOKEN_BYTES, shm) == 1_000


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


def test_waiting_tokens_count_by_the_share_of_prompts_that_was_computed_lately() -> None:
    queue: Any = PrefillQueue(STEP_TOKENS)
    queue.put(Prompt("a", 0, 1_000), Stage.WAITING)
    for _ in range(200):
        queue.admitted(Prompt("b", 0, 1_000), 500, 250)
        queue.drop("b")
    num_requests, num_tokens, num_overtaking = queue.behind("b")
    assert num_requests == 1 and 250 <= num_tokens < 251 and num_overtaking == num_tokens - STEP_TOKENS


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


def test_a_preempted_request_is_counted_once_and_as_a_whole_again(one: Core) -> None:
    request = make_request("r", tokens(100))
    one.side.arrived(request)
    one.allocate(request, one.ask(request))
    one.step((request, 60))
    one.free(request)
    one.allocate(request, one.ask(request))
    assert queued(one) == {Stage.RUNNING: 100}
    one.step((request, 100))
    assert queued(one) == {}
    one.finish(request)


def test_tokens_that_the_engine_or_another_connector_has_are_not_counted(one: Core) -> None:
    request = make_request("r", tokens(100))
    one.side.arrived(request)
    assert one.ask(request, blocks(1)) == 0
    assert one.side.matched_tokens(request, blocks(1)) == (0, False)  # vLLM allocates in the step in which it asks.
    one.allocate(request, 0)
    assert queued(one) == {Stage.RUNNING: 100 - blocks(1)}
    request.num_computed_tokens = blocks(5)
    one.step((request, 100 - blocks(5)))
    assert queued(one) == {}
    one.finish(request)


def test_a_hook_that_failed_leaves_nothing_of_the_request_before(one: Core) -> None:
    first, second = make_request("a", tokens(100)), make_request("b", tokens(100, 1))
    one.side.matched_tokens(first, blocks(3))
    one.side.miss(second)
    one.allocate(second, 0)
    assert queued(one) == {Stage.RUNNING: 100}
    one.finish(second)
