"""Blocks that this engine has stored of late: what it need not offer again with every request that shares them.

The pool may have dropped one since. It is offered again as soon as a lookup or a load has found it missing, and in any
case after `FORGET_S`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from vllm_plugin.metadata import StoreJob

MAX_BLOCKS = 1 << 20
FORGET_S = 5.0


class Known:
    """One engine's.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen_at: defaultdict[int, dict[bytes, float]] = defaultdict(dict)  # By group.

    def has(self, block_hash: bytes, group_idx: int) -> bool:
        """Whether a block was stored within the last `FORGET_S`."""
        return self._clock() - self._seen_at[group_idx].get(block_hash, -FORGET_S) < FORGET_S

    def stored(self, job: StoreJob) -> None:
        """Every rank has stored a job."""
        now = self._clock()
        for part in job.groups:
            for run in part.runs:
                self._seen_at[part.group_idx].update(dict.fromkeys(run.block_hashes, now))
        if sum(map(len, self._seen_at.values())) > MAX_BLOCKS:
            self._seen_at.clear()

    def missing(self, group_idx: int, block_hashes: Iterable[bytes]) -> None:
        """Blocks are not in the pool."""
        seen_at = self._seen_at[group_idx]
        if seen_at:
            for name in block_hashes:
                seen_at.pop(name, None)

    def forget_all(self) -> None:
        """The engine has left the namespace."""
        self._seen_at.clear()
