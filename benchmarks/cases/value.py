"""How far off is the curve of `kvpool value`, and what does it cost?

Each trace, the Mooncake trace and made-up ones of one shape each, is replayed through the server's own pool at one
size, and other sizes are simulated beside it, as a server does. Each simulated hit ratio is compared with that of a
full replay at its size. The present size is a share of the trace's distinct blocks.

The Mooncake trace is not part of this repository; `--trace` names it.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import statistics
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.replay import HOW_TO_GET, TRACE
from benchmarks.harness.measuring import (
    Row,
    Series,
    alternate,
    at_least,
    at_most,
    estimate,
    progress,
    report,
    time_ratio,
)
from benchmarks.harness.workloads import WORKLOADS
from kvpool.types import BlockRun
from kvpool.value import SIZES
from kvpool_server.cache.eviction import DEFAULT_POLICY
from kvpool_server.replay.replay import LEASE_MS, make_pool, put, replay
from kvpool_server.replay.request import num_blocks, num_distinct
from kvpool_server.replay.trace import load
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.instruments import SAMPLED_POLICIES
from kvpool_server.value.live import LiveValue
from kvpool_server.value.offline import Simulated, simulate

SHARE = 0.05
"""The present size, of the distinct blocks."""
REACH_POINTS = 1.0
SAMPLE = 640
"""As docs/how-to/value.md recommends."""
FINER_SAMPLE = 2_560
"""What more memory and CPU time would bring."""
BLOCK_BYTES = 2 << 20
INDEX_ENTRIES = 1_000_000
"""A server of so many entries: its index takes the bytes that `benchmarks.cases.memory` measures for each."""
INDEX_ENTRY_BYTES = 458
REACH_MEMORY = 0.01
LOOKUPS, LOOKUP_BLOCKS, ARENA_BLOCKS = 4_000, 250, 100_000
"""Traffic that fills the sample of each size. The memory of the simulation does not depend on the size of the arena."""
MOONCAKE = "Mooncake trace"
COUNTS = {"system prompts": 3_000, "conversations": 3_000, "documents": 1_200, "scans": 3_000, "loops": 2_400}
"""Lookups of the made-up traces: fewer than in `benchmarks.cases.replay`, for time."""
SEEDS = (301, 302, 303)
"""Of the samples. Others were used while the simulation was made."""
REACH_WITHIN = 0.95
LOOP_CAPACITY, LOOP_PROMPTS, PROMPT_BLOCKS, LONGEST_BLOCKS = 32_768, 256, 64, 8_192
CALLS, ROUNDS = 64, 40
REACH_CALL = 1.02
REACH_TURN_MS, MAX_TURN_MS = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Compared:
    """The curves of a trace by several samples, beside full replays.

    Args:
        errors: by sample, then by size, in points.
        uncertainties: as `kvpool value` prints them, in the same order.
        ratios: of the first sample.
        finer_errors: as `errors`, with `FINER_SAMPLE`.
        cpu_s, finer_cpu_s: of the first sample, a lookup.
    """

    shape: str
    replayed: list[float]
    errors: list[list[float]]
    uncertainties: list[list[float]]
    ratios: list[float]
    finer_errors: list[list[float]]
    cpu_s: float
    finer_cpu_s: float

    @property
    def num_within(self) -> int:
        pairs = zip(itertools.chain(*self.errors), itertools.chain(*self.uncertainties), strict=True)
        return sum(abs(error) <= uncertainty for error, uncertainty in pairs)


def main(
    trace: Annotated[Path | None, typer.Option(help="The trace, in JSON lines.", exists=True, dir_okay=False)] = None,
) -> None:
    """Simulates, replays and reports; without the trace, says so and leaves it out."""
    path = trace or (TRACE if TRACE.exists() else None)
    shapes = list(COUNTS)
    if path is None:
        print(f"No trace at {TRACE}; give --trace PATH ({HOW_TO_GET})")
    else:
        shapes.insert(0, MOONCAKE)
    rows = [*_loop(), *_memory_rows()]
    with (
        progress("traces", len(shapes)) as advance,
        ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as processes,
    ):
        running = [processes.submit(compared, shape, path) for shape in shapes]
        found: list[Compared] = []
        for future in running:
            found.append(future.result())
            advance()
    num_within, count = sum(each.num_within for each in found), len(found) * len(SEEDS) * len(SIZES)
    rows.insert(0, at_least("errors within the printed uncertainty", num_within / count, "", REACH_WITHIN))
    series: list[Series] = []
    for each in found:
        rows += _rows(each)
        series += _series(each)
    report(
        "value", rows, series, sampled_blocks=SAMPLE, policy=DEFAULT_POLICY, present_size=f"{SHARE:.0%} of blocks",
        samples=len(SEEDS), lookups=", ".join(f"{count:,} of {shape}" for shape, count in COUNTS.items()),
    )  # fmt: skip


def compared(shape: str, trace: Path | None) -> Compared:
    """Replays a trace at each size, and simulates it with each sample."""
    requests = load(trace) if shape == MOONCAKE and trace else WORKLOADS[shape](COUNTS[shape])  # type: ignore[call-arg]
    capacity, total = max(1, int(num_distinct(requests) * SHARE)), num_blocks(requests)
    replayed = [replay(requests, max(1, int(size * capacity))) / total for size in SIZES]
    simulated = [simulate(requests, capacity, DEFAULT_POLICY, SAMPLE, seed) for seed in SEEDS]
    finer = [simulate(requests, capacity, DEFAULT_POLICY, FINER_SAMPLE, seed) for seed in SEEDS]

    def errors(each: Simulated) -> list[float]:
        return [100 * (found.hit_ratio - truth) for found, truth in zip(each.curve.estimates, replayed, strict=True)]

    return Compared(
        shape,
        replayed,
        [errors(each) for each in simulated],
        [[100 * found.uncertainty for found in each.curve.estimates] for each in simulated],
        [found.hit_ratio for found in simulated[0].curve.estimates],
        [errors(each) for each in finer],
        simulated[0].cpu_s / len(requests),
        finer[0].cpu_s / len(requests),
    )


def _rows(found: Compared) -> list[Row]:
    rows: list[Row] = []
    medians = []
    for nth, size in enumerate(SIZES):
        name = f"{found.shape}, {size:g}x"
        errors = [of_sample[nth] for of_sample in found.errors]
        printed = [of_sample[nth] for of_sample in found.uncertainties]
        shares = [abs(error) / uncertainty for error, uncertainty in zip(errors, printed, strict=True)]
        medians.append(statistics.median(errors))
        rows += [
            Row(f"{name}: error, median of the samples", medians[-1], "points"),
            Row(f"{name}: error, worst", max(errors, key=abs), "points"),
            Row(f"{name}: uncertainty printed, median", statistics.median(printed), "points"),
            at_most(f"{name}: error, of the uncertainty printed beside it, worst", max(shares), "", 1.0),
        ]
    worst = max(map(abs, itertools.chain(*found.errors)))
    rows.append(at_most(f"{found.shape}: largest median error", max(map(abs, medians)), "points", REACH_POINTS))
    rows.append(at_most(f"{found.shape}: largest error", worst, "points", REACH_POINTS))
    rows.append(Row(f"{found.shape}: CPU time a lookup", found.cpu_s * 1e6, "us"))
    worst = max(map(abs, itertools.chain(*found.finer_errors)))
    rows.append(at_most(f"{found.shape}: largest error, {FINER_SAMPLE:,} samples", worst, "points", REACH_POINTS))
    times = found.finer_cpu_s / found.cpu_s
    rows.append(Row(f"{found.shape}: CPU time with {FINER_SAMPLE:,} samples, of that with {SAMPLE}", times, ""))
    return rows


def _series(found: Compared) -> list[Series]:
    plot, unit = f"{found.shape}: hit ratio by arena size", "of all blocks"
    return [
        Series(plot, "full replay", "x", SIZES, unit, found.replayed),
        Series(plot, "simulated", "x", SIZES, unit, found.ratios, True),
    ]


class _Side:
    """A pool in this process, with a simulation beside it or without, and prompts of `PROMPT_BLOCKS` blocks."""

    def __init__(self, sample: int):
        self.pool, self._fingerprint = make_pool(LOOP_CAPACITY, DEFAULT_POLICY, time.monotonic)
        self.live: LiveValue | None = None
        self._now_s = 0.0
        if sample:
            arena_bytes = self.pool.arena.arena_bytes
            simulation = CurveSimulation(SAMPLED_POLICIES[DEFAULT_POLICY], arena_bytes, max_entries=sample)
            self.live = LiveValue(simulation, lambda *_: None, lambda: self._now_s)
            self.pool.observe_traffic(self.live)
        self._prompts = [self._prompt(nth) for nth in range(LOOP_PROMPTS)]
        self._picks = random.Random(0)
        self._new = itertools.count(LOOP_PROMPTS)
        for run in self._prompts:
            put(self.pool, self._fingerprint, run)
        self.longest_turn_s = self.simulation_s = 0.0
        self.rest()

    @staticmethod
    def _prompt(nth: int, num_blocks: int = PROMPT_BLOCKS) -> BlockRun:
        return BlockRun(0, [(nth << 32 | depth).to_bytes(32, "big") for depth in range(num_blocks)])

    def _look_up(self, run: BlockRun) -> None:
        found = self.pool.lookup(self._fingerprint, [run], prefix_only=True, lease_ttl_ms=LEASE_MS)
        if found.lease_id:
            self.pool.release([found.lease_id])

    def look_up(self) -> float:
        """Seconds of CPU time that a lookup takes."""
        runs = self._picks.choices(self._prompts, k=CALLS)
        started = time.thread_time()
        for run in runs:
            self._look_up(run)
        taken = time.thread_time() - started
        self.rest()
        return taken / CALLS

    def put(self) -> float:
        """Seconds of CPU time that a put of a new prompt takes."""
        runs = [self._prompt(next(self._new)) for _ in range(CALLS)]
        started = time.thread_time()
        for run in runs:
            put(self.pool, self._fingerprint, run)
        taken = time.thread_time() - started
        self.rest()
        return taken / CALLS

    def look_up_longest(self) -> None:
        run = self._prompt(next(self._new), LONGEST_BLOCKS)
        for _ in range(3):
            self._look_up(run)
            put(self.pool, self._fingerprint, run)
            self.rest()

    def rest(self) -> None:
        """Runs the simulation's turns until nothing is queued, and keeps the longest."""
        while self.live is not None and not self.live.is_idle:
            self._now_s += 1.0
            started = time.thread_time()
            self.live.turn()
            taken = time.thread_time() - started
            self.simulation_s += taken
            self.longest_turn_s = max(self.longest_turn_s, taken)


