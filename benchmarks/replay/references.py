"""What policies are compared with: plain LRU, and the clairvoyant limit.

The clairvoyant evicts the block whose next use is farthest away, and of several the deepest. No block is used before
its parent, so the blocks that it keeps always form prefixes.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from benchmarks.replay.request import Request

NEVER = math.inf


def lru(requests: Sequence[Request], capacity: int) -> int:
    """Hits of plain least recently used, which knows no prefixes."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += _leading(request, resident)
        for block in request.stored:
            resident[block] = None
            resident.move_to_end(block)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits


def clairvoyant(requests: Sequence[Request], capacity: int) -> int:
    """Hits with every next use known: no policy has more."""
    next_uses = _next_uses(requests)
    resident: dict[int, float] = {}
    farthest: list[tuple[float, int, int]] = []
    hits = 0
    for request, uses in zip(requests, next_uses, strict=True):
        hits += _leading(request, resident)
        for depth, (block, use) in enumerate(zip(request.stored, uses, strict=False)):
            resident[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(resident) > capacity:
            use, _, block = heapq.heappop(farthest)
            if resident.get(block) == -use:  # If not, the block was used since and has a newer item.
                del resident[block]
    return hits


def _next_uses(requests: Sequence[Request]) -> list[list[float]]:
    """For each block of each request, the index of the next request that looks it up."""
    next_use: dict[int, float] = {}
    found: list[list[float]] = []
    for nth in range(len(requests) - 1, -1, -1):
        ids = requests[nth].ids
        found.append([next_use.get(block, NEVER) for block in ids])
        if not requests[nth].is_put:
            next_use.update(dict.fromkeys(ids, nth))
    return found[::-1]


def _leading(request: Request, resident: Mapping[int, object]) -> int:
    if request.is_put:
        return 0
    return sum(1 for _ in itertools.takewhile(resident.__contains__, request.ids))


REFERENCES: Mapping[str, Callable[[Sequence[Request], int], int]] = {"plain LRU": lru, "clairvoyant": clairvoyant}
