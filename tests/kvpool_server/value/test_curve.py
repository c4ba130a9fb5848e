"""The curve of hit ratio by arena size, beside full replays."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.value import SIZES
from kvpool_server.cache.steps import finish
from kvpool_server.replay.replay import BLOCK_TOKENS, make_pool, put, replay
from kvpool_server.replay.replay import run_of as replay_run
from kvpool_server.replay.request import Request, num_blocks
from kvpool_server.value.curve import MAX_TENANTS, CurveSimulation
from kvpool_server.value.instruments import SAMPLED_POLICIES
from kvpool_server.value.offline import simulate
from kvpool_server.value.sample import Sampler

BLOCK_BYTES = 1_000


def made(
    policy: str = "lru", arena_blocks: int = 64, tier_bytes: int | None = 0, entries: int = 256
) -> CurveSimulation:
    sampler = Sampler(lambda block: xxhash.xxh3_64_intdigest(block, 5))
    return CurveSimulation(SAMPLED_POLICIES[policy], arena_blocks * BLOCK_BYTES, tier_bytes, entries, sampler)


def look(simulation: CurveSimulation, name: int, length: int, hits: int = 0, tenant: str = "") -> None:
    hashes = [f"{name}-{nth}".encode().ljust(32) for nth in range(length)]
    finish(simulation.lookup(tenant, 0, b"", hashes, hits, BLOCK_BYTES, 16, stores_all=True))


def chats(count: int, seed: int = 1) -> list[Request]:
    """Zipf-distributed conversations under one system prompt, which grow with each turn."""
    picks, ids = random.Random(seed), itertools.count(10)
    open_chats = [[0, 1, *itertools.islice(ids, picks.randint(2, 12))] for _ in range(400)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(len(open_chats))]
    requests = []
    for nth in range(count):
        (chat,) = picks.choices(range(len(open_chats)), weights)
        if picks.random() < 0.05:
            open_chats[chat] = [0, 1, *itertools.islice(ids, picks.randint(2, 12))]
        else:
            open_chats[chat] = open_chats[chat][:40] + list(itertools.islice(ids, picks.randint(0, 2)))
        requests.append(Request(nth / 4, list(open_chats[chat])))
    return requests


def documents(count: int, seed: int = 1) -> list[Request]:
    """Documents, most of them read once, some asked about several times."""
    picks, ids = random.Random(seed), itertools.count()
    recent = [list(itertools.islice(ids, 60))]
    requests = []
    for nth in range(count):
        if picks.random() < 0.6:
            recent = [*recent[-20:], list(itertools.islice(ids, picks.randint(20, 120)))]
            document = recent[-1]
        else:
            document = picks.choice(recent)
        requests.append(Request(nth / 4, [*document, next(ids)]))
    return requests


@pytest.mark.parametrize(
    ("shape", "policy", "capacity", "points"),
    [
        (chats, "lru", 1_000, 1.0),
        pytest.param(chats, "density", 1_000, 2.0, marks=pytest.mark.more),
        pytest.param(documents, "lru", 400, 1.0, marks=pytest.mark.more),
    ],
)
def test_estimates_are_near_full_replays(
    shape: Callable[[int], list[Request]], policy: str, capacity: int, points: float
) -> None:
    requests = shape(1_500 if shape is chats else 300)
    found = simulate(requests, capacity, policy, 640)
    total = num_blocks(requests)
    for estimate in found.curve.estimates:
        if estimate.size not in (0.5, 2.0, 8.0):
            continue
        truth = replay(requests, int(capacity * estimate.size), policy) / total
        assert abs(estimate.hit_ratio - truth) <= points / 100, estimate


@pytest.mark.parametrize("shape", [pytest.param(chats, marks=pytest.mark.more), documents])
def test_errors_are_within_the_uncertainty(shape: Callable[[int], list[Request]]) -> None:
    requests, capacity = shape(1_500 if shape is chats else 300), 600
    total = num_blocks(requests)
    truths = [replay(requests, int(capacity * size)) / total for size in SIZES]
    num_within = 0
    for seed in (401, 402, 403):
        estimates = simulate(requests, capacity, "density", 320, seed).curve.estimates
        pairs = zip(estimates, truths, strict=True)
        num_within += sum(abs(each.hit_ratio - truth) <= each.uncertainty for each, truth in pairs)
    assert num_within >= 17  # Of 18: nearly always.


def test_a_sample_of_all_blocks_is_a_full_replay() -> None:
    requests = chats(600)
    found = simulate(requests, 500, "lru", 1 << 20)
    for estimate in found.curve.estimates:
        truth = replay(requests, int(500 * estimate.size), "lru") / num_blocks(requests)
        assert estimate.hit_ratio == pytest.approx(truth, abs=0.002)


@given(
    lookups=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(0, 40), st.sampled_from("abc")), max_size=60
    ),
    policy=st.sampled_from(sorted(SAMPLED_POLICIES)),
    tier=st.sampled_from([0, 100 * BLOCK_BYTES, None]),
)
def test_ratios_are_ratios_and_tiers_only_add(
    lookups: list[tuple[int, int, int, str]], policy: str, tier: int | None
) -> None:
    simulation = made(policy, tier_bytes=tier, entries=64)
    for name, length, hits, tenant in lookups:
        look(simulation, name, length, min(hits, length), tenant)
    for curve in finish(simulation.curves()):
        assert 0 <= curve.hit_tokens <= curve.lookup_tokens
        assert 0 <= curve.simulated_hit_ratio <= 1
        for estimate in curve.estimates:
            assert 0 <= estimate.hit_ratio <= estimate.hit_ratio_with_tiers <= 1 + 1e-9


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=80))
def test_more_memory_never_hurts_lru(lookups: list[tuple[int, int]]) -> None:
    simulation = made("lru", arena_blocks=32, entries=1 << 16)
    for name, length in lookups:
        look(simulation, name, min(length, 8))  # A prompt that fits no size stores nothing there.
    ratios = [each.hit_ratio for each in simulation.total_curve().estimates]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("policy", sorted(SAMPLED_POLICIES))
def test_the_present_size_of_a_recording_hits_what_a_replay_of_it_does(policy: str) -> None:
    picks = random.Random(2)
    requests = []
    for nth in range(1_000):
        prompt = int(picks.paretovariate(0.6)) % 120
        ids = [100 * prompt + depth for depth in range(picks.randint(3, 12))]
        requests.append(Request(nth / 4, ids, hits=picks.randint(0, len(ids))))
        if picks.random() < 0.5:
            requests.append(Request(nth / 4, ids, is_put=True))
    found = simulate(requests, 150, policy, 640)
    assert found.curve.hit_tokens == replay(requests, 150, policy) * BLOCK_TOKENS


def test_without_traffic_a_curve_has_no_estimates() -> None:
    (curve,) = finish(made().curves())
    assert curve.is_total and not curve.estimates and curve.hit_ratio == 0


def test_hostile_sizes_and_tenants_are_bounded() -> None:
    simulation = made("density", entries=64)
    for nth in range(3 * MAX_TENANTS):
        look(simulation, nth, 700, tenant=f"tenant {nth}")
    assert simulation.num_entries <= 64 * len(SIZES)
    curves = finish(simulation.curves())
    assert len(curves) == MAX_TENANTS + 2
    assert curves[-1].is_rest and curves[-1].lookup_tokens == 2 * MAX_TENANTS * 700 * 16
    assert not simulation.curve_of(f"tenant {2 * MAX_TENANTS}").estimates


class Work:
    """Counts the lines of Python that run: how long a step takes, whatever else the machine does."""

    def __init__(self) -> None:
        self.num_lines = 0

    def __enter__(self) -> Work:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        self.num_lines += event == "line"
        return self._trace

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


def hashes_of(prompt: int, length: int) -> list[bytes]:
    return [(prompt << 32 | nth).to_bytes(32, "big") for nth in range(length)]


def fragments() -> Iterator[tuple[list[bytes], int, int]]:
    """Prompts whose blocks came one by one, without what was before them: each block is a leaf that may be evicted."""
    for prompt in range(4):
        hashes = hashes_of(prompt, 512)
        yield from (([block], 0, BLOCK_BYTES) for block in hashes)
        yield hashes, 512, BLOCK_BYTES
        yield hashes_of(prompt + 100, 512), 512, BLOCK_BYTES


def long_prompts() -> Iterator[tuple[list[bytes], int, int]]:
    """As long as a lookup may be nearly: more than the sample holds, more than the arena holds, and half of it."""
    for nth, length in enumerate((16_384, 1_024, 1_024, 1_024, 16_384)):
        yield hashes_of(nth, length), length if nth % 2 else 0, BLOCK_BYTES


def small_after_large() -> Iterator[tuple[list[bytes], int, int]]:
    """The sample was made for large blocks, and small ones overfill it."""
    yield hashes_of(0, 4), 0, 100 * BLOCK_BYTES
    yield hashes_of(1, 16_384), 16_384, BLOCK_BYTES


@pytest.mark.parametrize("prompts", [fragments, long_prompts, small_after_large])
@pytest.mark.parametrize("policy", sorted(SAMPLED_POLICIES))
@pytest.mark.parametrize("tier", [0, None])
def test_no_prompt_makes_a_long_step(
    prompts: Callable[[], Iterator[tuple[list[bytes], int, int]]], policy: str, tier: int | None
) -> None:
    simulation = made(policy, arena_blocks=4_096, tier_bytes=tier, entries=1_024)
    longest = 0
    for hashes, hits, block_bytes in prompts():
        stores_all = len(hashes) > 1
        steps = simulation.lookup("", 0, b"", hashes, hits, block_bytes, 16, stores_all=stores_all)
        if len(hashes) == 1:
            steps = simulation.put(0, b"", hashes, block_bytes)
        while True:
            with Work() as work:
                ended = next(steps, "ended") == "ended"
            longest = max(longest, work.num_lines)
            if ended:
                break
    assert longest <= 25_000  # About 2 ms. In one step for each size it was up to 793,000.


def test_a_tier_adds_what_memory_has_evicted() -> None:
    simulation = made(arena_blocks=8, tier_bytes=None, entries=1 << 16)
    for _ in range(2):
        for name in range(40):
            look(simulation, name, 4)
    smallest = simulation.total_curve().estimates[0]
    assert smallest.hit_ratio == 0 and smallest.hit_ratio_with_tiers == pytest.approx(0.5)


def test_old_traffic_fades() -> None:
    simulation = made(entries=1 << 16)
    for _ in range(20):
        look(simulation, 1, 4, hits=4)
    simulation.fade(0.001)
    look(simulation, 2, 4)
    assert simulation.total_curve().hit_ratio < 0.03


def test_halved_samples_keep_following_the_traffic() -> None:
    requests = chats(800)
    simulation = made("lru", arena_blocks=1_000, entries=2_000)
    for nth, request in enumerate(requests):
        if nth == 400:
            finish(simulation.halve_rates())
        hashes = [block.to_bytes(32, "big") for block in request.ids]
        finish(simulation.lookup("", 0, b"", hashes, 0, BLOCK_BYTES, 16, stores_all=True))
    assert simulation.max_entries == 1_000
    truth = replay(requests, 8_000, "lru") / num_blocks(requests)
    assert simulation.total_curve().estimates[-1].hit_ratio == pytest.approx(truth, abs=0.1)


def test_keys_that_join_a_sample_do_not_count_as_misses() -> None:
    requests, capacity = chats(1_500), 300
    simulation = made("lru", arena_blocks=capacity, entries=600)
    pool, fingerprint = make_pool(capacity, "lru", lambda: 0.0)
    for nth, request in enumerate(requests):
        if nth in (300, 310):
            finish(simulation.halve_rates())
        if nth in (700, 1_000):
            finish(simulation.double_rates())
        run = replay_run(request)
        found = pool.lookup(fingerprint, [run], prefix_only=True, lease_ttl_ms=1_000)
        put(pool, fingerprint, run)
        pool.release([found.lease_id])
        hits = found.hits[0].num_leading
        finish(simulation.lookup("", 0, b"", run.block_hashes, hits, BLOCK_BYTES, 16, stores_all=True))
    for estimate in simulation.total_curve().estimates:
        truth = replay(requests, int(capacity * estimate.size), "lru") / num_blocks(requests)
        assert abs(estimate.hit_ratio - truth) <= 0.025, (
            estimate
        )  # Counted at once, they cost the largest size 6 points.