def _loop() -> list[Row]:
    """What the simulation costs calls in the event loop, and how long it holds the loop at most."""
    # The garbage collector's own pauses, which grow with the pool, are no part of what is measured here.
    gc.disable()
    without, with_value = _Side(0), _Side(SAMPLE)
    simulated: list[float] = []

    def look_up() -> float:
        before = with_value.simulation_s
        taken = with_value.look_up()
        simulated.append((with_value.simulation_s - before) / CALLS)
        return taken

    lookups = alternate({"without": without.look_up, "with": look_up}, ROUNDS, what="lookups", shuffled=True)
    puts = alternate({"without": without.put, "with": with_value.put}, ROUNDS, what="puts", shuffled=True)
    of_turns = with_value.longest_turn_s
    with_value.look_up_longest()
    gc.enable()
    return [
        at_most(f"lookup of {PROMPT_BLOCKS} blocks, of one without the simulation: CPU time",
                time_ratio(lookups["with"], lookups["without"]), "", REACH_CALL),
        Row(f"lookup of {PROMPT_BLOCKS} blocks: CPU time", estimate(lookups["with"]) * 1e6, "us"),
        Row(f"lookup of {PROMPT_BLOCKS} blocks: CPU time of the simulation, between calls",
            estimate(simulated) * 1e6, "us"),
        at_most(f"put of {PROMPT_BLOCKS} blocks, of one without the simulation: CPU time",
                time_ratio(puts["with"], puts["without"]), "", REACH_CALL),
        Row(f"put of {PROMPT_BLOCKS} blocks: CPU time", estimate(puts["with"]) * 1e6, "us"),
        at_most(f"longest turn of the simulation in the loop, prompts of {PROMPT_BLOCKS} blocks",
                of_turns * 1e3, "ms", REACH_TURN_MS),
        at_most(f"longest turn of the simulation in the loop, prompts of {LONGEST_BLOCKS:,} blocks",
                with_value.longest_turn_s * 1e3, "ms", MAX_TURN_MS),
    ]  # fmt: skip


def _memory_rows() -> list[Row]:
    nbytes = _memory(SAMPLE)
    share = nbytes / (INDEX_ENTRIES * INDEX_ENTRY_BYTES)
    return [
        Row("memory of the simulation", nbytes / 2**20, "MiB"),
        at_most(f"memory, of the index of {INDEX_ENTRIES:,} entries", share, "", REACH_MEMORY),
        Row(f"memory of the simulation, {FINER_SAMPLE:,} sampled blocks", _memory(FINER_SAMPLE) / 2**20, "MiB"),
    ]


def _memory(sample: int) -> int:
    """Bytes of the simulation beside a pool of `INDEX_ENTRIES` blocks, when all of its samples are full."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        simulation = CurveSimulation(SAMPLED_POLICIES[DEFAULT_POLICY], ARENA_BLOCKS * BLOCK_BYTES, max_entries=sample)
        for nth in range(LOOKUPS):
            hashes = [(nth << 32 | depth).to_bytes(32, "big") for depth in range(LOOKUP_BLOCKS)]
            for _ in simulation.lookup("", 0, b"", hashes, 0, BLOCK_BYTES, 16, stores_all=True):
                pass
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    typer.run(main)
