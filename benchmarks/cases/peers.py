"""How many of one large pool's hits do many servers have that read from one another?

The Mooncake trace, replayed against real pools (`benchmarks.replay.fleet`), behind a load balancer that knows nothing
of prefixes and behind a router that does. All servers together have room for a share of the trace's distinct blocks.
"Busiest sender" is what one server sends to others, over the mean.

The trace is not part of this repository; `--trace` names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.replay import HOW_TO_GET, TRACE
from benchmarks.harness.measuring import Row, at_least, at_most, progress, report
from benchmarks.replay.fleet import Fleet, aware, plain
from benchmarks.replay.pool import replay
from benchmarks.replay.request import num_blocks, num_distinct
from benchmarks.replay.trace import load
from kvpool_server.cache.eviction import DEFAULT_POLICY

SERVERS = (8, 64)
ROUTERS = {"plain balancer": (plain, 0.90), "aware router": (aware, 0.95)}
FITS = 0.3
SPARSE = 1 - (1 - 1 / 128) ** 32
"""Of the trace's blocks, if one in 2,048 tokens is announced."""


def main(
    trace: Annotated[Path | None, typer.Option(help="The trace, in JSON lines.", exists=True, dir_okay=False)] = None,
) -> None:
    """Replays and reports; without the trace, says so and does nothing."""
    if trace is None and not TRACE.exists():
        print(f"benchmarks.cases.peers is skipped: no trace at {TRACE}; give --trace PATH ({HOW_TO_GET})")
        return
    requests = load(trace or TRACE)
    capacity = round(FITS * num_distinct(requests))
    whole = replay(requests, capacity)
    rows = [Row("one pool: hit ratio", whole / num_blocks(requests), "")]
    with progress("replays", 3 * len(SERVERS) * len(ROUTERS)) as advance:
        for num_servers in SERVERS:
            for router, (route, bound) in ROUTERS.items():
                what = f"{num_servers} servers, {router}"
                for label, announced in (("islands", 0.0), ("one block in 2,048 tokens announced", SPARSE)):
                    hits = Fleet(num_servers, capacity // num_servers, DEFAULT_POLICY, announced).play(requests, route)
                    rows.append(Row(f"{what}, {label}: hits over one pool's", hits / whole, "ratio"))
                    advance()
                fleet = Fleet(num_servers, capacity // num_servers, DEFAULT_POLICY)
                hits, mean = fleet.play(requests, route), sum(fleet.sent) / num_servers
                rows += [
                    at_least(f"{what}: hits over one pool's", hits / whole, "ratio", bound),
                    at_most(f"{what}: busiest sender", max(fleet.sent) / mean, "times the mean", 2.0),
                    Row(f"{what}: blocks read from others, of the hits", sum(fleet.sent) / hits, ""),
                    Row(f"{what}: questions to the directory", fleet.questions / len(requests), "a request"),
                ]
                advance()
    report("peers", rows, trace=(trace or TRACE).name, requests=len(requests), capacity_of_all_servers=FITS)


if __name__ == "__main__":
    typer.run(main)
