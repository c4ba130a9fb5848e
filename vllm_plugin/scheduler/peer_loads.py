"""Loads of other connectors under a MultiConnector: blocks that such a load has left invalid are not stored.

A peer may load synchronously: its blocks arrive before the step's forward pass, and which of them have failed
(`invalid_block_ids`) is known with the step's output. By then the pass has read them, vLLM's prefix cache names them,
and requests that were scheduled with it, or after it (asynchronous scheduling), may share them:

    step n    schedule: R loads blocks 0-5 from the peer, S hits them in the engine's own cache; forward: both read them
    step n+1  scheduled before the output of step n is in; R and S go on
    output n  "block 2 is invalid": R is computed again from block 2 on, S from its own first block on

So a store job of a step with such a load, or of a later step, is held until the output of the step with the load is in,
and canceled if that output names any block as invalid. The requests that have an invalid block store nothing any more:
vLLM computes them again over several steps, in which others may read blocks that are not yet computed. Their blocks
are evicted from the engine's own cache, so that no later request finds one there. vLLM caches a block once, so a later
step evicts only what it has cached itself. A request that found an invalid block before shares a block that is not
cached. vLLM names invalid blocks only of models with one block table.

A peer's asynchronous load needs none of this: its request is not scheduled, and its blocks are not shared, before vLLM
knows which of them are valid.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from vllm_plugin.metadata import StoreJob
from vllm_plugin.scheduler.store_jobs import StoreJobs
from vllm_plugin.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.peer_loads")


class PeerLoads:
    """Those of one engine.

    Args:
        stores: told which requests store nothing any more, and which jobs are canceled.
        jobs: told which jobs are held.
    """

    def __init__(self, stores: Stores, jobs: StoreJobs):
        self._stores = stores
        self._jobs = jobs
        self._block_pool: BlockPool | None = None
        self._num_steps = 0
        self._loading: deque[int] = deque()  # Steps with a synchronous load whose output is not in, by number.
        self._held: deque[tuple[int, StoreJob]] = deque()  # Each with the last step whose output the job waits for.
        self._released: list[StoreJob] = []
        self._admitted: set[str] = set()  # Requests that were given blocks since the last step.
        self._uncached: dict[str, list[int]] = {}  # Invalid request -> its last blocks, which vLLM may still cache.
        self._tables: Callable[[str], tuple[list[int], ...]] | None = None
        self._freed_while_loading = False

    def __len__(self) -> int:
        return len(self._held) + len(self._released) + len(self._uncached)

    @property
    def held_ids(self) -> set[int]:
        """Ids of the jobs that are held, or that the next step's metadata has."""
        return {job.job_id for job in (*self._released, *(job for _, job in self._held))}

    @property
    def loading_step(self) -> int:
        """What the newest `prepare` returned, or was about to."""
        return self._num_steps if self._loading and self._loading[-1] == self._num_steps else 0

    def forget_held(self) -> None:
        """Releases no held job any more: which of their blocks are valid is not known."""
        self._held.clear()
        self._released.clear()

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def admitted(self, request_id: str) -> None:
        """A request was given blocks, for the first time or after a preemption."""
        self._admitted.add(request_id)
        if self._uncached.pop(request_id, None) is not None:
            self._stores.allow(request_id)

    def finished(self, request: Request) -> None:
        """A request has ended, and its blocks are about to be freed."""
        self._admitted.discard(request.request_id)
        self._uncached.pop(request.request_id, None)
        if request.status == RequestStatus.FINISHED_ABORTED and self._loading:
            self._freed_while_loading = True  # vLLM's own check, with the step's output, does not see it any more.

    def prepare(self, output: SchedulerOutput) -> int:
        """Before the stores of a step are built.

        Returns:
            The step's number if a peer loads synchronously in it, for the workers to hand back with its output; else 0.
        """
        self._num_steps += 1
        state = output.kv_connector_block_state
        self._tables = state.resolve_block_ids if state is not None else None
        admitted, self._admitted = self._admitted, set()
        if self._loading and output.preempted_req_ids:
            self._freed_while_loading = True
        if self._uncached:
            self._evict_cached(output.scheduled_cached_reqs)
            self._spread(admitted & output.num_scheduled_tokens.keys())
        if not output.has_sync_kv_loads:
            return 0
        self._loading.append(self._num_steps)
        return self._num_steps

    def hold(self, jobs: Sequence[StoreJob]) -> list[StoreJob]:
        """The jobs that the workers may have now: those, of this step or earlier, that wait for no output."""
        if self._loading:
            for job in jobs:
                self._jobs.hold(job)
                self._held.append((self._loading[-1], job))
            jobs = ()
        released, self._released = self._released, []
        for job in released:
            self._jobs.hold(job, is_held=False)
        return [*released, *jobs]

    def update(self, loaded_steps: Iterable[int], invalid_block_ids: set[int]) -> None:
        """The output of a step.

        Args:
            loaded_steps: its number, from the workers, if a peer has loaded synchronously in it.
        """
        if invalid_block_ids:
            self._invalidate(invalid_block_ids)
        for step in loaded_steps:
            while self._loading and self._loading[0] <= step:
                self._loading.popleft()
            while self._held and self._held[0][0] <= step:
                self._released.append(self._held.popleft()[1])
        if not self._loading:
            self._freed_while_loading = False

    def _invalidate(self, invalid: set[int]) -> None:
        assert self._block_pool is not None
        for job in (*self._released, *(job for _, job in self._held)):
            self._stores.cancel(job)
        self.forget_held()
        self._jobs.drop_unsent()  # Of requests that have finished with this output.
        # Requests that wait for their load are not scheduled, and share no blocks.
        tracked = self._stores.tracked.items()
        self._spread([name for name, each in tracked if each.request.status == RequestStatus.RUNNING], invalid)
        if self._uncached:
            logger.warning(
                "kvpool: a load of another connector has failed, so %d requests that share its blocks store nothing",
                len(self._uncached),
            )
        if self._freed_while_loading:
            # Which of the free blocks a preempted or aborted request had is not known any more.
            self._block_pool.evict_blocks({block.block_id for block in self._block_pool.blocks if block.ref_cnt == 0})

    def _evict_cached(self, again: CachedRequestData) -> None:
        """Evicts the blocks of invalid requests that vLLM has cached with this step."""
        assert self._block_pool is not None
        for request_id, rows in zip(again.req_ids, again.new_block_ids, strict=True):
            if rows and request_id in self._uncached:
                self._uncached[request_id] += rows[0]
        for last in self._uncached.values():
            num_cached = max((nth for nth, each in enumerate(last, 1) if not self._uncached_refs(each)), default=0)
            self._block_pool.evict_blocks(set(last[:num_cached]))
            del last[:num_cached]

    def _spread(self, candidates: Iterable[str], invalid: Iterable[int] = ()) -> None:
        """Requests among the candidates that have an invalid block store nothing any more; what is invalid is evicted.

        All blocks of a request from its first invalid one on are invalid: they were computed from it.

        Args:
            invalid: the first invalid blocks; none: those that are shared and not cached.
        """
        assert self._block_pool is not None
        if self._tables is None:
            return
        remaining = {name: self._tables(name)[0] for name in candidates if name not in self._uncached}
        bad = set(invalid) or {each for row in remaining.values() for each in row if self._uncached_refs(each) > 1}
        bad.discard(0)
        while found := {name: at for name, table in remaining.items() if (at := _first(table, bad)) is not None}:
            for request_id, first in found.items():
                table = remaining.pop(request_id)[first:]
                bad.update(filter(None, table))
                # What is shared was cached before.
                last = itertools.takewhile(lambda each: self._uncached_refs(each) == 1, reversed(table))
                self._uncached[request_id] = [*last][::-1]
                self._stores.forbid(request_id)
        self._block_pool.evict_blocks(bad)

    def _uncached_refs(self, block_id: int) -> int:
        """References of a block that vLLM's cache does not name; 0 of one that it names."""
        assert self._block_pool is not None
        block = self._block_pool.blocks[block_id]
        return 0 if block.block_hash else block.ref_cnt


def _first(table: Sequence[int], bad: set[int]) -> int | None:
    return next((nth for nth, block_id in enumerate(table) if block_id in bad), None)
