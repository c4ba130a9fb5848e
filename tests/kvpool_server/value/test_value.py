"""The histogram beside LRU caches of each size: exact without sampling, and close to them with a sample.

Its feed: what it costs the loop, and what callers see of it.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import random
import statistics
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Steps, finish
from kvpool_server.value.curve import (
    CPU_SHARE,
    FADE_EVERY_S,
    HALF_LIFE_S,
    MAX_QUEUED_BLOCKS,
    MAX_TENANTS,
    REST,
    SIZES,
    STEP_SAMPLED_BLOCKS,
    DistanceHistogram,
    ValueFeed,
)
from tests.conftest import StartServer
from tests.support.bare_pool import make_pool, put
from tests.support.clock import FakeClock
from tests.support.effort import effort
from tests.support.processes import wait_for
from tests.support.values import block_hash, namespace_spec, payload, run_of

ARENA_BYTES = 40
EVERYTHING = 1 << 40
"""A bound that no sample reaches."""
SALT = b"namespace"


@dataclass(frozen=True)
class Call:
    """A lookup of a prompt's blocks, of which the pool has the first `num_hits`; None: a put of those from `first` on.

    Blocks of a prompt are named by all tokens up to them, as an engine does.
    """

    prompt: tuple[int, ...]
    block_bytes: int
    num_hits: int | None = None
    first: int = 0

    @property
    def hashes(self) -> list[bytes]:
        prefixes = itertools.accumulate((token,) for token in self.prompt)
        return [block_hash((self.block_bytes, prefix)) for prefix in prefixes][self.first :]


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
BLOCK_BYTES = st.sampled_from([3, 7, 25])
LOOKUPS = st.builds(Call, PROMPTS, BLOCK_BYTES, st.integers(0, 6))
PUTS = st.builds(Call, PROMPTS, BLOCK_BYTES, first=st.integers(0, 5))
CALLS = st.lists(LOOKUPS | PUTS, max_size=60)


class LruCaches:
    """An LRU cache of bytes for each size, and the leading blocks that lookups hit in each."""

    def __init__(self) -> None:
        self.caches: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in SIZES]
        self.hits = [0 for _ in SIZES]
        self.references = 0

    def play(self, call: Call) -> None:
        hashes = call.hashes
        num_used = len(hashes)
        if call.num_hits is not None:
            leading = [sum(1 for _ in itertools.takewhile(cache.__contains__, hashes)) for cache in self.caches]
            self.hits = [before + more for before, more in zip(self.hits, leading, strict=True)]
            self.references += len(hashes)
            num_used = max(*leading, call.num_hits)  # The largest pool loads what it hits, and the others compute it.
        for cache, size in zip(self.caches, SIZES, strict=True):
            for name in reversed(hashes[:num_used]):
                cache[name] = call.block_bytes
                cache.move_to_end(name)
                while sum(cache.values()) > size * ARENA_BYTES:
                    cache.popitem(last=False)

    @property
    def ratios(self) -> list[float]:
        return [hits / self.references for hits in self.hits]


def play(histogram: DistanceHistogram, call: Call, tenant: str = "") -> None:
    hashes = call.hashes
    if call.num_hits is None:
        finish(histogram.put(SALT, hashes, call.block_bytes))
        return
    num_hits = min(call.num_hits, len(hashes))
    finish(histogram.lookup(tenant, SALT, hashes, num_hits, call.block_bytes, (16 * len(hashes), 16 * num_hits)))


def ratios(histogram: DistanceHistogram) -> list[float]:
    return [each.hit_ratio for each in histogram.curves()[0].estimates]


PARENT_OLDER_THAN_CHILD = [Call((0, 1), 3), Call((2,), 25), Call((0, 1), 3, first=1), Call((0, 1), 3, num_hits=0)]


@given(calls=CALLS)
@example(calls=PARENT_OLDER_THAN_CHILD)
@settings(max_examples=effort(150), deadline=None)
def test_without_sampling_each_size_hits_as_an_lru_cache_of_it(calls: Sequence[Call]) -> None:
    histogram, caches = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False), LruCaches()
    for call in calls:
        play(histogram, call)
        caches.play(call)
    if caches.references:
        assert ratios(histogram) == pytest.approx(caches.ratios)
        assert histogram.curves()[0].lookup_tokens == 16 * caches.references


@given(calls=CALLS, max_blocks=st.integers(1, 12), seed=st.integers(0, 1_000))
@settings(max_examples=effort(150), deadline=None)
def test_the_sample_is_bounded_and_has_sampled_blocks_alone(calls: Sequence[Call], max_blocks: int, seed: int) -> None:
    histogram = DistanceHistogram(ARENA_BYTES, max_blocks, False, lambda name: xxhash.xxh3_64_intdigest(name, seed))
    stack = histogram.stack
    for call in calls:
        play(histogram, call)
        assert len(stack) <= max_blocks
        assert list(stack._used_bytes) == [sum(segment.values()) for segment in stack._segments]
        within = list(itertools.accumulate(stack._used_bytes))
        assert all(used <= size * ARENA_BYTES * stack.rate for used, size in zip(within, SIZES, strict=True))
        assert all(block & stack.mask == 0 for segment in stack._segments for block in segment)
        assert stack.segment_of == {block: nth for nth, segment in enumerate(stack._segments) for block in segment}
    if any(call.num_hits is not None for call in calls):
        assert all(0 <= before <= after <= 1 for before, after in itertools.pairwise([0.0, *ratios(histogram)]))


@functools.cache
def zipf_prompts() -> list[list[bytes]]:
    """Prompts of four blocks, chosen by Zipf's law: about 50,000 distinct blocks."""
    names = [[struct.pack("<QQ", name, depth) for depth in range(4)] for name in range(20_000)]
    return random.Random(0).choices(names, [1 / (rank + 1) ** 0.8 for rank in range(20_000)], k=40_000)


