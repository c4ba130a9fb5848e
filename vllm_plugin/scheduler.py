"""The scheduler's side of the connector: which blocks to load, which to store, and which must not be reused meanwhile.

One thread calls it, the scheduler's; it never waits longer than `MAX_LOOKUP_WAIT_MS` a step. The file stands in the
order of a request's way: lookup, load, store, end.

A request's first answer is "ask again" while its lookup is under way. Its answer may be thrown away or cut by the
scheduler, so asking again costs nothing and changes nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.client import PendingLookup
from kvpool.errors import KVPoolError, UnavailableError
from kvpool.types import BlockRun
from vllm_plugin.config import MAX_LOOKUP_WAIT_MS, ConnectorConfig
from vllm_plugin.identity import namespace_spec
from vllm_plugin.metadata import ConnectorMetadata, LoadJob, StoreJob, WorkerMetadata
from vllm_plugin.metrics import KVPoolStats, Recorder
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.scheduler")

RESET_TIMEOUT_MS = 5_000


@dataclass(slots=True)
class Sought:
    """A request's lookup.

    Args:
        first: block the lookup began with.
        asked: block from which the engine last asked: its own cache covers what is before.
        pending: the call; None once answered.
        end: blocks [first, end) are in the pool, under the lease.
        good_until: by when a load must have begun.
    """

    first: int
    asked: int
    sent_at: float
    pending: PendingLookup | None
    end: int = 0
    lease_id: int = 0
    good_until: float = 0.0


class KVPoolScheduler:
    """One engine."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig):
        transfer = vllm_config.kv_transfer_config
        spec = namespace_spec(vllm_config, kv_cache_config, config)
        self._config = config
        self._loads = transfer.is_kv_consumer
        self._stores = transfer.is_kv_producer
        self._block_tokens = spec.groups[0].block_tokens
        self._world_size = vllm_config.parallel_config.world_size
        self._max_pinned = int(kv_cache_config.num_blocks * config.max_pinned_fraction)
        self._recorder = Recorder()
        self._session = Session(config.client_config(), spec, "scheduler")
        self._block_pool: BlockPool | None = None
        self._sought: dict[str, Sought] = {}
        self._waited_s = 0.0
        self._requests: dict[str, Request] = {}
        self._failed: set[str] = set()
        self._new_loads: list[LoadJob] = []
        self._leases: dict[str, int] = {}
        # Blocks [0, n) of a request are in the pool, or on their way there.
        self._stored: dict[str, int] = {}
        self._job_ids = itertools.count(1)
        # Store job -> its blocks, and the ranks that have yet to report it.
        self._pinned: dict[int, tuple[list[int], int]] = {}
        self._num_pinned = 0

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    # Lookup

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own can be loaded; None: ask again."""
        if not self._loads or request.request_id in self._failed or request.skip_reading_prefix_cache:
            return 0, False
        first = num_computed_tokens // self._block_tokens
        # The last token is always computed: its logits are what the request is waiting for.
        stop = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_tokens)
        if stop <= first:
            return 0, False
        sought = self._sought.get(request.request_id)
        if sought is None or sought.first > first or (sought.pending is None and self._is_old(sought)):
            self._forget(request.request_id)
            sought = self._send(request, first, stop)
            if sought is None:
                return 0, False
        if sought.pending is not None and not self._receive(sought):
            return None, False
        sought.asked = first
        matched = max(0, sought.end - first) * self._block_tokens
        return matched, matched > 0

    def _send(self, request: Request, first: int, stop: int) -> Sought | None:
        namespace = self._session.namespace
        if namespace is None:
            return None
        hashes = request.block_hashes
        run = BlockRun(0, hashes[first:stop], hashes[first - 1] if first else b"")
        sent_at = time.monotonic()
        try:
            pending = self._session.client.lookup_async(namespace, [run])
        except UnavailableError:
            return None  # The connection is being closed.
        sought = self._sought[request.request_id] = Sought(first, first, sent_at, pending)
        return sought

    def _receive(self, sought: Sought) -> bool:
        """Takes the answer if it is there, or comes within what this step may still wait."""
        assert sought.pending is not None
        started = time.monotonic()
        budget_s = max(0.0, MAX_LOOKUP_WAIT_MS / 1000 - self._waited_s)
        try:
            found = sought.pending.result(budget_s)
        except KVPoolError as error:
            self._session.report(error)
            self._recorder.add("lookup_failures")
            sought.pending = None
            sought.end = sought.first
            sought.good_until = math.inf  # One budget of waiting a request, not one a try.
            return True
        finally:
            self._waited_s += time.monotonic() - started
        if found is None:
            return False
        sought.pending = None
        # Without a lease nothing keeps the blocks there.
        sought.end = sought.first + (found.hits[0].num_leading if found.lease_id else 0)
        sought.lease_id = found.lease_id
        ttl_ms = found.lease_ttl_ms or self._config.load_timeout_ms
        sought.good_until = sought.sent_at + max(ttl_ms - self._config.load_timeout_ms, ttl_ms // 2) / 1000
        self._session.report(None)
        self._recorder.add("lookups")
        self._recorder.observe("lookup_seconds", time.monotonic() - sought.sent_at)
        return True

    @staticmethod
    def _is_old(sought: Sought) -> bool:
        return time.monotonic() > sought.good_until

    # Load

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The scheduler has taken the answer, or a part of it, or none of it."""
        request_id = request.request_id
        self._requests[request_id] = request
        if num_external_tokens == 0:
            self._forget(request_id)
            return
        sought = self._sought.pop(request_id)
        first = sought.asked
        stop = min(sought.end, first + -(-num_external_tokens // self._block_tokens))
        hashes = request.block_hashes
        run = BlockRun(0, hashes[first:stop], hashes[first - 1] if first else b"")
        self._new_loads.append(LoadJob(request_id, sought.lease_id, run, blocks.get_block_ids()[0][first:stop]))
        self._leases[request_id] = sought.lease_id
        self._recorder.add("hit_tokens", num_external_tokens)
        if self._stored.get(request_id, 0) >= first:
            self._stored[request_id] = max(stop, self._stored.get(request_id, 0))

    # Store

    def build_metadata(self, output: SchedulerOutput) -> ConnectorMetadata:
        """This step's jobs. The blocks of its stores are pinned from here on."""
        self._waited_s = 0.0
        loads, self._new_loads = self._new_loads, []
        stores = []
        if self._stores and self._session.namespace is not None:
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                job = self._store_job(request_id, num_tokens, output)
                if job is not None:
                    stores.append(job)
        return ConnectorMetadata(loads, stores)

    def _store_job(self, request_id: str, num_tokens: int, output: SchedulerOutput) -> StoreJob | None:
        request = self._requests.get(request_id)
        state = output.kv_connector_block_state
        if request is None or state is None:
            return None
        # Hashes name known tokens only, and known tokens below this bound are written when this step is over: neither
        # a rejected draft token nor the last sampled one is ever stored.
        written = request.num_computed_tokens + num_tokens
        if not self._config.store_decoded:
            written = min(written, request.num_prompt_tokens)
        first = self._stored.get(request_id, 0)
        stop = min(written // self._block_tokens, len(request.block_hashes))
        if stop <= first:
            return None
        tables = state.get_block_ids(request_id)
        if tables is None:
            return None
        block_ids = tables[0][first:stop]  # An abort can leave more hashes than blocks.
        if not block_ids:
            return None
        room = self._max_pinned - self._num_pinned
        if len(block_ids) > room:
            # What fits is stored now: a prompt longer than all that may be pinned would never be stored as a whole.
            self._recorder.add("store_deferred")
            block_ids = block_ids[:room]
            if not block_ids:
                return None
        hashes = request.block_hashes
        run = BlockRun(0, hashes[first : first + len(block_ids)], hashes[first - 1] if first else b"")
        self._stored[request_id] = first + len(block_ids)
        job = StoreJob(next(self._job_ids), run, block_ids)
        self._pin(job)
        return job

    def _pin(self, job: StoreJob) -> None:
        # A request that is preempted or finished frees its blocks without asking; a reference keeps them from reuse.
        assert self._block_pool is not None
        self._block_pool.touch([self._block_pool.blocks[block_id] for block_id in job.block_ids])
        self._pinned[job.job_id] = (job.block_ids, self._world_size)
        self._num_pinned += len(job.block_ids)

    def has_pinned_blocks(self) -> bool:
        """While blocks are pinned the engine must go on stepping: reports come with steps."""
        return bool(self._pinned)

    # End

    def update(self, output: KVConnectorOutput) -> None:
        """What the ranks have ended."""
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            for job_id, ranks in metadata.ended_stores.items():
                self._unpin(job_id, ranks)
        for request_id in output.failed_recving:
            # Looking up again could find the same bad block again, for ever.
            self._failed.add(request_id)
            self._stored[request_id] = 0
        for request_id in output.finished_recving or ():
            self._session.client.release_quietly(self._leases.pop(request_id, 0))
            if request_id not in self._requests:
                self._failed.discard(request_id)
                self._stored.pop(request_id, None)

    def _unpin(self, job_id: int, ranks: int) -> None:
        block_ids, remaining = self._pinned[job_id]
        remaining -= ranks
        assert remaining >= 0, f"store job {job_id} was reported by too many ranks"
        if remaining:
            self._pinned[job_id] = (block_ids, remaining)
            return
        del self._pinned[job_id]
        self._num_pinned -= len(block_ids)
        assert self._block_pool is not None
        # The deepest block first: it is the one to be reused first.
        self._block_pool.free_blocks(self._block_pool.blocks[block_id] for block_id in reversed(block_ids))

    def request_finished(self, request: Request) -> None:
        """Forgets a request. Its store jobs hold references of their own; a load under way is still reported."""
        request_id = request.request_id
        self._forget(request_id)
        self._requests.pop(request_id, None)
        self._failed.discard(request_id)
        self._stored.pop(request_id, None)

    def reset(self) -> bool:
        """Drops this namespace's blocks from the pool; False if the pool could not be told."""
        for request_id in list(self._sought):
            self._forget(request_id)
        self._stored.clear()
        namespace = self._session.namespace
        if namespace is None:
            return False
        try:
            self._session.client.clear(namespace.fingerprint, timeout_ms=RESET_TIMEOUT_MS)
        except KVPoolError as error:
            self._session.report(error)
            logger.warning("kvpool: the pool was not cleared: %s", error)
            return False
        return True

    def stats(self) -> KVPoolStats | None:
        return self._recorder.take()

    def shutdown(self) -> None:
        """Ends the connection; what is leased ends by itself. Idempotent."""
        self._session.close()

    def _forget(self, request_id: str) -> None:
        sought = self._sought.pop(request_id, None)
        if sought is None:
            return
        if sought.pending is None:
            self._session.client.release_quietly(sought.lease_id)
        else:
            # The answer may bring a lease that nobody wants any more.
            sought.pending.on_done(self._release_late)

    def _release_late(self, pending: PendingLookup) -> None:
        try:
            found = pending.result(0)
        except KVPoolError:
            return
        if found is not None:
            self._session.client.release_quietly(found.lease_id)
