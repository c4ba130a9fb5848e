"""How many blocks of a real service's prompts would a pool of a given size have had? A trace, replayed.

Each request of the trace looks its blocks up, as an engine does, and then stores those that were missing: the server's
own `Pool`, in this process, without bytes and without RPCs. A hit is a block of the prefix that was there when its
request came; the hit ratio is hits over all blocks. Capacities are shares of the trace's distinct blocks.

Beside it, plain LRU, and the limit: a clairvoyant that always lets go of the block whose next use is farthest away, and
of several the deepest. No block is used before its parent is, so that what it keeps is always a prefix.

The trace is not part of this repository. `--trace` names a file of one JSON object a line with `timestamp` (ms) and
`hash_ids` (an id a block; equal ids are equal prefixes).

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966. The trace: Qin et al.,
Mooncake, FAST '25.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Row, Series, at_least, progress, report
from kvpool import BlockRun, GroupSpec, NamespaceSpec, ShardRange
from kvpool.errors import OutOfSpaceError
from kvpool.types import HASH_BYTES
from kvpool_server.storage.arena import MAX_SLOTS_PER_EXTENT, Arena
from kvpool_server.storage.pool import Pool

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
HOW_TO_GET = "github.com/kvcache-ai/Mooncake has it: FAST25-release/traces/conversation_trace.jsonl"
SHARES = (2, 5, 10, 20, 50, 100)
REACH_BLOCKS_PER_S = 100_000
SLOT_BYTES = 2 << 20
"""Of a block that is never there: an arena is offsets."""
LEASE_MS = TICKET_MS = 10_000
REQUESTS_A_STEP = 256
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of the trace.

    Args:
        at_s: when it came.
        ids: of its blocks, from the start of the prefix on.
    """

    at_s: float
    ids: Sequence[int]


class Clock:
    """The trace's time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


PoolOf = Callable[[Arena, Clock], Pool]
"""Makes the pool to be replayed against: what differs from policy to policy."""


def leaf_first_lru(arena: Arena, clock: Clock) -> Pool:
    """The pool as the server makes it."""
    return Pool(arena, clock, itertools.count(1).__next__)


POLICIES: Mapping[str, PoolOf] = {"kvpool, leaf-first LRU": leaf_first_lru}


def load(path: Path) -> list[Request]:
    """Reads a trace. Raises ValueError for a line that is none."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            request = Request(fields["timestamp"] / 1000, fields["hash_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no request of a trace ({error!r})") from None
        requests.append(request)
    return requests


def distinct(requests: Sequence[Request]) -> int:
    """How many blocks the trace has, each counted once."""
    return len({block for request in requests for block in request.ids})


def replay(
    requests: Sequence[Request],
    capacity: int,
    pool_of: PoolOf = leaf_first_lru,
    advance: Callable[[], object] = lambda: None,
) -> int:
    """Hits of a pool of `capacity` blocks.

    A request with more blocks than the pool can hold stores none of them, as an engine's put of them would fail.

    Args:
        advance: is called once in `REQUESTS_A_STEP` requests.
    """
    clock = Clock()
    pool = pool_of(_arena(capacity), clock)
    group = GroupSpec("full_attention", 512, 8, 128, 128, 1, SLOT_BYTES)
    fingerprint = pool.open_namespace(NamespaceSpec("replay", (group,)))[0].fingerprint
    shards = ShardRange(0, 1)
    hits = 0
    for nth, request in enumerate(requests):
        if nth % REQUESTS_A_STEP == 0:
            advance()
        if not request.ids:
            continue
        clock.now = max(clock.now, request.at_s)
        run = BlockRun(0, [block.to_bytes(HASH_BYTES, "big") for block in request.ids])
        found = pool.lookup(fingerprint, [run], prefix_only=True, lease_ttl_ms=LEASE_MS)
        hits += found.hits[0].num_leading
        try:
            grant = pool.put_start(fingerprint, [run], shards, TICKET_MS)
        except OutOfSpaceError:
            pass
        else:
            if grant.ticket_id:
                pool.put_end(grant.ticket_id, [0] * len(grant.offsets))
        pool.release([found.lease_id])
    return hits