def zipf_ratios(max_blocks: int, seed: int = 0) -> tuple[list[float], float]:
    """Hit ratios by size around a pool of 4,000 blocks, and the sample's rate."""
    histogram = DistanceHistogram(4_000, max_blocks, False, lambda name: xxhash.xxh3_64_intdigest(name, seed))
    for hashes in zipf_prompts():
        finish(histogram.lookup("", SALT, hashes, 0, 1, (16 * len(hashes), 0)))
        finish(histogram.put(SALT, hashes, block_bytes=1))
    return ratios(histogram), histogram.stack.rate


@pytest.fixture(scope="module")
def exact() -> list[float]:
    found, rate = zipf_ratios(EVERYTHING)
    assert rate == 1 and found[-1] - found[0] > 0.3, "the curve is steep enough to be estimated wrong"
    return found


@pytest.mark.parametrize(
    ("max_blocks", "expected_rate", "bound", "num_seeds"), [(8_192, 0.25, 0.03, 1), (2_048, 0.0625, 0.1, 3)]
)
def test_a_sample_is_close_to_the_exact_curve(
    exact: list[float], max_blocks: int, expected_rate: float, bound: float, num_seeds: int
) -> None:
    errors = []
    for seed in range(num_seeds):
        found, rate = zipf_ratios(max_blocks, seed)
        assert rate == expected_rate
        errors += [abs(estimate - truth) for estimate, truth in zip(found, exact, strict=True)]
    assert max(errors) < bound and statistics.mean(errors) < bound / 3


def test_tenants_have_curves_of_their_own_and_those_beyond_the_bound_share_one() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    for nth in range(MAX_TENANTS + 2):
        play(histogram, Call((nth,), 1, num_hits=1), f"tenant {nth:02}")
    total, *curves = histogram.curves()
    assert total.is_total and total.lookup_tokens == 16 * (MAX_TENANTS + 2)
    assert {curve.tenant: curve.lookup_tokens for curve in curves}[REST] == 32
    assert len(curves) == MAX_TENANTS + 1
    assert histogram.curve_of("tenant 00").lookup_tokens == 16
    for unseen in (f"tenant {MAX_TENANTS}", REST):  # A tenant of that name does not see the shared curve.
        assert not histogram.curve_of(unseen).lookup_tokens


