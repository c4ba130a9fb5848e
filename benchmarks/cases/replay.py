"""Which share of the blocks of a real service's prompts hits in a pool of a given size, by eviction policy?

The Mooncake trace, and made-up ones of one shape each (`benchmarks.harness.workloads`), replayed against the server's
own pool (`benchmarks.replay`); the Mooncake trace also against published policies (`benchmarks.peers.libcachesim`).
The hit ratio is hits over all blocks looked up. Capacities are shares of a trace's distinct blocks.

The Mooncake trace is not part of this repository; `--trace` names it.

Source: Qin et al., Mooncake, FAST '25.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.measuring import Row, Series, at_least, progress, report
from benchmarks.harness.workloads import WORKLOADS
from benchmarks.peers import libcachesim
from benchmarks.replay.pool import num_steps, policy_ratios, reference_ratios, replay
from benchmarks.replay.references import clairvoyant
from benchmarks.replay.request import Request, num_blocks, num_distinct
from benchmarks.replay.trace import load
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
HOW_TO_GET = "github.com/kvcache-ai/Mooncake has it: FAST25-release/traces/conversation_trace.jsonl"
SHARES = (2, 5, 10, 20, 50, 100)
SMALL_SHARES = (2, 5, 10, 20)
"""Those of the made-up traces and of published policies: beyond them nearly all that repeats fits."""
REACHES = {2: 0.15, 5: 0.26, 10: 0.32}
NOT_BELOW_LRU = 0.98
REACH_BLOCKS_PER_S = 100_000
LIMITS = ("clairvoyant",)


def main(
    trace: Annotated[Path | None, typer.Option(help="The trace, in JSON lines.", exists=True, dir_okay=False)] = None,
) -> None:
    """Replays and reports; without the trace, says so and does nothing."""
    if trace is None and not TRACE.exists():
        print(f"benchmarks.cases.replay is skipped: no trace at {TRACE}; give --trace PATH ({HOW_TO_GET})")
        return
    path = trace or TRACE
    requests = load(path)
    total, distinct = num_blocks(requests), num_distinct(requests)
    capacities = [max(1, distinct * share // 100) for share in SHARES]
    ratios: dict[str, list[float]] = {}
    seconds = 0.0
    if without := libcachesim.missing():
        print(f"Published policies are left out: {without}", flush=True)
    steps = num_steps(requests, len(SHARES), len(POLICIES)) + (1 + len(WORKLOADS)) * len(SMALL_SHARES)
    with progress("replays", steps) as advance:
        for policy in POLICIES:
            started = time.process_time()
            ratios[_name(policy)] = policy_ratios(requests, capacities, policy, advance)
            seconds += time.process_time() - started
        ratios |= reference_ratios(requests, capacities, advance)
        rows = [
            _row(name, share, ratio) for nth, share in enumerate(SHARES) for name, ratio in _at(nth, ratios).items()
        ]
        published: dict[str, list[float]] = {}
        for share in SMALL_SHARES:
            at_share = _published_ratios(requests, share)
            for name, ratio in at_share.items():
                published.setdefault(name, []).append(ratio)
            if at_share:
                rows.append(_row("best published policy", share, max(at_share.values())))
            advance()
        rows.append(
            at_least(
                "blocks replayed a second of one core",
                len(SHARES) * len(POLICIES) * total / seconds,
                "1/s",
                REACH_BLOCKS_PER_S,
            )
        )
        for shape, make in WORKLOADS.items():
            made = make()
            for share in SMALL_SHARES:
                rows += _shape_rows(shape, made, share)
                advance()
    series = [Series("hit ratio", name, "%", SHARES, "of all blocks", ratios[name], name in LIMITS) for name in ratios]
    series += [
        Series("hit ratio of published policies", name, "%", SMALL_SHARES, "of all blocks", line)
        for name, line in published.items()
    ]
    report(
        "replay",
        rows,
        series,
        trace=path.name,
        requests=len(requests),
        blocks=total,
        distinct_blocks=distinct,
        capacity="as a share of the distinct blocks",
        published=without or f"{libcachesim.version()}, default parameters",
    )


def _name(policy: str) -> str:
    return f"kvpool, {policy}"


def _at(nth: int, ratios: dict[str, list[float]]) -> dict[str, float]:
    return {name: each[nth] for name, each in ratios.items()}


def _row(name: str, share: int, ratio: float) -> Row:
    what = f"{name}, {share} % of the blocks fit: hit ratio"
    if name == _name(DEFAULT_POLICY) and share in REACHES:
        return at_least(what, ratio, "", REACHES[share])
    return Row(what, ratio, "")


def _published_ratios(requests: Sequence[Request], share: int) -> dict[str, float]:
    """Hit ratios of published policies at a capacity; empty where they cannot be measured."""
    if libcachesim.missing():
        return {}
    total, capacity = num_blocks(requests), max(1, num_distinct(requests) * share // 100)
    return {policy: libcachesim.replay(requests, capacity, policy) / total for policy in libcachesim.POLICIES}


def _shape_rows(shape: str, requests: Sequence[Request], share: int) -> list[Row]:
    """The default policy beside `lru`, the best published policy and the clairvoyant, on a made-up trace."""
    total, capacity = num_blocks(requests), num_distinct(requests) * share // 100
    ours, leaf_first = (replay(requests, capacity, policy) / total for policy in (DEFAULT_POLICY, "lru"))
    what = f"{shape}, {share} %"
    rows = [
        Row(f"{what}: {_name(DEFAULT_POLICY)}", ours, ""),
        Row(f"{what}: {_name('lru')}", leaf_first, ""),
        Row(f"{what}: clairvoyant", clairvoyant(requests, capacity) / total, ""),
    ]
    if published := _published_ratios(requests, share):
        rows.append(Row(f"{what}: best published policy", max(published.values()), ""))
    if leaf_first:
        rows.append(at_least(f"{what}: {DEFAULT_POLICY} over lru", ours / leaf_first, "ratio", NOT_BELOW_LRU))
    return rows


if __name__ == "__main__":
    typer.run(main)
