"""Blocks that this engine has stored of late: what it need not offer again with every request that shares them.

The pool may have dropped one since. It is offered again as soon as a lookup or a load has found it missing, and in any
case after `FORGET_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpool.types import BlockRun
from vllm_plugin.metadata import LoadJob, StoreJob

MAX_BLOCKS = 1 << 20
FORGET_S = 5.0


class Known:
    """One engine's.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen_at: dict[tuple[int, bytes], float] = {}
        self._jobs: dict[int, StoreJob] = {}

    def has(self, block_hash: bytes, group_idx: int) -> bool:
        """Whether a block was stored, or found stored, within `FORGET_S`."""
        return self._clock() - self._seen_at.get((group_idx, block_hash), -FORGET_S) < FORGET_S

    def storing(self, job: StoreJob) -> None:
        """A job is under way."""
        self._jobs[job.job_id] = job

    def ended(self, job_id: int, stored: bool) -> None:
        """Every rank has reported a job."""
        job = self._jobs.pop(job_id, None)
        if job is None or not stored:
            return
        now = self._clock()
        for part in job.groups:
            for run in part.runs:
                self._seen_at.update(((part.group_idx, name), now) for name in run.block_hashes)
        if len(self._seen_at) > MAX_BLOCKS:
            self._seen_at.clear()

    def looked_up(self, run: BlockRun, complete: int) -> None:
        """A lookup has found some blocks of a run (a bitmap), and not the others."""
        if not self._seen_at or complete == (1 << len(run)) - 1:
            return
        found = reversed(f"{complete:0{len(run)}b}")
        for bit, name in zip(found, run.block_hashes, strict=True):
            if bit == "0":
                self._seen_at.pop((run.group_idx, name), None)

    def lost(self, job: LoadJob) -> None:
        """Blocks that could not be loaded."""
        for part in job.groups:
            for run in part.runs:
                self.looked_up(run, 0)

    def forget_all(self) -> None:
        """The engine has left the namespace."""
        self._seen_at.clear()
        self._jobs.clear()
