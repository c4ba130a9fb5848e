"""Oracles of `benchmarks.cases.serving` count what a cache would hit, and its rows are what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving import rows
from benchmarks.serving.ideal import Device, first_token_times
from benchmarks.serving.oracle import HitTokens, hit_tokens
from benchmarks.serving.runs import Run
from benchmarks.serving.workloads import Request, Segment, prompt
from tests.support.effort import effort

BLOCK_TOKENS = 4
SEGMENTS = st.lists(st.builds(Segment, st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=4).map(tuple)
REQUESTS = st.lists(st.builds(Request, st.just(0.0), st.integers(0, 3), SEGMENTS, st.just(4)), min_size=1, max_size=12)


def brute_force(requests: list[Request], capacity: int | None) -> int:
    """Hits in tokens of a least recently used cache of so many blocks, whose keys are whole prefixes."""
    resident: list[bytes] = []
    hits = 0
    for request in requests:
        tokens = prompt(request, 0, 1 << 30)
        keys = [tokens[:end].tobytes() for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)]
        loadable = keys[: (len(tokens) - 1) // BLOCK_TOKENS]
        for key in loadable:
            if key not in resident:
                break
            hits += BLOCK_TOKENS
        for key in [*loadable, *keys] if len(loadable) < len(keys) else keys:
            if key in resident:
                resident.remove(key)
            resident.append(key)
            if capacity is not None and len(resident) > capacity:
                del resident[0]
    return hits


@settings(max_examples=effort(200), deadline=None)
@given(REQUESTS, st.integers(1, 20))
def test_oracles_agree_with_caches_of_whole_prefixes(requests: list[Request], blocks: int) -> None:
    hits = hit_tokens(requests, BLOCK_TOKENS, blocks * BLOCK_TOKENS)
    assert hits.infinite == brute_force(requests, None)
    assert hits.lru == brute_force(requests, blocks)
    assert hits.lru <= hits.clairvoyant <= hits.infinite < hits.total


@pytest.mark.parametrize(
    ("gap_s", "routes", "is_shared", "mean_s"),
    [
        (9.0, (0, 1), True, (1.0 + 0.04) / 2),  # 96 of the second's 100 tokens hit: its last token is computed.
        (9.0, (0, 1), False, 1.0),
        (9.0, (0, 0), False, (1.0 + 0.04) / 2),
        (0.0, (0, 1), True, 2.0),  # Both compute at once, each at half of the speed.
        (0.0, (0, 0), False, (1.0 + 1.04) / 2),  # The second waits for the first one's step, and finds its blocks.
        (0.0, (0,), True, 1.0),
    ],
)
def test_an_ideal_store_spares_what_was_computed_before(
    gap_s: float, routes: tuple[int, ...], is_shared: bool, mean_s: float
) -> None:
    requests = [Request(nth * gap_s, 0, (Segment(0, 100),), 4) for nth in range(len(routes))]
    device = Device(tokens_s=100.0, step_tokens=100, block_tokens=BLOCK_TOKENS, cached_tokens=100)
    times = first_token_times(requests, routes, 1.0, device, is_shared=is_shared)
    assert times["TTFT mean"] == pytest.approx(mean_s)


def test_the_rate_within_a_bound_is_interpolated_between_rates_that_were_run() -> None:
    assert rows.rate_within([(1, 0.5), (2, 1.5), (3, 0.1)], 1.0) == 1.5
    assert rows.rate_within([(1, 0.5), (2, 0.6)], 1.0) == 2
    assert rows.rate_within([(1, 1.5), (2, 1.6)], 1.0) == 0


def _run(arm: str, rate: float, nth: int, ttft: float) -> Run:
    times = dict.fromkeys(("mean", "p50", "p90", "p99"), ttft)
    return Run(
        "documents", arm, nth, rate, rate / 4, 2, 100, times, times, 60, 10, 1.0, 0, 1, 1, None, {}, f"00ab{nth:04x}"
    )


def test_rows_have_each_arm_and_the_targets_and_lines_have_medians() -> None:
    runs = [
        _run(arm, rate, nth, ttft * rate)
        for arm, ttft in (("none", 1.0), ("offloading", 0.4), ("kvpool shm", 0.1))
        for rate in (2.0, 4.0)
        for nth in (0, 1)
    ]
    possible = {"documents": HitTokens(100, 66, 60, 64)}
    ideal = {("documents", 4.0): {"ideal pool": {"TTFT mean": 0.05, "TTFT p90": 0.055, "TTFT p99": 0.06}}}
    found = {row.what: row for row in rows.rows(runs, possible, ideal, has_targets=True)}
    ratio = found["documents, 1 x saturation: TTFT mean, kvpool shm over offloading"]
    assert ratio.figure.figure == pytest.approx(0.25) and ratio.met is True
    assert found["documents, 1 x saturation: TTFT p99, ideal pool"].figure == 0.06
    assert found["documents: requests per second at p90 TTFT <= 1 s, ideal pool"].figure == 4.0
    assert "documents, 0.5 x saturation: TTFT mean, kvpool shm over offloading" not in found
    within = "documents: requests per second at p90 TTFT <= 1 s"
    assert f"{within}, none" not in found and found[f"{within}, offloading"].figure == 2.5
    assert found[f"{within}, kvpool shm over offloading"].met is True
    lines = {(line.plot, line.name): line for line in rows.series(runs)}
    assert list(lines["documents: TTFT mean", "kvpool shm"].y) == pytest.approx([0.2, 0.4])
    assert list(lines["documents: answers equal to those without connector", "kvpool shm"].y) == [1, 1]