def test_with_tiers_a_hit_of_the_pool_is_a_hit_at_every_size() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=True)
    play(histogram, Call((1,), ARENA_BYTES, num_hits=1))  # It came from a tier.
    play(histogram, Call((1,), ARENA_BYTES, num_hits=1))
    (curve,) = histogram.curves()[1:]
    assert [each.hit_ratio for each in curve.estimates] == [0, 0, 0.5, 0.5, 0.5, 0.5]
    assert {each.hit_ratio_with_tiers for each in curve.estimates} == {curve.hit_tokens / curve.lookup_tokens} == {1.0}


def test_namespaces_share_no_blocks_and_further_groups_take_memory_and_count_no_tokens() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    hashes = [block_hash("a")]
    finish(histogram.put(b"one", hashes, 1))
    finish(histogram.lookup("", b"other", hashes, 0, 1, (16, 0)))
    assert ratios(histogram) == [0] * len(SIZES)
    finish(histogram.lookup("", b"one", hashes, 0, 1, (16, 0)))
    assert ratios(histogram) == [0.5] * len(SIZES)
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    for name in ("a", "b", "a"):
        finish(histogram.lookup("", SALT, [block_hash(name)], 1, 1, (16, 16)))
        finish(histogram.lookup("", b"second group", [block_hash(name)], 1, ARENA_BYTES, (0, 0)))
    curve = histogram.curves()[0]
    assert curve.lookup_tokens == 48
    assert [each.hit_ratio for each in curve.estimates] == pytest.approx([0, 0, 0, 0, 1 / 3, 1 / 3])


def test_a_long_prompt_is_counted_in_short_steps() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    hashes = [block_hash(nth) for nth in range(2 * LOOKUP_STEP_BLOCKS)]
    num_steps = sum(1 for _ in histogram.put(SALT, hashes, block_bytes=0))
    assert num_steps == 2 * LOOKUP_STEP_BLOCKS // STEP_SAMPLED_BLOCKS
    num_steps = sum(1 for _ in histogram.lookup("", SALT, hashes, 0, 0, (16 * len(hashes), 0)))
    assert num_steps == 2 * 2 * LOOKUP_STEP_BLOCKS // STEP_SAMPLED_BLOCKS


BLOCK_TOKENS = 16


class Bench:
    """A pool with a feed whose steps take a given CPU time, and the timer of its loop."""

    def __init__(self, step_s: float = 0.0001) -> None:
        self.clock, self.cpu, self.step_s = FakeClock(), 0.0, step_s
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.pool, self.fingerprint = make_pool(2_048, "lru", self.clock)
        clocks = self.clock, self._cpu_clock
        self.feed = ValueFeed(self.pool, "lru", 8_192, False, self._later, *clocks)
        self.histogram = self.feed.histogram

    def _later(self, seconds: float, turn: Callable[[], None]) -> None:
        self.due.append((self.clock() + seconds, turn))

    def _cpu_clock(self) -> float:
        self.cpu += self.step_s
        return self.cpu

    def look(self, name: object, length: int = 4) -> int:
        run = run_of(*((name, nth) for nth in range(length)))
        found = self.pool.lookup(self.fingerprint, [run], prefix_only=True, lease_ttl_ms=1_000)
        put(self.pool, self.fingerprint, run)
        self.pool.release([found.lease_id])
        return found.hits[0].num_leading

    def run(self, seconds: float) -> None:
        """Turns, as the event loop does them."""
        ends_at = self.clock() + seconds
        while self.clock() < ends_at:
            self.clock.advance(0.02)
            due = [turn for at, turn in self.due if at <= self.clock()]
            self.due = [(at, turn) for at, turn in self.due if at > self.clock()]
            for turn in due:
                turn()

    @property
    def lookup_tokens(self) -> float:
        return self.histogram.curves()[0].lookup_tokens


