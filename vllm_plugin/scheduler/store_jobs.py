"""Store jobs that have not ended: their blocks are pinned until every rank has reported the job.

vLLM frees the blocks of a preempted or finished request without a call. A step unpins reported jobs of `step_blocks`
blocks, so that a long prompt costs many steps a little. Calls of every step cost in proportion to the blocks of one
job, however many others are pinned; only `num_orphans`, which resets call, looks at all pinned blocks.

Invariant: every job that was added is pinned until all ranks have reported it, or no rank was ever told of it.

Shedding: where the engine lacks blocks, jobs that alone hold some are dropped. A job that no rank was told of ends at
once. The ranks are told to drop the others: a rank that has not begun such a job ends it without storing it, a rank
that has begun it stores it, and both report it. Until then its blocks stay pinned.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import GroupBlocks, StoreJob
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.hints import Hints
from vllm_plugin.scheduler.pool_contents import PoolContents

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

MIN_STEP_BLOCKS = 512
RELIEF_STEPS = 2
RELIEF_S = 0.05
"""A request that lacks blocks waits for dropped stores for so many steps, and for so long, before vLLM preempts another
request: their report takes a step, with asynchronous scheduling two; one that has begun must end first."""

SURE_WITHIN_S = 2.0
"""A request that has finished keeps its blocks at most this long until the files of its adapter have been checked."""


@dataclass(slots=True)
class Storing:
    """A job that has not ended."""

    request: Request
    job: StoreJob
    remaining: int  # Ranks that have yet to report it.
    sent_step: int = 0  # Step whose metadata tells the ranks of it; 0: no rank has been told.
    has_outlived: bool = False  # Its request has ended.
    has_failed: bool = False
    # Whether its blocks surely hold what their names say; no rank is told of it before. None: they do.
    is_sure: Callable[[], bool] | None = None
    sure_by: float = 0.0  # Monotonic seconds; a job that is not sure by then is dropped.


class StoreJobs:
    """Pins the blocks of an engine's store jobs, and ends each job once: stored, failed or dropped."""

    def __init__(
        self,
        geometry: Geometry,
        config: ConnectorConfig,
        contents: PoolContents,
        recorder: Recorder,
        hints: Hints,
        traceparent_of: Callable[[str], str],
    ):
        self.weights_epoch = config.weights_epoch  # Of the namespace that the engine is in.
        self.step_blocks = step_blocks(geometry)
        self._contents = contents
        self._recorder = recorder
        self.num_blocks = 0  # Pinned now; a block that two jobs pin counts twice.
        self._num_outliving = 0  # Blocks of jobs whose requests have ended.
        self._max_outliving = int(geometry.num_blocks * config.max_pinned_fraction)
        self._num_ranks = geometry.num_ranks
        self._storing: dict[int, Storing] = {}
        self._unsent: dict[int, StoreJob] = {}  # Of requests that have finished.
        self._droppable: defaultdict[int, OrderedDict[int, Storing]] = defaultdict(OrderedDict)  # By id(request).
        self._dropped: set[int] = set()  # Jobs that the ranks drop.
        self._dropped_at = (0.0, 0)  # Monotonic seconds and step of the newest of them.
        self._reported: deque[int] = deque()  # Jobs that all ranks have reported, still pinned.
        self._to_drop: list[int] = []  # Jobs that the next step tells the ranks to drop.
        self._job_ids = itertools.count(1)
        self.step = 0  # Number of the newest step, from 1 on.
        self._traceparent_of = traceparent_of  # Of a request's span, by the request's id; empty if it has none.
        self._hints = hints
        self._unpin_budget = self.step_blocks

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def __len__(self) -> int:
        return len(self._storing)

    @property
    def room(self) -> int:
        """How many blocks new jobs may pin. What a request holds itself is kept from reuse anyway, and not counted."""
        return max(0, self._max_outliving - self._num_outliving)

    def nothing_in_use(self) -> bool:
        """Whether no block of the engine has a reference besides those of jobs."""
        pool = self._block_pool
        return pool.get_num_free_blocks() + num_orphans(pool, [self]) == pool.num_gpu_blocks - 1

    # A job's life

    def begin_step(self) -> None:
        self.step += 1
        self._unpin_budget = self.step_blocks

    def new_step(self, may_store: bool) -> tuple[list[StoreJob], int]:
        """The stores of a step that has begun are built: its queued jobs, and how many blocks it may still offer."""
        self.unpin_reported()
        budget = self.step_blocks
        if not may_store:
            self.drop_unsent()
        jobs: list[StoreJob] = []
        for job in list(self._unsent.values()):
            if budget <= 0:
                break
            storing = self._storing[job.job_id]
            if storing.is_sure is None or storing.is_sure():
                jobs.append(self._unsent.pop(job.job_id))
                budget -= job.num_blocks
            elif time.monotonic() >= storing.sure_by:
                self._drop(storing)
        return jobs, budget

    def add(self, request: Request, parts: list[GroupBlocks], adapter: bytes) -> StoreJob:
        """A job to store blocks of a request, which are pinned from here on."""
        traceparent = self._traceparent_of(request.request_id)
        job = StoreJob(next(self._job_ids), parts, self.weights_epoch, adapter, traceparent)
        storing = Storing(request, job, self._num_ranks)
        self._block_pool.touch(self.blocks(storing))
        self._storing[job.job_id] = self._droppable[id(request)][job.job_id] = storing
        self.num_blocks += job.num_blocks
        self._hints.storing(request)
        return job

    def hash_of(self, block_id: int) -> bytes | None:
        """By which the engine's own cache knows a block now; None: by none."""
        return self._block_pool.blocks[block_id].block_hash

    def blocks(self, storing: Storing) -> list[KVCacheBlock]:
        blocks = self._block_pool.blocks
        return [blocks[block_id] for part in storing.job.groups for row in part.block_ids for block_id in row]

    def queue(self, job: StoreJob, is_sure: Callable[[], bool] | None = None) -> None:
        """Leaves a job of a request that has finished to a later step; `is_sure` is asked for `SURE_WITHIN_S`."""
        storing = self._storing[job.job_id]
        storing.is_sure, storing.sure_by = is_sure, time.monotonic() + SURE_WITHIN_S
        self._unsent[job.job_id] = job
        self._outlive(storing)

    def outlive(self, request: Request) -> None:
        """A request has ended: its jobs alone keep their blocks from reuse."""
        for storing in self._droppable.get(id(request), {}).values():
            self._outlive(storing)

    def _outlive(self, storing: Storing) -> None:
        if not storing.has_outlived:
            storing.has_outlived = True
            self._num_outliving += storing.job.num_blocks

    def sent(self, jobs: list[StoreJob]) -> None:
        for job in jobs:
            self._storing[job.job_id].sent_step = self.step

    def drop_lost(self, undelivered_step: int = 0) -> None:
        """Ends the jobs that a hook which has failed left pinned, and that no rank will ever report.

        The ranks do not get the metadata of step `undelivered_step`.
        """
        for job_id, storing in list(self._storing.items()):
            is_told = storing.sent_step not in (0, undelivered_step)
            if not is_told and job_id not in self._unsent:
                storing.has_failed = True
                self._unpin(job_id)

    def reported(self, job_id: int, ranks: int, has_failed: bool) -> None:
        """Some ranks have ended a job. `unpin_reported` is due once all reports of a step are in."""
        storing = self._storing[job_id]
        storing.has_failed |= has_failed
        storing.remaining -= ranks
        assert storing.remaining >= 0, f"store job {job_id} was reported by too many ranks"
        if not storing.remaining:
            self._reported.append(job_id)

    def unpin_reported(self) -> None:
        """Unpins reported jobs of `step_blocks` blocks per step."""
        while self._reported and self._unpin_budget > 0:
            self._unpin_budget -= self._unpin(self._reported.popleft())

    def _unpin(self, job_id: int) -> int:
        """A job has ended. Returns how many blocks are free of it."""
        storing = self._storing.pop(job_id)
        self._keep(storing)
        was_dropped = job_id in self._dropped
        self._dropped.discard(job_id)
        num_blocks = storing.job.num_blocks
        self.num_blocks -= num_blocks
        self._num_outliving -= num_blocks if storing.has_outlived else 0
        # The deepest block first: it is the one to be reused first.
        self._block_pool.free_blocks(reversed(self.blocks(storing)))
        if storing.has_failed:
            if was_dropped:
                self._recorder.add("store_dropped_blocks", num_blocks)
        elif storing.job.weights_epoch == self.weights_epoch:  # Else it is in a namespace that the engine has left.
            self._contents.stored(storing.request, storing.job)
        self._hints.stored(storing.request, storing.job, succeeded=not storing.has_failed)
        return num_blocks

    # The engine lacks blocks

    def make_room(self, num_blocks: int) -> None:
        """Drops jobs that alone hold blocks, if a request that is to be admitted needs more blocks than are free."""
        if self._block_pool.get_num_free_blocks() < num_blocks:
            self._drop_orphans()

    def relieve(self) -> bool:
        """A running request lacks blocks; True if it should wait for those of ended or dropped stores."""
        frees = any(self._holds_alone(self._storing[job_id]) for job_id in self._reported)  # Some in each step.
        self.unpin_reported()
        if frees or self._drop_orphans():
            return True
        at_s, at_step = self._dropped_at
        return bool(self._dropped) and (time.monotonic() - at_s < RELIEF_S or self.step - at_step < RELIEF_STEPS)

    def drop_unsent(self) -> None:
        for job_id in list(self._unsent):
            self._drop(self._storing[job_id])

    def take_dropped(self) -> list[int]:
        to_drop, self._to_drop = self._to_drop, []
        return to_drop

    def _drop_orphans(self) -> bool:
        """Drops the jobs that alone keep blocks from reuse; False if there is none that was not dropped before.

        A request frees blocks from either end, so of its jobs the oldest, the newest, and those next to one that is
        dropped are looked at.
        """
        has_dropped = False
        for jobs in list(self._droppable.values()):
            for end in (iter, reversed):
                while jobs and self._holds_alone(storing := jobs[next(end(jobs))]):
                    self._drop(storing)
                    has_dropped = True
        return has_dropped

    def _holds_alone(self, storing: Storing) -> bool:
        """Whether a job alone keeps some blocks from reuse: its request has freed them, or those before a window.

        Requests free blocks from either end of their tables, so the ends of the rows stand for all.
        """
        blocks, rows = self._block_pool.blocks, (row for part in storing.job.groups for row in part.block_ids)
        return any(blocks[row[end]].ref_cnt == 1 for row in rows for end in (0, -1))

    def _drop(self, storing: Storing) -> None:
        job_id = storing.job.job_id
        if storing.sent_step:
            self._keep(storing)
            self._dropped.add(job_id)
            self._dropped_at = time.monotonic(), self.step
            self._to_drop.append(job_id)
            return
        del self._unsent[job_id]
        self._recorder.add("store_dropped_blocks", storing.job.num_blocks)
        storing.has_failed = True
        self._unpin(job_id)

    def _keep(self, storing: Storing) -> None:
        """A job is not to be dropped."""
        jobs = self._droppable[id(storing.request)]
        jobs.pop(storing.job.job_id, None)
        if not jobs:
            del self._droppable[id(storing.request)]


def step_blocks(geometry: Geometry) -> int:
    """How many blocks a step may offer: no fewer than it completes, or an engine that only prefills would lose some."""
    completed = (geometry.step_tokens // group.kind.block_tokens * len(group.members) for group in geometry.groups)
    return max(MIN_STEP_BLOCKS, sum(completed))


def num_orphans(block_pool: BlockPool, sharing: Iterable[StoreJobs]) -> int:
    """How many blocks are held by store jobs alone. Looks at all pinned blocks."""
    pinned = Counter(
        block.block_id for jobs in sharing for storing in jobs._storing.values() for block in jobs.blocks(storing)
    )
    return sum(block_pool.blocks[block_id].ref_cnt == count for block_id, count in pinned.items())
