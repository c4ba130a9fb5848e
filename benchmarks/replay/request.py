"""Requests of a trace: which blocks a prompt has, when it came, and how many requests are read at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LATEST_MS = 1e15
MAX_BLOCKS = 65_536
"""Of a prompt."""
MAX_IDS = 1 << 25
"""Of all requests: more than a recording of the default size holds."""
MAX_REQUESTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a trace; of a recording, one run of a lookup or put.

    Args:
        at_s: when it came, in seconds.
        ids: of its blocks, from the first.
        hits: leading blocks that the recorded pool had; None: not recorded, and the prompt stores all of its blocks.
        parent: id of the block before the first one; None: there is none.
        is_put: a put: its blocks are stored, and not looked up.
    """

    at_s: float
    ids: Sequence[int]
    hits: int | None = None
    parent: int | None = None
    is_put: bool = False

    @property
    def stored(self) -> Sequence[int]:
        """The blocks that are in a pool of any size afterwards, if they fit.

        Of a recorded lookup only those that hit: the engine that computes them instead stores them. Others may never
        have been stored; if they were, a recorded put follows.
        """
        return self.ids if self.hits is None else self.ids[: self.hits]


class Bounds:
    """Of a trace that is being read: a small file may not take all of a machine's memory."""

    def __init__(self) -> None:
        self._num_requests = self._num_ids = 0

    def add(self, request: Request) -> None:
        """Counts a request. Raises ValueError if there are too many."""
        self._num_requests += 1
        self._num_ids += len(request.ids)
        if self._num_requests > MAX_REQUESTS:
            raise ValueError(f"there are more than {MAX_REQUESTS:,} requests; give the trace's first lines")
        if self._num_ids > MAX_IDS:
            raise ValueError(f"there are more than {MAX_IDS:,} ids; give the trace's first lines")


def num_blocks(requests: Sequence[Request]) -> int:
    """Blocks of all prompts together; of a recording, those that were looked up."""
    return sum(len(request.ids) for request in requests if not request.is_put)


def num_distinct(requests: Sequence[Request]) -> int:
    """Distinct blocks of all prompts."""
    return len({block for request in requests for block in request.ids})