def test_calls_only_queue_and_turns_keep_to_their_share() -> None:
    bench = Bench(step_s=0.0005)
    for nth in range(200):
        bench.look(nth % 20)
    assert len(bench.due) == 1 and bench.feed.cpu_s == 0 and bench.lookup_tokens == 0
    bench.run(2.0)
    assert 0 < bench.feed.cpu_s <= 2.0 * CPU_SHARE + 0.002 and not bench.feed.is_idle
    bench.run(50.0)
    assert bench.feed.is_idle and bench.lookup_tokens == 200 * 4 * BLOCK_TOKENS


def test_the_curve_of_lru_at_the_present_size_is_what_an_lru_pool_counted() -> None:
    bench = Bench(step_s=1e-7)
    hits = 0
    for nth in range(3_000):
        hits += bench.look(nth * nth % 1_021 % 700)
        bench.clock.advance(0.02)
        bench.feed.turn()
    curve = bench.histogram.curves()[0]
    assert curve.hit_tokens == pytest.approx(hits * BLOCK_TOKENS, rel=0.01)
    assert 0.1 < curve.hit_tokens / curve.lookup_tokens < 0.9
    assert curve.estimates[2].hit_ratio == pytest.approx(curve.hit_tokens / curve.lookup_tokens, abs=0.005)


def test_what_finds_the_queue_full_is_left_out() -> None:
    bench = Bench(step_s=1e-7)
    for _ in range(2 * MAX_QUEUED_BLOCKS // 1_024):
        bench.look("long", 1_024)
    assert bench.feed.num_left_out > 0
    assert bench.feed._queued_blocks <= MAX_QUEUED_BLOCKS
    bench.run(1.0)
    assert bench.feed.is_idle and bench.feed._queued_blocks == 0
    bench.look("another")
    bench.run(1.0)
    assert bench.histogram.stack.segment_of, "what comes later is counted"
    num_left_out, run = bench.feed.num_left_out, run_of(*range(MAX_QUEUED_BLOCKS + 1))
    namespace = bench.pool.namespace(bench.fingerprint)
    assert namespace is not None
    for _ in range(2):
        bench.feed.observe(namespace, [run], None)
    assert bench.feed.num_left_out == num_left_out + 1 and not bench.feed.is_idle, "a longer call is counted alone"


def test_a_fault_of_the_histogram_does_not_reach_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_: object) -> Steps[None]:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.histogram, "lookup", broken)
    assert bench.look("a") == 0
    bench.clock.advance(1)
    bench.feed.turn()
    assert bench.feed.num_left_out == 1


def test_counts_fade_with_time() -> None:
    bench = Bench(step_s=1e-7)
    bench.look("a")
    bench.run(1.0)
    before = bench.lookup_tokens
    bench.clock.advance(HALF_LIFE_S - 1.02)
    bench.feed.turn()
    assert bench.lookup_tokens == pytest.approx(before / 2, rel=0.01)
    assert bench.feed.report().seconds == pytest.approx(HALF_LIFE_S / 2, rel=0.01)
    bench.clock.advance(FADE_EVERY_S / 2)
    assert bench.feed.report().seconds == pytest.approx(HALF_LIFE_S / 2 + FADE_EVERY_S / 2, rel=0.01)


def test_a_server_counts_and_records_each_lookup_and_put_once(pool_server: StartServer, tmp_path: Path) -> None:
    """`tests/benchmarks` reads and replays what the recorder writes."""
    path = tmp_path / "recording"
    server = pool_server("--memory", "16MiB", "--record", str(path))
    with Client(ClientConfig(server.endpoint)) as client:
        namespace = client.open_namespace(namespace_spec(tenant="acme"))
        client.put_blocks(namespace, run_of("a", "b"), [payload(name, 256) for name in "ab"])
        client.release([client.lookup(namespace, [run_of("a", "b", "c")]).lease_id])
        wait_for(lambda: client.admin.value().curves[0].lookup_tokens == 3 * 16, "the lookup to be counted")
    server.terminate()
    server.wait()
    first, described, put, lookup, *_ = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    assert first["kvpool_recording"] == 1 and "tenant" not in described
    assert len(put["put"]) == 2 * 16
    assert lookup["lookup"].startswith(put["put"]) and len(lookup["lookup"]) == 3 * 16 and lookup["hits"] == 2
