"""The scheduler's side of the connector: lookups, loads and stores of one engine.

What its calls may cost a step is bounded (`StepBudget`). The file stands in the order of a request's way: lookup,
load, store, end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.client.tracing import tracing_of
from kvpool.protocol.errors import TransferError
from kvpool.protocol.reports import Cause
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import ConnectorMetadata, WorkerMetadata
from vllm_plugin.metrics import KVPoolStats, Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.scheduler.admission import Admission
from vllm_plugin.scheduler.hints import Hints
from vllm_plugin.scheduler.load_policy import PrefillQueue, Stage
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups, StepBudget
from vllm_plugin.scheduler.pool_contents import Events, PoolContents
from vllm_plugin.scheduler.provenance import PeerLoads, Resets
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.store_jobs import StoreJobs
from vllm_plugin.scheduler.stores import Stores
from vllm_plugin.scheduler.telemetry import ComputedTokens, Reporter, RequestSpans

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVPoolScheduler:
    """Answers the hooks that vLLM calls on the scheduler's side of an engine."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig):
        transfer, events = vllm_config.kv_transfer_config, vllm_config.kv_events_config
        self._reads, self._writes = transfer.is_kv_consumer, transfer.is_kv_producer
        self._preempts_by_priority = vllm_config.scheduler_config.policy == "priority"
        self._recorder = recorder = Recorder()
        self.guard = recorder.guard
        self.geometry = geometry = Geometry.of(vllm_config, kv_cache_config, config.share_adapters)
        self.budget = StepBudget(recorder, is_async=bool(vllm_config.scheduler_config.async_scheduling))
        self.stages = Stages(geometry.num_stages, config, recorder)
        has_events = events is not None and events.enable_kv_cache_events
        self.contents = PoolContents(Events(geometry.groups, enabled=has_events))
        self.queue = PrefillQueue(geometry.step_tokens)
        self.loads = Loads(geometry, self.stages, config, self.queue, recorder)
        self._spans = RequestSpans(tracing_of(config.client_config()))
        traceparent_of_lookup = functools.partial(self._spans.traceparent, part="lookup")
        self.lookups = Lookups(geometry, self.stages, config, self.budget, recorder, traceparent_of_lookup)
        self.computed = ComputedTokens(geometry, recorder, self._spans)
        self.admission = Admission(
            geometry,
            self.stages,
            config,
            self.lookups,
            self.loads,
            self.queue,
            self.contents,
            self.budget,
            self.computed,
            self._spans,
            recorder,
        )
        self.hints = Hints(geometry, self.stages, recorder)
        self.jobs = StoreJobs(geometry, config, self.contents, recorder, self.hints, self._spans.traceparent)
        self.stores = Stores(geometry, config, self.jobs, self.contents, recorder)
        self._peer_loads = PeerLoads(geometry.groups, self.stores)
        self._resets = Resets(config, self.stages, self.admission, self.stores, self.jobs, recorder, geometry.num_ranks)
        self._failed: set[str] = set()
        self._unallocated: Request | None = None  # Has been answered, and has no blocks yet.
        self._asked: tuple[Request | None, int] = None, 0  # The newest question: tokens that the engine had itself.
        self._begun_step = 0  # Number of the newest step that the load policy was told of.
        self._delivered_step = 0  # Number of the newest step whose metadata vLLM has.
        if geometry.num_stages == 1:
            self.stages.open([namespace_spec(vllm_config, kv_cache_config, config)])
        self._reporter = Reporter(self.stages, recorder, vllm_config.parallel_config.world_size)

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool
        self.jobs.bind(block_pool)
        self._resets.bind(block_pool)
        self.admission.bind(block_pool)

    # Lookup

    def arrived(self, request: Request) -> None:
        """vLLM will ask about a new request in its turn."""
        self.queue.put(request, Stage.WAITING)
        self._ask_ahead()

    def _ask_ahead(self) -> None:
        if self._reads and self._may_share:
            self.admission.look_ahead()

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own can be loaded; None: ask again."""
        matched: int | None = 0
        self._asked = request, num_computed_tokens
        with self.budget:
            if request.kv_transfer_params:
                with self.guard.part("the hints of a request"):
                    self.hints.asked(request)
            self._spans.asked(request)
            why_not = self._why_not(request, num_computed_tokens)
            if why_not is not None:
                self.computed.because(request, why_not)
            elif self._resets.must_wait():
                matched = None
            else:
                matched = self.admission.matched_tokens(request, num_computed_tokens, self._unallocated is request)
        self._unallocated = None if matched is None else request
        return matched, bool(matched)

    def miss(self, request: Request) -> None:
        """`matched_tokens` has failed: the request is computed."""
        self._unallocated = request
        with self.guard.part("the end of a lookup"):
            self.admission.discard(request.request_id)

    def _why_not(self, request: Request, num_computed_tokens: int) -> Cause | None:
        """Why a request is not looked up; None if it is."""
        if not self._reads or request.skip_reading_prefix_cache:
            return Cause.NOT_ASKED
        if self._resets.is_pending or self._resets.has_waited or self.stages.disagree:
            return Cause.SHARING_OFF
        if request.request_id in self._failed:
            return Cause.LOAD_FAILED
        # Inside a block, which the engine is about to copy, no hit can begin.
        return Cause.NOT_ASKED if num_computed_tokens % self.geometry.alignment else None

    # Load

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for a request, and takes the answer, or a part of it, or none of it."""
        (asked, num_own), self._asked = self._asked, (None, 0)
        local = num_own if asked is request else None  # None: its load has ended.
        self._peer_loads.admitted(request, local, num_external_tokens)  # First: also where anything below fails.
        with self.budget:
            self.queue.admitted(request, local or 0, num_external_tokens)
            self._unallocated = None
            request_id = request.request_id
            candidate = self.admission.admitted(request_id)
            lookup = None if candidate is None else candidate.lookup
            self.loads.stop_waiting(request_id)
            self.geometry.names.admitted(request_id)
            with self.guard.part("the hints of a request"):
                self.hints.admitted(request)
            with self.guard.part("the count of computed tokens"):
                self.computed.admitted(request, lookup)
                self._spans.admitted(request, lookup, num_external_tokens)
            self.stores.track(request, None if candidate is None else self.admission.divergence(candidate))
            if lookup is not None:
                for idx in lookup.proven:
                    num_blocks = lookup.local // self.geometry.groups[idx].kind.block_tokens
                    self.stores.proven(request_id, idx, num_blocks)
            if num_external_tokens == 0:
                if lookup is not None:
                    self.lookups.cancel(lookup)
                return
            assert candidate is not None, f"vLLM takes {num_external_tokens} tokens for {request_id}, without a lookup"
            start, stop = candidate.asked, candidate.asked + num_external_tokens
            traceparent = self._spans.traceparent(request_id, "load")
            if not self.loads.begin(request, candidate.lookup, blocks.get_block_ids(), start, stop, traceparent):
                self.lookups.release(candidate.lookup.lease_ids)
            self._recorder.add("hit_tokens", num_external_tokens)
            self.stores.loads(request_id, start, stop)

    def fail_load(self, request: Request, num_external_tokens: int) -> None:
        """`after_alloc` has failed: if vLLM waits for a load of the request, every rank reports it as failed."""
        request_id = request.request_id
        self._unallocated = None
        with self.guard.part("the end of a lookup"):
            self.admission.discard(request_id)
            self.loads.stop_waiting(request_id)
        self.stores.distrust(request)
        if num_external_tokens:
            for lease_ids in self.loads.fail(request_id):
                self.lookups.release(lease_ids)

    # Store

    def build_metadata(self, output: SchedulerOutput) -> ConnectorMetadata:
        """This step's jobs. The blocks of its stores are pinned from here on."""
        if self._preempts_by_priority and output.preempted_req_ids:
            # vLLM may have withdrawn a request's chunk from this step (vllm-project/vllm#57580), and still knows the
            # chunk's blocks, which nobody computes, by their hashes. They are free now.
            free = self._block_pool.free_block_queue.get_all_free_blocks()
            self._block_pool.evict_blocks(self.stores.unwritten(output.preempted_req_ids, free))
        self.jobs.begin_step()
        with self.guard.part("the release of leases"):
            self.lookups.flush()
        self._resets.finish()
        with self.guard.part("looking ahead"):
            self._ask_ahead()
        self.budget.new_step()
        self.geometry.names.new_step()
        with self.guard.part("the count of computed tokens"):
            self.computed.step(output.num_scheduled_tokens)
        num_prefill = self.queue.step(output.num_scheduled_tokens)
        self._begun_step = self.jobs.step
        self.loads.policy.step_began(num_prefill, output.total_num_scheduled_tokens - num_prefill)
        if self._unallocated is not None:
            # vLLM stops admitting requests at the first one that it has no blocks for.
            self.jobs.make_room(self.geometry.blocks_to_compute(self._unallocated.num_tokens))
            self._unallocated = None
        self._peer_loads.prepare(output)
        stores = self.stores.build(output, self._writes and self._may_share)
        dropped = self.jobs.take_dropped()
        check = self._resets.check_due(output.total_num_scheduled_tokens)
        # Last: a load that vLLM waits for must reach the ranks, whatever fails above.
        self._delivered_step = self.jobs.step
        loads = self.loads.take_new()
        return ConnectorMetadata(loads, stores, dropped, self.stages.weights_epoch, check)

    def bare_metadata(self, output: SchedulerOutput) -> ConnectorMetadata:
        """`build_metadata` has failed: the loads of the step, and no store; what was pinned for one is free again."""
        self._unallocated = None
        if self._delivered_step == self.jobs.step:  # It failed before the step had a number of its own.
            self.jobs.begin_step()
        self._delivered_step = self.jobs.step
        self.budget.new_step()
        if self._begun_step != self.jobs.step:
            self._begun_step = self.jobs.step
            with self.guard.part("the load policy"):
                self.loads.policy.step_began(0, 0)
        with self.guard.part("dropping stores"):
            self.jobs.drop_lost(undelivered_step=self.jobs.step)
        if self._peer_loads.missed_step():
            self._resets.distrust()
        # Requests that wait for the weights of the ranks must not wait for a step that succeeds.
        check = self._resets.check_due(output.total_num_scheduled_tokens)
        return ConnectorMetadata(self.loads.take_new(), [], [], self.stages.weights_epoch, check)

    @property
    def _may_share(self) -> bool:
        return self._resets.may_share and self.stages.are_open and not self.stages.disagree

    def has_pinned_blocks(self) -> bool:
        """While blocks are pinned the engine must go on stepping: reports come with steps."""
        return len(self.jobs) > 0

    def has_pending_block_frees(self) -> bool:
        """A running request lacks blocks; True if some will be free within a few steps, without preempting another."""
        return self.jobs.relieve()

    # End

    def update(self, output: KVConnectorOutput) -> None:
        """Ranks have reported loads, stores, and their namespaces."""
        part = self.guard.part
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            with part("the comparison of namespaces") as comparison:
                self.stages.compare(metadata.namespaces)
                self._resets.weights_reported(metadata.weights)
            if comparison.failed:
                self._resets.fail("the namespaces of its ranks could not be compared")
            with part("the load policy"):
                self.loads.transferred(metadata.load_seconds, metadata.unserved_loads)
            for job_id, ranks in metadata.ended_stores.items():
                with part("the report of a store"):
                    self.jobs.reported(job_id, ranks, job_id in metadata.failed_stores)
            with part("the end of stores"):
                self.jobs.unpin_reported()
        if self.stages.disagree:
            with part("the end of lookups"):
                self.admission.discard_all()
        for request_id in output.failed_recving:
            # Looking up again could find the same bad block again, for ever.
            self._failed.add(request_id)
            self.stores.load_failed(request_id)
        for request_id in output.finished_recving or ():
            with part("the end of a load"):
                self._load_ended(request_id, succeeded=request_id not in output.failed_recving)
            self.loads.loading.pop(request_id, None)
            if request_id not in self.stores.tracked:
                self._failed.discard(request_id)
        with part("the end of a reset"):
            self._resets.finish()
        with part("the release of leases"):
            self.lookups.flush()

    def _load_ended(self, request_id: str, succeeded: bool) -> None:
        if (job := self.loads.ended(request_id, succeeded)) is None:
            return
        self._spans.load_ended(request_id, succeeded)
        if succeeded or job.is_unserved:  # Lookups and pings may succeed while a rank can load nothing.
            error = None if succeeded else TransferError("a rank could not load a hit")
            for session in self.stages.sessions:
                session.report(error, "load")
        self.lookups.release(job.lease_ids)
        for part in () if succeeded else job.groups:
            for run in part.runs:
                self.contents.missing(part.group_idx, run.block_hashes)

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Forgets a request. Its store jobs hold references of their own; a load under way is still reported."""
        part, request_id = self.guard.part, request.request_id
        with part("the end of a lookup"):
            self.admission.discard(request_id)
            self.lookups.flush()
        with part("the end of a request"):
            self.queue.drop(request_id)
            self.loads.stop_waiting(request_id)
            self._peer_loads.finished(request_id)
            self.geometry.names.admitted(request_id)
        with part("the count of computed tokens"):
            self.computed.finished(request_id)
            self._spans.finished(request_id)
        self._failed.discard(request_id)
        with part("the last stores of a request") as stores:
            self.stores.finish(request_id, tables if self._writes and self._may_share else None)
        if stores.failed:
            self.stores.tracked.pop(request_id, None)
            with part("dropping stores"):
                self.jobs.drop_lost()
        with part("the hints of a request"):
            self.hints.finished(request)

    def reset(self) -> bool:
        """vLLM resets its prefix cache; False: not before the engine's blocks in use are free."""
        return self._resets.reset()

    def turn_off(self) -> None:
        """A hook has failed without which the connector cannot tell which KV is whose: nothing is shared any more."""
        self._resets.fail("a hook has failed that it relies on")
        for job in self.loads.new:
            job.groups = []  # Such a load fails, and its request is computed.

    def take_events(self) -> list[KVCacheEvent]:
        return self.contents.events.take()

    def stats(self) -> KVPoolStats | None:
        """What was counted since the last call. vLLM asks once for each step that has ended."""
        self.loads.policy.step_ended()
        self.stores.step_ended()
        return self._recorder.take()

    def shutdown(self) -> None:
        """Ends the lookups and the connections. Idempotent."""
        with self.guard.part("the end of lookups"):
            self.admission.discard_all()
        with self.guard.part("the end of the adapters' thread"):
            self.geometry.names.close()
        with self.guard.part("the end of hints"):
            self.hints.close()
        with self.guard.part("the last report"):
            self._reporter.close()
        self.stages.close()
