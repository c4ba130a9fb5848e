"""The scheduler's side of the connector: lookups, loads and stores of one engine, in the order of a request's way.

One thread calls it, the scheduler's. What its calls may cost a step is bounded (`step_budget.py`). The file stands in
the order of a request's way: lookup, load, store, end.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.namespace import NamespaceSpec
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import ConnectorMetadata, GroupBlocks, Handshake, LoadJob, WorkerMetadata
from vllm_plugin.metrics import KVPoolStats, Recorder
from vllm_plugin.model.adapters import Adapters
from vllm_plugin.model.block_names import BlockNames
from vllm_plugin.model.groups import alignment_tokens, hash_tokens, make_groups
from vllm_plugin.model.identity import namespace_spec
from vllm_plugin.scheduler.events import Events
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups
from vllm_plugin.scheduler.peer_loads import PeerLoads
from vllm_plugin.scheduler.request_lookup import RequestLookup
from vllm_plugin.scheduler.resets import named_epoch, observe_resets
from vllm_plugin.scheduler.step_budget import StepBudget
from vllm_plugin.scheduler.stores import Stores
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool.scheduler")


class KVPoolScheduler:
    """One engine."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig):
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._config = config
        self._reads = transfer.is_kv_consumer
        self._writes = transfer.is_kv_producer
        self._num_stages = parallel.pipeline_parallel_size
        self._groups = make_groups(vllm_config, kv_cache_config)
        self._alignment = alignment_tokens(kv_cache_config)
        self._adapters = Adapters(vllm_config, config.share_adapters)
        self._names = BlockNames(hash_tokens(vllm_config, kv_cache_config), self._adapters)
        self._recorder = Recorder()
        self._sessions: list[Session] = []  # One a stage; empty until the stages' namespaces are known.
        self._specs: list[NamespaceSpec] = []
        self._fingerprints: list[bytes] = []
        self._weights_epoch = config.weights_epoch
        rules = [group.rule for group in self._groups]
        events = vllm_config.kv_events_config
        self._events = Events(self._groups, enabled=events is not None and events.enable_kv_cache_events)
        self._stores = Stores(
            self._groups,
            self._alignment,
            self._names,
            config,
            parallel.world_size,
            kv_cache_config.num_blocks,
            vllm_config.scheduler_config.max_num_batched_tokens,
            self._recorder,
            self._events,
        )
        self._budget = StepBudget()
        self._peer_loads = PeerLoads(self._stores)
        self._boot_token = 0
        self._loads = Loads(
            self._groups, self._specs, vllm_config, kv_cache_config, config.decline_slow_loads, self._recorder
        )
        self._lookups = Lookups(
            rules,
            self._alignment,
            self._names,
            self._sessions,
            self._config,
            self._recorder,
            self._budget,
            self._missing,
            self._loads.verdict,
            self._loads.load_policy.compute_seconds,
        )
        if self._num_stages == 1:
            self._open([namespace_spec(vllm_config, kv_cache_config, config)])
        self._failed: set[str] = set()
        self._new_loads: list[LoadJob] = []
        self._unallocated: Request | None = None  # Has been answered, and has no blocks yet.
        self._stale = False  # Blocks of the engine are from before a reset.
        self._disagrees = False  # Ranks name namespaces that are not this side's.
        self._is_epoch_private = False  # No other engine has its name.
        self._empty_own_cache: Callable[[], bool] | None = None
        self._is_own_cache_empty = True  # As vLLM's last reset of it has ended.

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        self._stores.bind(block_pool)
        self._peer_loads.bind(block_pool)
        self._empty_own_cache = observe_resets(block_pool, self._own_cache_reset)

    def handshake(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Learns the workers' namespaces, by stage and rank, where they are not what this side can work out."""
        specs = {ranks: each.spec for ranks, each in metadata.items() if isinstance(each, Handshake)}
        if not specs:
            if metadata and self._num_stages > 1:
                logger.error("kvpool is off: another connector's handshake has taken the place of ours")
            return
        stages: list[NamespaceSpec] = []
        for stage in range(self._num_stages):
            of_stage = {spec.fingerprint(): spec for (at, _), spec in specs.items() if at == stage}
            if len(of_stage) != 1:
                self._disagree(
                    f"the ranks of pipeline stage {stage} name {len(of_stage)} different namespaces "
                    f"({', '.join(name.hex()[:12] for name in of_stage)})"
                )
                return
            stages += of_stage.values()
        # Of several kvpools under a MultiConnector, each is told what the first one's workers say.
        own = self._config
        self._open(
            [replace(spec, tenant=own.tenant, salt=own.salt, weights_epoch=self._weights_epoch) for spec in stages]
        )

    def _compare(self, namespaces: Iterable[tuple[int, bytes]]) -> None:
        """Compares what ranks call their stage's namespace with what this side does."""
        for stage, fingerprint in namespaces:
            if self._fingerprints and self._fingerprints[stage] != fingerprint:
                self._disagree(
                    f"a rank of pipeline stage {stage} names namespace {fingerprint.hex()[:12]}, the scheduler "
                    f"{self._fingerprints[stage].hex()[:12]}"
                )

    def _disagree(self, how: str) -> None:
        """Nothing is shared from now on: what one side stores is not what the other looks up."""
        self._disagrees = True
        self._lookups.forget_all()
        self._recorder.set("namespaces_disagree", 1)
        logger.error(
            "kvpool is off for this engine: %s. Give every rank the same model files, environment and kvpool release, "
            "and two kvpools under a MultiConnector the same num_shards; `kvpool namespaces --diff` shows what differs",
            how,
        )

    def _open(self, specs: Sequence[NamespaceSpec]) -> None:
        for session in self._sessions:
            session.close()
        names = ["scheduler"] if len(specs) == 1 else [f"scheduler, stage {stage}" for stage in range(len(specs))]
        self._specs[:] = specs
        self._fingerprints = [spec.fingerprint() for spec in specs]  # As ranks report them, whatever is reset later.
        self._sessions[:] = [
            Session(self._config.client_config(), spec, name, self._recorder, explains=True)
            for spec, name in zip(specs, names, strict=True)
        ]

    # Lookup

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own can be loaded; None: ask again."""
        with self._budget:
            matched = self._matched_tokens(request, num_computed_tokens)
        self._unallocated = None if matched is None else request
        return matched, bool(matched)

    def _matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if not self._reads or self._stale or self._disagrees:
            return 0
        if request.request_id in self._failed or request.skip_reading_prefix_cache:
            return 0
        if num_computed_tokens % self._alignment:
            return 0  # Inside a block, which the engine is about to copy.
        boundary = self._lookups.boundary(request, num_computed_tokens)
        if boundary is None:
            return None
        # Whoever is asked again before its blocks are allocated has been let begin already.
        may_begin = self._unallocated is request or self._budget.may_begin
        if boundary > num_computed_tokens and not (may_begin and self._loads.has_room(request)):
            if self._budget.may_wait(num_computed_tokens):
                return None
            self._recorder.add("declined_waits")
            boundary = num_computed_tokens
        if boundary == num_computed_tokens:
            self._loads.leave_line(request.request_id)
        return boundary - num_computed_tokens

    # Load

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The scheduler has taken the answer, or a part of it, or none of it."""
        with self._budget:
            self._after_alloc(request, blocks, num_external_tokens)

    def _after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._unallocated = None
        request_id = request.request_id
        lookup = self._lookups.take(request_id)
        self._loads.leave_line(request_id)
        self._peer_loads.admitted(request_id)
        self._names.admitted(request_id)
        self._stores.track(request, None if lookup is None else self._lookups.divergence(lookup))
        if lookup is not None:
            for idx in lookup.proven:
                self._stores.proven(request_id, idx, lookup.local // self._groups[idx].rule.block_tokens)
        if num_external_tokens == 0:
            if lookup is not None:
                self._lookups.let_go(lookup)
            return
        assert lookup is not None, f"vLLM takes {num_external_tokens} tokens for {request_id}, which has no lookup"
        stop_tokens = lookup.asked + num_external_tokens
        parts = self._load_parts(request, lookup, blocks.get_block_ids(), stop_tokens)
        if parts is None:
            # Taken in part, at a boundary that cannot be resumed: without leases the load fails, and all is computed.
            self._lookups.release(lookup.lease_ids)
            lookup.lease_ids, parts = (0,) * self._num_stages, []
        job = LoadJob(request_id, lookup.lease_ids, parts, self._weights_epoch)
        self._new_loads.append(job)
        is_probe = lookup.verdict is not None and lookup.verdict.is_probe
        self._loads.begin(request, job, lookup.asked, stop_tokens, is_probe)
        self._recorder.add("hit_tokens", num_external_tokens)
        self._stores.loads(request_id, lookup.asked, stop_tokens)

    def _load_parts(
        self, request: Request, lookup: RequestLookup, tables: Sequence[Sequence[int]], stop_tokens: int
    ) -> list[GroupBlocks] | None:
        """What the engine has made room for beyond its own blocks; None if the pool lacks some of it."""
        if not self._names.are_known(request):
            return None
        parts = []
        for idx, group in enumerate(self._groups):
            rule = group.rule
            start, stop = lookup.asked // rule.block_tokens, -(-stop_tokens // rule.block_tokens)
            rows = [list(tables[member][start:stop]) for member in group.members]
            # What lies before a window has the null block, which is nobody's memory.
            first = next((nth for nth, ids in enumerate(zip(*rows, strict=True)) if all(ids)), stop - start)
            rows = [row[first:] for row in rows]
            if not all(all(row) for row in rows) or not lookup.found[idx].has(start + first, stop):
                return None
            if rows[0]:
                run = self._names.run(request, idx, rule, start + first, stop)
                parts.append(GroupBlocks(idx, [run], rows, [start + first]))
        return parts

    # Store

    def build_metadata(self, output: SchedulerOutput) -> ConnectorMetadata:
        """This step's jobs. The blocks of its stores are pinned from here on."""
        self._lookups.flush()
        self._end_reset()
        self._budget.new_step()
        self._adapters.new_step()
        self._note_step(output)
        if self._unallocated is not None:
            # vLLM stops admitting requests at the first one that it has no blocks for.
            self._stores.make_room(self._loads.blocks_to_compute(self._unallocated))
            self._unallocated = None
        loads, self._new_loads = self._new_loads, []
        loading_step = self._peer_loads.prepare(output)
        stores, dropped = self._stores.build(output, self._may_store())
        return ConnectorMetadata(loads, self._peer_loads.hold(stores), dropped, self._weights_epoch, loading_step)

    def _may_store(self) -> bool:
        if not (self._writes and self._sessions) or self._stale or self._disagrees:
            return False
        return all(session.namespace for session in self._sessions)

    def _note_step(self, output: SchedulerOutput) -> None:
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        prefill = 0
        if total > len(scheduled):  # Else every request computes one token, and none of them tells anything.
            for request_id, count in scheduled.items():
                request = self._stores.request(request_id)
                if request is not None and request.num_computed_tokens < request.num_prompt_tokens:
                    prefill += count
        self._loads.load_policy.step_began(prefill, total - prefill)

    def has_pinned_blocks(self) -> bool:
        """While blocks are pinned the engine must go on stepping: reports come with steps."""
        return self._stores.has_pinned_blocks

    def has_pending_block_frees(self) -> bool:
        """A running request lacks blocks; True if some will be free within a few steps, without preempting another."""
        return self._stores.relieve()

    def held(self) -> dict[str, int]:
        """What is kept for requests, by name; nothing is left once all have ended."""
        return {
            **self._stores.held(),
            "held stores": len(self._peer_loads),
            "lookups": len(self._lookups),
            "loads": len(self._loads),
            "failed requests": len(self._failed),
            "new loads": len(self._new_loads),
        }

    # End

    def update(self, output: KVConnectorOutput) -> None:
        """What the ranks have ended."""
        metadata = output.kv_connector_worker_meta
        loaded_steps: set[int] = set()
        if isinstance(metadata, WorkerMetadata):
            self._compare(metadata.namespaces)
            self._stores.update(metadata)
            loaded_steps = metadata.loaded_steps
        self._peer_loads.update(loaded_steps, output.invalid_block_ids)
        for request_id in output.failed_recving:
            # Looking up again could find the same bad block again, for ever.
            self._failed.add(request_id)
            self._stores.load_failed(request_id)
        for request_id in output.finished_recving or ():
            succeeded = request_id not in output.failed_recving
            job = self._loads.ended(request_id, succeeded)
            if job is not None:
                self._lookups.release(job.lease_ids)
                for part in () if succeeded else job.groups:
                    for run in part.runs:
                        self._missing(part.group_idx, run.block_hashes)
            if self._stores.request(request_id) is None:
                self._failed.discard(request_id)
        self._end_reset()
        self._lookups.flush()

    def _missing(self, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        self._events.missing(group_idx, block_hashes)
        self._stores.missing(group_idx, block_hashes)

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Forgets a request. Its store jobs hold references of their own; a load under way is still reported."""
        self._lookups.forget(request.request_id)
        self._lookups.flush()
        self._loads.leave_line(request.request_id)
        self._peer_loads.finished(request)
        self._names.admitted(request.request_id)
        self._stores.finish(request.request_id, tables if self._may_store() else None)
        self._failed.discard(request.request_id)

    # Reset

    def reset(self) -> bool:
        """Reads no block stored before, from now on; see `on_reset`. False: not before the blocks in use are free.

        Nobody else's blocks are harmed: the engine leaves for another namespace. What is in the old one is correct for
        whoever has the old weights.
        """
        if self._config.on_reset == "keep":
            return True
        self._leave()
        return not self._stale

    def _own_cache_reset(self, succeeded: bool) -> None:
        """vLLM's own prefix cache was reset, or would have been but for blocks that are in use.

        A reset that vLLM refuses because requests run has changed nothing. One that it refuses because of our pins
        alone would have succeeded without a pool, so it is ended when they are gone.
        """
        self._is_own_cache_empty = succeeded
        if self._config.on_reset == "leave" and (succeeded or self._stores.nothing_in_use()):
            self._leave()

    def _leave(self) -> None:
        named = named_epoch(self._config)
        if named is None and not (self._stale and self._is_epoch_private):
            self._move(f"{self._config.weights_epoch}#{uuid.uuid4().hex}")
        elif named == self._weights_epoch:
            return  # The weights are what they were, by their name.
        elif named is not None:
            self._move(named)
        self._is_epoch_private = named is None
        # vLLM resets its own cache first, and comes here even where it could not: blocks in use are from before.
        self._stale = not (self._is_own_cache_empty and self._stores.nothing_in_use())
        self._recorder.set("sharing_off", int(self._stale))
        whose = "of its own" if named is None else f"of weights epoch {named!r}"
        if self._stale:
            logger.warning(
                "kvpool: the engine was reset while blocks were in use: KV sharing is off until they are free; its "
                "namespace is then one %s",
                whose,
            )
        else:
            logger.info("kvpool: the engine was reset; its namespace is now one %s", whose)

    def _move(self, epoch: str) -> None:
        self._weights_epoch = epoch
        self._lookups.forget_all()
        self._lookups.flush()
        self._events.all_missing()
        self._stores.leave(epoch)
        self._specs[:] = [replace(spec, weights_epoch=epoch) for spec in self._specs]
        for session, spec in zip(self._sessions, self._specs, strict=True):
            session.move(spec)

    def _end_reset(self) -> None:
        """Ends a reset that found blocks in use, once none is: those that are still cached are from before it."""
        if not self._stale or self._stores.has_pinned_blocks or not self._stores.nothing_in_use():
            return
        if self._empty_own_cache is not None and not self._empty_own_cache():
            return
        self._stale, self._is_own_cache_empty = False, True
        self._recorder.set("sharing_off", 0)
        logger.info("kvpool: no block from before the reset is in use any more; KV sharing is on again")

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call."""
        namespace = self._sessions[0].namespace if self._sessions else None
        if namespace is not None and namespace.boot_token != self._boot_token:
            self._boot_token = namespace.boot_token
            self._events.all_missing()  # A pool that has restarted holds nothing.
        return self._events.take()

    def stats(self) -> KVPoolStats | None:
        """What was counted since the last call. vLLM asks once for each step that has ended."""
        self._loads.load_policy.step_ended()
        self._stores.step_ended()
        return self._recorder.take()

    def shutdown(self) -> None:
        """Ends the connections; what is leased ends by itself. Idempotent."""
        self._adapters.close()
        for session in self._sessions:
            session.close()
