"""How many of one large pool's hits do many servers have that read from one another?

The Mooncake trace, replayed against real pools (`benchmarks.replay.fleet`), behind a load balancer that knows nothing
of prefixes and behind a router that does. All servers together have room for a share of the trace's distinct blocks.
"Busiest sender" is what one server sends to others, over the mean.

The trace is not part of this repository; `--trace` names it.

Made-up documents are asked about by 8 to 1,024 servers of one size, with as many requests each, while a part of the
questions has no answer, servers begin again with nothing, and the network is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.replay import HOW_TO_GET, TRACE
from benchmarks.harness.measuring import Row, at_least, at_most, progress, report
from benchmarks.replay.fleet import Fleet, aware, documents, plain
from benchmarks.replay.pool import replay
from benchmarks.replay.request import num_blocks, num_distinct
from benchmarks.replay.trace import load
from kvpool_server.cache.eviction import DEFAULT_POLICY
from kvpool_server.tiers.peers.tier import MAX_OWNERS

SERVERS, MANY_SERVERS = (8, 64), 1_024
BLOCKS_A_SERVER, REQUESTS_A_SERVER, LOST, TROUBLED_SHARE = 120, 40, 0.05, 0.9
ROUTERS = {"plain balancer": (plain, 0.90), "aware router": (aware, 0.95)}
FITS = 0.3
SPARSE = 1 - (1 - 1 / 128) ** 32
"""Of the trace's blocks, if one in 2,048 tokens is announced."""


def measure_troubles(num_servers: int, router: str) -> list[Row]:
    """Hits of a fleet, and messages a request, while nothing happens and while something does."""
    route, _ = ROUTERS[router]
    requests = documents(num_servers, REQUESTS_A_SERVER * num_servers)

    def restart_a_tenth(fleet: Fleet, nth: int) -> None:
        if nth == len(requests) // 2:
            for server in range(0, num_servers, 10):
                fleet.restart(server)

    def restart_in_turn(fleet: Fleet, nth: int) -> None:
        if nth % REQUESTS_A_SERVER == 0:
            fleet.restart(nth // REQUESTS_A_SERVER)

    def cut(fleet: Fleet, nth: int) -> None:
        fleet.num_parts = 2 if len(requests) // 3 <= nth < 2 * len(requests) // 3 else 1

    def play(before: Callable[[Fleet, int], None] = lambda fleet, nth: None, lost: float = 0.0) -> tuple[int, Fleet]:
        fleet = Fleet(num_servers, BLOCKS_A_SERVER, DEFAULT_POLICY, lost=lost)
        return fleet.play(requests, route, before), fleet

    what = f"documents, {num_servers:,} servers, {router}"
    hits, fleet = play()
    whole = replay(requests, num_servers * BLOCKS_A_SERVER)
    rows = [
        Row(f"{what}: hits over one pool's", hits / whole, "ratio"),
        at_most(f"{what}: questions to the directory", fleet.questions / len(requests), "a request", 1.0),
        at_most(f"{what}: questions to servers", fleet.asked / len(requests), "a request", MAX_OWNERS / 2),
    ]
    troubles = {
        f"{LOST:.0%} of the questions lost": play(lost=LOST),
        "a tenth restarted at once": play(restart_a_tenth),
        "all restarted in turn": play(restart_in_turn),
        "cut in two for a third of the time": play(cut),
    }
    return rows + [
        at_least(f"{what}: {trouble}: hits over those of a quiet time", found / hits, "ratio", TROUBLED_SHARE)
        for trouble, (found, _) in troubles.items()
    ]


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
    made_up = [(num_servers, router) for num_servers in SERVERS for router in ROUTERS]
    made_up.append((MANY_SERVERS, next(iter(ROUTERS))))
    with progress("made-up documents", len(made_up)) as advance:
        for each in made_up:
            rows += measure_troubles(*each)
            advance()
    report("peers", rows, trace=(trace or TRACE).name, requests=len(requests), capacity_of_all_servers=FITS)


if __name__ == "__main__":
    typer.run(main)
