"""Blocks of the engine that are being stored: kept until every rank has reported, whatever becomes of the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Pins:
    """Store jobs under way.

    Args:
        world_size: ranks that report each job.
        max_blocks: that may be pinned at once.
    """

    def __init__(self, world_size: int, max_blocks: int):
        self._world_size = world_size
        self._max_blocks = max_blocks
        self._block_pool: BlockPool | None = None
        # Job -> its blocks, and the ranks that have yet to report it.
        self._jobs: dict[int, tuple[list[int], int]] = {}
        self._references: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_blocks(self) -> int:
        """Pinned now."""
        return len(self._references)

    @property
    def room(self) -> int:
        """How many blocks may still be pinned."""
        return self._max_blocks - self.num_blocks

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def nothing_in_use(self) -> bool:
        """Whether no block of the engine has a reference, ours among them."""
        pool = self._block_pool
        return pool is None or pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def nothing_else_in_use(self) -> bool:
        """Whether no block of the engine has a reference but ours."""
        pool = self._block_pool
        return pool is None or pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() == self.num_blocks

    def pin(self, job_id: int, block_ids: Sequence[int]) -> None:
        """Keeps blocks from reuse: a request that is preempted or finished frees its own without asking."""
        assert self._block_pool is not None
        self._block_pool.touch([self._block_pool.blocks[block_id] for block_id in block_ids])
        self._jobs[job_id] = (list(block_ids), self._world_size)
        self._references.update(block_ids)

    def report(self, job_id: int, ranks: int) -> bool:
        """Some ranks have ended a job; True, and its blocks are free again, if they were the last."""
        block_ids, remaining = self._jobs[job_id]
        remaining -= ranks
        assert remaining >= 0, f"store job {job_id} was reported by too many ranks"
        if remaining:
            self._jobs[job_id] = (block_ids, remaining)
            return False
        del self._jobs[job_id]
        self._references -= Counter(block_ids)
        assert self._block_pool is not None
        # The deepest block first: it is the one to be reused first.
        self._block_pool.free_blocks(self._block_pool.blocks[block_id] for block_id in reversed(block_ids))
        return True
