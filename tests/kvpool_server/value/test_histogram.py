"""The histogram beside LRU caches of each size: exact without sampling, and close to them with a sample."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, finish
from kvpool_server.value.histogram import MAX_TENANTS, REST, SIZES, STEP_SAMPLED_BLOCKS, DistanceHistogram
from tests.support.effort import effort
from tests.support.values import block_hash

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


@pytest.mark.parametrize(("max_blocks", "expected_rate", "bound"), [(8_192, 0.25, 0.03), (2_048, 0.0625, 0.1)])
def test_a_sample_is_close_to_the_exact_curve(
    exact: list[float], max_blocks: int, expected_rate: float, bound: float
) -> None:
    errors = []
    for seed in range(3):
        found, rate = zipf_ratios(max_blocks, seed)
        assert rate == expected_rate
        errors += [abs(estimate - truth) for estimate, truth in zip(found, exact, strict=True)]
    assert max(errors) < bound and statistics.mean(errors) < bound / 3


def test_namespaces_do_not_share_blocks() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    hashes = [block_hash("a")]
    finish(histogram.put(b"one", hashes, 1))
    finish(histogram.lookup("", b"other", hashes, 0, 1, (16, 0)))
    assert ratios(histogram) == [0] * len(SIZES)
    finish(histogram.lookup("", b"one", hashes, 0, 1, (16, 0)))
    assert ratios(histogram) == [0.5] * len(SIZES)


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


def test_further_groups_of_a_lookup_take_memory_and_count_no_tokens() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    for name in ("a", "b", "a"):
        finish(histogram.lookup("", SALT, [block_hash(name)], 1, 1, (16, 16)))
        finish(histogram.lookup("", b"second group", [block_hash(name)], 1, ARENA_BYTES, (0, 0)))
    curve = histogram.curves()[0]
    assert curve.lookup_tokens == 48
    assert [each.hit_ratio for each in curve.estimates] == pytest.approx([0, 0, 0, 0, 1 / 3, 1 / 3])


def test_older_lookups_count_less() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    play(histogram, Call((1,), 1, num_hits=1))
    histogram.fade(0.25)
    play(histogram, Call((1,), 1, num_hits=0))
    curve = histogram.curves()[0]
    assert (curve.lookup_tokens, curve.hit_tokens) == (20, 4)
    assert ratios(histogram) == pytest.approx([0.8] * len(SIZES))


def test_a_long_prompt_is_counted_in_short_steps() -> None:
    histogram = DistanceHistogram(ARENA_BYTES, EVERYTHING, has_tiers=False)
    hashes = [block_hash(nth) for nth in range(2 * LOOKUP_STEP_BLOCKS)]
    num_steps = sum(1 for _ in histogram.put(SALT, hashes, block_bytes=0))
    assert num_steps == 2 * LOOKUP_STEP_BLOCKS // STEP_SAMPLED_BLOCKS
    num_steps = sum(1 for _ in histogram.lookup("", SALT, hashes, 0, 0, (16 * len(hashes), 0)))
    assert num_steps == 2 * 2 * LOOKUP_STEP_BLOCKS // STEP_SAMPLED_BLOCKS
