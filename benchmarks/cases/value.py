"""How far off is the curve of `kvpool value`, and what does it cost?

Each trace, the Mooncake trace and made-up ones of one shape each, is replayed through the server's own pool at one
size, and other sizes are simulated beside it, as a server does. Each simulated hit ratio is compared with that of a
full replay at its size. The present size is a share of the trace's distinct blocks.

The Mooncake trace is not part of this repository; `--trace` names it.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.replay import HOW_TO_GET, TRACE
from benchmarks.harness.measuring import Row, Series, at_most, progress, report
from benchmarks.harness.workloads import WORKLOADS
from kvpool.value import SIZES
from kvpool_server.cache.eviction import DEFAULT_POLICY
from kvpool_server.config import ServerConfig
from kvpool_server.replay.replay import replay
from kvpool_server.replay.trace import Request, load, num_blocks, num_distinct
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.instruments import SAMPLED_POLICIES
from kvpool_server.value.offline import simulate

SHARE = 0.05
"""The present size, of the distinct blocks."""
REACH_POINTS = 1.0
SAMPLE = ServerConfig.model_fields["value_sample"].default
BLOCK_BYTES = 2 << 20
INDEX_ENTRIES = 1_000_000
"""A server of so many entries: its index takes the bytes that `benchmarks.cases.memory` measures for each."""
INDEX_ENTRY_BYTES = 458
REACH_MEMORY = 0.01
LOOKUPS, LOOKUP_BLOCKS, ARENA_BLOCKS = 4_000, 250, 100_000
"""Traffic that fills the sample of each size. The memory of the simulation does not depend on the size of the arena."""
MOONCAKE = "Mooncake trace"


def main(
    trace: Annotated[Path | None, typer.Option(help="The trace, in JSON lines.", exists=True, dir_okay=False)] = None,
) -> None:
    """Simulates, replays and reports; without the trace, says so and leaves it out."""
    path = trace or (TRACE if TRACE.exists() else None)
    shapes: dict[str, Callable[[], list[Request]]] = dict(WORKLOADS)
    if path is None:
        print(f"No trace at {TRACE}; give --trace PATH ({HOW_TO_GET})")
    else:
        shapes = {MOONCAKE: lambda: load(path), **shapes}
    rows: list[Row] = []
    series: list[Series] = []
    with progress("traces", len(shapes)) as advance:
        for shape, make in shapes.items():
            of_shape, lines = _errors(shape, make())
            rows += of_shape
            series += lines
            advance()
    nbytes = _memory()
    rows.append(Row("memory of the simulation", nbytes / 2**20, "MiB"))
    rows.append(
        at_most(
            f"memory, of the index of {INDEX_ENTRIES:,} entries", nbytes / (INDEX_ENTRIES * INDEX_ENTRY_BYTES), "",
            REACH_MEMORY,
        )
    )  # fmt: skip
    report("value", rows, series, sampled_blocks=SAMPLE, policy=DEFAULT_POLICY, present_size=f"{SHARE:.0%} of blocks")


def _errors(shape: str, requests: Sequence[Request]) -> tuple[list[Row], list[Series]]:
    capacity, total = max(1, int(num_distinct(requests) * SHARE)), num_blocks(requests)
    simulated = simulate(requests, capacity, DEFAULT_POLICY, SAMPLE)
    estimates = [each.hit_ratio for each in simulated.curve.estimates]
    replayed = [replay(requests, max(1, int(size * capacity))) / total for size in SIZES]
    errors = [100 * (estimate - truth) for estimate, truth in zip(estimates, replayed, strict=True)]
    rows = [Row(f"{shape}, {size:g}x: error", error, "points") for size, error in zip(SIZES, errors, strict=True)]
    rows.append(at_most(f"{shape}: largest error", max(map(abs, errors)), "points", REACH_POINTS))
    rows.append(Row(f"{shape}: CPU time a lookup", simulated.cpu_s / len(requests) * 1e6, "us"))
    unit = "of all blocks"
    return rows, [
        Series(f"{shape}: hit ratio by arena size", "full replay", "x", SIZES, unit, replayed),
        Series(f"{shape}: hit ratio by arena size", "simulated", "x", SIZES, unit, estimates, True),
    ]


def _memory() -> int:
    """Bytes of the simulation beside a pool of `INDEX_ENTRIES` blocks, when all of its samples are full."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        simulation = CurveSimulation(SAMPLED_POLICIES[DEFAULT_POLICY], ARENA_BLOCKS * BLOCK_BYTES, max_entries=SAMPLE)
        for nth in range(LOOKUPS):
            hashes = [(nth << 32 | depth).to_bytes(32, "big") for depth in range(LOOKUP_BLOCKS)]
            for _ in simulation.lookup("", 0, b"", hashes, 0, BLOCK_BYTES, 16, stores_all=True):
                pass
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    typer.run(main)