def _arena(capacity: int) -> Arena:
    """Room for `capacity` blocks; less by one an extent where they do not divide evenly."""
    num_extents = -(-capacity // MAX_SLOTS_PER_EXTENT)
    extent_bytes = capacity // num_extents * SLOT_BYTES
    return Arena(num_extents * extent_bytes, extent_bytes)


def lru(requests: Sequence[Request], capacity: int) -> int:
    """Hits of plain least recently used, block by block."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += _leading(request, resident)
        for block in request.ids:
            resident[block] = None
            resident.move_to_end(block)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits


def clairvoyant(requests: Sequence[Request], capacity: int) -> int:
    """Hits of who knows every next use: no policy has more."""
    next_uses = _next_uses(requests)
    resident: dict[int, float] = {}
    farthest: list[tuple[float, int, int]] = []
    hits = 0
    for request, uses in zip(requests, next_uses, strict=True):
        hits += _leading(request, resident)
        for depth, (block, use) in enumerate(zip(request.ids, uses, strict=True)):
            resident[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(resident) > capacity:
            use, _, block = heapq.heappop(farthest)
            if resident.get(block) == -use:  # Else it was used since, and is queued under its new next use.
                del resident[block]
    return hits


def _next_uses(requests: Sequence[Request]) -> list[list[float]]:
    """For each block of each request, which request is the next to use it."""
    next_use: dict[int, float] = {}
    found: list[list[float]] = []
    for nth in range(len(requests) - 1, -1, -1):
        ids = requests[nth].ids
        found.append([next_use.get(block, NEVER) for block in ids])
        next_use.update(dict.fromkeys(ids, nth))
    return found[::-1]


def _leading(request: Request, resident: Mapping[int, object]) -> int:
    return sum(1 for _ in itertools.takewhile(resident.__contains__, request.ids))


REFERENCES = {"plain LRU": lru, "clairvoyant": clairvoyant}
LIMITS = ("clairvoyant",)


def main(
    trace: Annotated[Path | None, typer.Option(help="The trace, in JSON lines.", exists=True, dir_okay=False)] = None,
) -> None:
    """Replays and reports; says so and does nothing where there is no trace."""
    if trace is None and not TRACE.exists():
        print(f"benchmarks.replay: skipped, for there is no trace at {TRACE}; give --trace PATH ({HOW_TO_GET})")
        return
    path = trace or TRACE
    requests = load(path)
    num_blocks, num_distinct = sum(len(request.ids) for request in requests), distinct(requests)
    capacities = [max(1, num_distinct * share // 100) for share in SHARES]
    ratios: dict[str, list[float]] = {}
    seconds = 0.0
    steps_of_one = -(-len(requests) // REQUESTS_A_STEP)
    with progress("replays", len(SHARES) * (len(POLICIES) * steps_of_one + len(REFERENCES))) as advance:
        for name, pool_of in POLICIES.items():
            started = time.process_time()
            ratios[name] = [replay(requests, capacity, pool_of, advance) / num_blocks for capacity in capacities]
            seconds += time.process_time() - started
        for name, count in REFERENCES.items():
            ratios[name] = []
            for capacity in capacities:
                ratios[name].append(count(requests, capacity) / num_blocks)
                advance()
    rows = [
        Row(f"{name}, {share} % of the blocks fit: hit ratio", ratio, "")
        for nth, share in enumerate(SHARES)
        for name, ratio in ((name, ratios[name][nth]) for name in ratios)
    ]
    rate = len(SHARES) * len(POLICIES) * num_blocks / seconds
    rows.append(at_least("blocks replayed a second of one core", rate, "1/s", REACH_BLOCKS_PER_S))
    series = [Series("hit ratio", name, "%", SHARES, "of all blocks", ratios[name], name in LIMITS) for name in ratios]
    report(
        "replay",
        rows,
        series,
        trace=path.name,
        requests=len(requests),
        blocks=num_blocks,
        distinct_blocks=num_distinct,
        capacity="as a share of the distinct blocks",
    )


if __name__ == "__main__":
    typer.run(main)
