"""Pins on blocks of the engine that are being stored, until every rank has reported, whatever becomes of the request.

Calls of every step cost in proportion to the blocks of one job, however many others are pinned; only `nothing_in_use`,
which resets call, looks at all pinned blocks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclass(slots=True)
class _Pinned:
    """One job.

    Args:
        remaining: ranks that have yet to report the job.
        edges: first and last block of each of the job's rows.
        has_outlived: its request has ended.
    """

    block_ids: Sequence[int]
    remaining: int
    edges: Sequence[int]
    has_outlived: bool = False


class Pins:
    """Store jobs under way.

    Args:
        num_ranks: ranks that report each job.
        max_blocks: no job begins while those whose requests have ended pin as many blocks. What a request holds itself
            is kept from reuse anyway.

    Attributes:
        num_blocks: blocks that are pinned now; a block that two jobs pin counts twice.
    """

    def __init__(self, num_ranks: int, max_blocks: int):
        self.num_blocks = 0
        self._num_outliving = 0
        self._num_ranks = num_ranks
        self._max_blocks = max_blocks
        self._block_pool: BlockPool | None = None
        self._jobs: dict[int, _Pinned] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def room(self) -> int:
        """How many blocks may still be pinned."""
        return max(0, self._max_blocks - self._num_outliving)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the engine that no request and no pin holds."""
        assert self._block_pool is not None
        return self._block_pool.get_num_free_blocks()

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def nothing_in_use(self) -> bool:
        """Whether no block of the engine has a reference besides those of pins."""
        pool = self._block_pool
        return pool is None or pool.get_num_free_blocks() + num_orphans(pool, [self]) == pool.num_gpu_blocks - 1

    def forget_free_blocks(self) -> None:
        """The engine's own cache forgets the blocks that no request and no pin holds."""
        assert self._block_pool is not None
        free = self._block_pool.free_block_queue.get_all_free_blocks()
        self._block_pool.evict_blocks({block.block_id for block in free})

    def pin(self, job_id: int, rows: Sequence[Sequence[int]]) -> None:
        """Pins the blocks of a job: vLLM frees those of a preempted or finished request without a call.

        Args:
            rows: block ids, one row for each block table.
        """
        assert self._block_pool is not None
        block_ids = [block_id for row in rows for block_id in row]
        blocks = self._block_pool.blocks
        self._block_pool.touch([blocks[block_id] for block_id in block_ids])
        edges = [block_id for row in rows for block_id in (*row[:1], *row[-1:])]
        self._jobs[job_id] = _Pinned(block_ids, self._num_ranks, edges)
        self.num_blocks += len(block_ids)

    def outlive(self, job_id: int) -> None:
        """The request of a job has ended."""
        job = self._jobs[job_id]
        if not job.has_outlived:
            job.has_outlived = True
            self._num_outliving += len(job.block_ids)

    def report(self, job_id: int, ranks: int) -> bool:
        """Some ranks have ended a job; True if they were the last, and `unpin` is due."""
        job = self._jobs[job_id]
        job.remaining -= ranks
        assert job.remaining >= 0, f"store job {job_id} was reported by too many ranks"
        return not job.remaining

    def unpin(self, job_id: int) -> int:
        """Frees the blocks of a job that no rank will read any more, if they are pinned; returns how many."""
        assert self._block_pool is not None
        job = self._jobs.pop(job_id, None)
        if job is None:
            return 0
        block_ids = job.block_ids
        self.num_blocks -= len(block_ids)
        self._num_outliving -= len(block_ids) if job.has_outlived else 0
        blocks = self._block_pool.blocks
        # The deepest block first: it is the one to be reused first.
        self._block_pool.free_blocks([blocks[block_id] for block_id in reversed(block_ids)])
        return len(block_ids)

    def holds_alone(self, job_id: int) -> bool:
        """Whether some blocks are kept from reuse by a job alone: its request has freed them, or those before a window.

        Requests free blocks from either end of their tables, so the edges stand for all.
        """
        assert self._block_pool is not None
        blocks = self._block_pool.blocks
        return any(blocks[block_id].ref_cnt == 1 for block_id in self._jobs[job_id].edges)

    def block_ids(self) -> Iterator[int]:
        """Ids of all pinned blocks; once for each job that pins the block."""
        for job in self._jobs.values():
            yield from job.block_ids


def num_orphans(block_pool: BlockPool, sharing: Iterable[Pins]) -> int:
    """How many blocks are held by pins alone. Looks at all pinned blocks."""
    pinned = Counter(itertools.chain.from_iterable(pins.block_ids() for pins in sharing))
    return sum(block_pool.blocks[block_id].ref_cnt == count for block_id, count in pinned.items())


def let_resets_pass(block_pool: BlockPool, pins: Pins) -> None:
    """Lets resets of a block pool count blocks that pins alone hold as free.

    `Scheduler.reset_prefix_cache(reset_running_requests=True)` preempts every request, and raises if a block is in use
    even so, before it tells the connector of the reset. A block that only a pin holds need not stop it: a reset forgets
    which prefix each block has and frees none, so the block stays pinned until its store has been reported, and no
    request hits it any more.

    A pin must stop a reset that is followed by a release of the KV cache's memory, which a store may still be reading.
    vLLM resets so in two places (`sleep`, `release_kv_cache_memory`), after a pause. With vLLM's core in a process of
    its own a pause lasts until the connector has no pinned blocks. In a core inside the caller's process it does not,
    so that there resets are left unchanged.

    Several kvpools under a MultiConnector have one block pool, and share one wrapper of its method.
    """
    from vllm import envs

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    sharing: list[Pins] = vars(block_pool).setdefault("_kvpool_pins", [])
    sharing.append(pins)
    if len(sharing) > 1:
        return
    reset = block_pool.reset_prefix_cache

    def reset_despite_pins() -> bool:
        num_free = block_pool.get_num_free_blocks() + num_orphans(block_pool, sharing)
        block_pool.get_num_free_blocks = lambda: num_free  # type: ignore[method-assign]
        try:
            return reset()
        finally:
            del block_pool.get_num_free_blocks  # The method of the class is back.

    block_pool.reset_prefix_cache = reset_despite_pins  # type: ignore[method-assign]
