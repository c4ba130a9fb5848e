"""What a pool is compared with: plain LRU, and the limit, a clairvoyant.

The clairvoyant always lets go of the block whose next use is farthest away, and of several the deepest. No block is
used before its parent is, so that what it keeps is always a prefix.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvpool_server.replay.trace import Request

NEVER = math.inf


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


REFERENCES: Mapping[str, Callable[[Sequence[Request], int], int]] = {"plain LRU": lru, "clairvoyant": clairvoyant}
