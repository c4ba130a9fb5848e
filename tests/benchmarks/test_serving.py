"""Workloads of `benchmarks.cases.serving` repeat as they say, and its oracles count what a cache would hit."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.serving import SMALL
from benchmarks.harness import measuring as harness
from benchmarks.harness import plots
from benchmarks.serving import arms, benchmark, rows
from benchmarks.serving.arms import ARMS, Setup, Store, UnavailableError
from benchmarks.serving.benchmark import Benchmark
from benchmarks.serving.ideal import Device, first_token_times
from benchmarks.serving.oracle import HitTokens, block_ids, hit_tokens
from benchmarks.serving.runs import Plan, Run
from benchmarks.serving.workloads import WORKLOADS, Request, Segment, fitting, prompt, routes, trace
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


@settings(max_examples=effort(100), deadline=None)
@given(REQUESTS)
def test_blocks_are_equal_where_the_prompts_are_equal_so_far(requests: list[Request]) -> None:
    prompts = [prompt(request, 0, 1 << 30) for request in requests]
    ids = [each.ids for each in block_ids(requests, BLOCK_TOKENS) if not each.is_put]
    for tokens, blocks in zip(prompts, ids, strict=True):
        assert len(blocks) == (len(tokens) - 1) // BLOCK_TOKENS
        for others, other_blocks in zip(prompts, ids, strict=True):
            for nth in range(min(len(blocks), len(other_blocks))):
                end = (nth + 1) * BLOCK_TOKENS
                assert (blocks[nth] == other_blocks[nth]) == np.array_equal(tokens[:end], others[:end])


@pytest.mark.parametrize("name", WORKLOADS)
@settings(max_examples=effort(10), deadline=None)
@given(count=st.integers(1, 80), seed=st.integers(0, 1 << 20))
def test_a_workload_is_the_same_each_time_but_for_its_tokens(name: str, count: int, seed: int) -> None:
    requests = WORKLOADS[name](count, 1 / 64)
    assert requests == WORKLOADS[name](count, 1 / 64)
    assert 0 < len(requests) <= max(count, 30)
    arrivals = [request.at for request in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0
    first, again, other = (prompt(requests[-1], each, 4096) for each in (seed, seed, seed + 1))
    assert len(first) == requests[-1].num_tokens
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_arrivals_come_at_one_request_per_second_on_average() -> None:
    assert WORKLOADS["documents"](4_000, 1 / 64)[-1].at == pytest.approx(4_000, rel=0.05)


def test_workloads_share_what_they_say() -> None:
    ratios = {}
    for name, make in WORKLOADS.items():
        hits = hit_tokens(make(354, 1 / 32), 2, 1 << 40)
        assert hits.infinite == hits.lru == hits.clairvoyant
        ratios[name] = hits.infinite / hits.total
    assert ratios["documents"] == pytest.approx(0.66, abs=0.01)
    assert ratios["system prompt"] == pytest.approx(0.67, abs=0.01)
    # Of 8 turns all but what is new: 12,288 tokens, and 2,048 seven times.
    assert ratios["8 turns"] == pytest.approx(
        1 - (12_288 + 7 * 2_048) / sum(12_288 + n * 2_048 for n in range(8)), 0.01
    )
    assert ratios["30 turns"] > 0.9
    assert ratios["random 1K"] == ratios["random 8K"] == ratios["random 20K"] == 0


def test_a_trace_keeps_its_lengths_its_shared_blocks_and_its_rhythm(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 1_024, "output_length": 9, "hash_ids": [0, 2]},
        {"timestamp": 6_000, "input_length": 1_300, "output_length": 1, "hash_ids": [0, 2, 3]},
        {"timestamp": 9_000, "input_length": 10, "output_length": 1, "hash_ids": [4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = trace(3, path=path)
    assert [request.num_tokens for request in requests] == [700, 1_024, 1_300]
    assert [request.max_tokens for request in requests] == [5, 9, 1]
    assert [request.at for request in requests] == [0, 0, 2]
    assert requests[1].session == requests[2].session != requests[0].session
    assert hit_tokens(requests, 16, 1 << 40).infinite == 512 + 1_024
    assert fitting(requests, 1_033) == requests[:2]


def test_sticky_routing_keeps_sessions_together_and_both_use_all_engines() -> None:
    requests = WORKLOADS["8 turns"](160, 1 / 64)
    for is_sticky in (False, True):
        to = routes(requests, 4, sticky=is_sticky)
        assert set(to) == set(range(4))
        engines = {session: set() for session in range(20)}
        for request, engine in zip(requests, to, strict=True):
            engines[request.session].add(engine)
        assert (max(map(len, engines.values())) == 1) == is_sticky


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


def test_each_arm_has_a_line_in_the_plot() -> None:
    assert ARMS.keys() == plots.ARMS.keys()


def test_the_arms_runs_are_kept_and_what_is_not_run_has_a_reason(tmp_path: Path, monkeypatch: Any) -> None:
    clock = [0.0]

    def measure(arm: str, store: Store, engines: Any, plan: Plan) -> Run:
        clock[0] += 10.0
        return replace(_run(arm, plan.rate or 4.0, plan.round, 1.0), rate=plan.rate, load=plan.load, seconds=0.5)

    def unavailable(stack: ExitStack, setup: Setup) -> Store:
        raise UnavailableError("it is not here")

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "warm_up", lambda *_: None)
    monkeypatch.setattr(benchmark, "start_all", lambda *_: {})
    monkeypatch.setattr(benchmark, "ARMS", {"none": arms.none, "kvpool shm": arms.none, "lmcache": unavailable})

    def run(*names: str, seconds: float, add: bool = False, engines: int = 2, rounds: int = 1) -> dict[str, Any]:
        form = replace(SMALL, arms=names)
        setup = Setup(tmp_path, tmp_path, engines, 1 << 26, {}, {}, False)
        asked = {"documents": WORKLOADS["documents"](4, 1 / 16)}
        deadline = clock[0] + seconds
        made = Benchmark(form, setup, asked, [0.5, 1.0], are_loads=True, is_sticky=False, deadline=deadline)
        if add:
            made.add_last()
        made.run(rounds)
        return dict(json.loads((tmp_path / "serving.json").read_text()))

    # Time for the baseline's three runs, and none for another arm.
    facts = run("none", "lmcache", "kvpool shm", seconds=80)["facts"]
    assert facts["saturation of documents (requests/s)"] == 4
    assert [Run(**json.loads(each)).load for each in facts["runs"]] == [None, 0.5, 1.0]
    assert facts["not run: kvpool shm"] == facts["not run: lmcache"] == "its time is over"
    result = run("kvpool shm", "lmcache", seconds=300, add=True, rounds=2)
    runs = [Run(**json.loads(each)) for each in result["facts"]["runs"]]
    assert [(each.arm, each.rate, each.round) for each in runs[1:]] == [
        *(("none", rate, 0) for rate in (2.0, 4.0)),
        *(("kvpool shm", rate, nth) for nth in (0, 1) for rate in (2.0, 4.0)),
    ]
    assert {name: why for name, why in result["facts"].items() if name.startswith("not run")} == {
        "not run: lmcache": "it is not here"
    }
    assert any(row["what"] == "documents, 1 x saturation: TTFT mean, none" for row in result["rows"])
    with pytest.raises(typer.BadParameter, match="engines 2, not 4"):
        run("none", seconds=300, add=True, engines=4)
