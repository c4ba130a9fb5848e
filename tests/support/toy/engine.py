"""A toy engine: vLLM's real scheduler and both sides of a connector around a model that needs no weights.

It calls the public hooks of `KVConnectorBase_V1` alone, in the order of vLLM's model runner, so any connector fits.

The toy model's KV of a token is a hash of the whole prefix up to it, and its next token is a function of that hash. So
what every block must hold is known, and before each forward pass the toy checks all that attention would read: one
wrong byte, one block reused too early or loaded into the wrong place, and `step` fails.

The forward pass is work for a `Device`, which may execute it long after the connector's hooks of its step were called,
and after the next step was scheduled. With speculative decoding the drafts' KV is written like any other, and stays
until the right tokens' overwrites it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.processes import wait_for
from tests.support.toy.cache import Tables, ToyCache, Wrong, config_of_rank
from tests.support.toy.device import Device, DeviceCopier
from tests.support.toy.fixtures import BLOCK_TOKENS
from tests.support.toy.model import Chunk, Sequences
from tests.support.vllm_objects import cache_config, make_request
from vllm_plugin import register
from vllm_plugin.metrics import KVPoolStats
from vllm_plugin.scheduler.scheduler import KVPoolScheduler
from vllm_plugin.worker.transfer import TransferThread
from vllm_plugin.worker.worker import KVPoolWorker

MakeConnector = Callable[[VllmConfig, KVConnectorRole, KVCacheConfig], KVConnectorBase_V1]
create_connector: MakeConnector = KVConnectorFactory.create_connector  # Engines patch it while they start.


@contextmanager
def as_rank(tp_rank: int, tp_size: int, stage: int = 0) -> Iterator[None]:
    """Patches vLLM's parallel state to that of one rank."""
    with (
        patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=tp_rank, world_size=tp_size)),
        patch.object(parallel_state, "_PP", SimpleNamespace(rank_in_group=stage)),
    ):
        yield


class Rank:
    """One rank: the connector's worker side, and then this rank's part of the KV cache."""

    def __init__(
        self,
        config: VllmConfig,
        whole: KVCacheConfig,
        make: MakeConnector,
        tp_rank: int,
        stage: int,
    ):
        tp_size, num_stages = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
        mine = config_of_rank(whole, tp_size, stage, num_stages)
        self.tp_rank, self.stage, self._tp_size = tp_rank, stage, tp_size
        with self:
            self.connector = make(config, KVConnectorRole.WORKER, mine)
        self.cache_config = mine
        self.cache = ToyCache(mine, whole, tp_rank, tp_size)
        with self:
            self.connector.register_kv_caches(self.cache.layers)

    def __enter__(self) -> None:
        self._place = as_rank(self.tp_rank, self._tp_size, self.stage)
        self._place.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._place.__exit__(*error)

    @property
    def worker(self) -> KVPoolWorker:
        """Of a `KVPoolConnector`."""
        worker: KVPoolWorker = self.connector.worker_side  # type: ignore[attr-defined]
        return worker

    def forward_context(self, forward: bool) -> ForwardContext:
        """The forward context of a step; a step without a forward pass has no attention metadata."""
        layers = {name: SimpleNamespace(kv_cache=kv) for name, kv in self.cache.layers.items()}
        attention = {name: SimpleNamespace() for name in layers} if forward else None
        return ForwardContext(no_compile_layers=layers, attn_metadata=attention, slot_mapping={})


class ToyEngine:
    """See the module.

    Args:
        num_blocks: of the engine's KV cache, the null block among them.
        steps_ahead: steps that are scheduled before the first one's outcome is known; 1 is asynchronous scheduling.
        late: whether forward passes end as late as they can: when their outcome is asked for. For a `KVPoolConnector`.
        wait: whether to wait until every side has reached the pool; for a `KVPoolConnector`.
        make: constructs the connector's sides; what the configuration names by default.
        specs: of the model's KV-cache groups, with all heads; one full-attention group by default.
        num_stages: of the pipeline.

    Attributes:
        answers: request -> its tokens so far.
        cached_tokens: request -> prompt tokens that were not computed.
        preempted: a request's name for each time that it was preempted.
        in_flight: steps whose outcome the scheduler does not know yet.
    """

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int = 64,
        tp_size: int = 1,
        steps_ahead: int = 0,
        late: bool = False,
        wait: bool = True,
        make: MakeConnector = create_connector,
        specs: Sequence[KVCacheSpec] = (),
        num_stages: int = 1,
    ):
        register()
        whole = cache_config(*specs, num_blocks=num_blocks)
        config.cache_config.num_gpu_blocks = num_blocks
        # As the core sets it: vLLM's scheduler ends the chunks of a prompt with states at its multiples.
        config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in whole.kv_cache_groups)
        if whole.has_mamba_layers:
            config.cache_config.mamba_cache_mode = "align"
        config.parallel_config.tensor_parallel_size = tp_size
        config.parallel_config.pipeline_parallel_size = num_stages
        config.parallel_config.world_size = tp_size * num_stages
        config.scheduler_config.async_scheduling = steps_ahead > 0
        scheduler_cls = AsyncScheduler if steps_ahead else Scheduler
        with patch.object(KVConnectorFactory, "create_connector", lambda **parts: make(*parts.values())):
            self.scheduler = scheduler_cls(
                config,
                config_of_rank(whole, tp_size, 0, num_stages),
                StructuredOutputManager(config),
                block_size=math.lcm(*(group.kv_cache_spec.block_size for group in whole.kv_cache_groups)),
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        # The core sets it for overlapping batches; a toy with one executor has to say so itself.
        self.scheduler.defer_block_free = steps_ahead > 0 and config.kv_transfer_config.is_kv_consumer
        self.weights = 1
        weights = SimpleNamespace(digest=lambda: hashlib.sha256(f"{self.weights}".encode()).digest())
        with patch("vllm_plugin.worker.worker.LoadedWeights", lambda _: weights):
            self.ranks = [
                Rank(config, whole, make, tp_rank, stage) for stage in range(num_stages) for tp_rank in range(tp_size)
            ]
        told = {(rank.stage, rank.tp_rank): rank.connector.get_handshake_metadata() for rank in self.ranks}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {ranks: metadata for ranks, metadata in told.items() if metadata is not None}
        )
        self.device = self.make_device(late)
        for thread in self._transfer_threads() if late else ():
            thread._copier = DeviceCopier(self.device, thread._copier)  # type: ignore[assignment]
        self.num_blocks = num_blocks
        self.num_rejected_drafts = 0
        self._num_drafts = config.num_speculative_tokens
        self.stats = KVPoolStats()
        self.answers: dict[str, list[int]] = {}
        self.preempted: list[str] = []
        self.cached_tokens: dict[str, int] = {}
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, len(self.ranks))
        self.sequences: dict[str, Sequences] = {}
        self._steps_ahead = steps_ahead
        self.in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()
        if wait:
            self.wait_until_connected()

    @property
    def connector(self) -> KVPoolScheduler:
        """Of a `KVPoolConnector`."""
        side: KVPoolScheduler = self.scheduler.connector.scheduler_side
        return side

    def wait_until_connected(self) -> None:
        sessions = [*self.connector.stages.sessions, *(rank.worker.session for rank in self.ranks)]
        wait_for(lambda: all(session.namespace for session in sessions), "connections to the pool")

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        request = make_request(request_id, prompt, max_tokens, **options)
        self.sequences[request_id] = Sequences(prompt, self.weights)
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return request

    def run(self, deadline_s: float = 30.0) -> None:
        """Steps until every request has its answer, and every block is free again."""
        self.step_until(lambda: not self.scheduler.has_requests(), "the engine to be done", deadline_s)

    def step_until(self, reached: Callable[[], object], what: str, deadline_s: float = 30.0) -> None:
        """Steps until something is so, slowly where there is nothing to compute; AssertionError after the deadline."""
        ends_at = time.monotonic() + deadline_s
        while not reached():
            assert time.monotonic() < ends_at, f"{what}: not within {deadline_s} s; requests {self.scheduler.requests}"
            if not self.step():
                time.sleep(0.001)

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def may_reuse(self, request_id: str) -> bool:
        """Whether a new request may have this name: vLLM would give it what steps under way compute of the old one."""
        under_way = (scheduled.num_scheduled_tokens for scheduled, _ in self.in_flight)
        return request_id not in self.scheduler.requests and not any(request_id in step for step in under_way)

    def generate(self, *prompts: Sequence[int], max_tokens: int = 8, **options: Any) -> list[list[int]]:
        """Answers to prompts that are submitted together; `cached_tokens[i]` says how much was not computed."""
        ids = [f"prompt-{idx}" for idx in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, max_tokens, **options)
        self.run()
        return [self.answers[request_id] for request_id in ids]

    def extend(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8) -> None:
        """The next input of a session, which was added with `resumable`."""
        self.scheduler.add_request(make_request(request_id, prompt, max_tokens, resumable=True))

    def step(self) -> int:
        """One step; returns how many tokens were computed."""
        scheduled = self.scheduler.schedule()
        self.preempted += scheduled.preempted_req_ids or ()
        tables = {
            request_id: self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for request_id in scheduled.num_scheduled_tokens
        }
        self.in_flight.append((scheduled, self._execute(scheduled, tables)))
        ahead = self._steps_ahead if scheduled.num_scheduled_tokens else 0
        while len(self.in_flight) > ahead:
            launched, outcome = self.in_flight.popleft()
            self._update(launched, outcome())
        return scheduled.total_num_scheduled_tokens

    def num_used_blocks(self) -> int:
        """Blocks with a reference; the null block is not counted."""
        return self.num_blocks - 1 - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def counted(self, name: str) -> Any:
        """A counter of the connector, over the engine's life."""
        return self.stats.data.get(name, 0)

    def shutdown(self) -> None:
        self.device.catch_up()
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def make_device(self, late: bool) -> Device:
        return Device(late)

    def _transfer_threads(self) -> Iterator[TransferThread[Any]]:
        for rank in self.ranks:
            for thread in (rank.worker.sender, rank.worker.receiver):
                assert thread is not None
                yield thread

    def _execute(self, scheduled: SchedulerOutput, tables: dict[str, Tables]) -> Callable[[], ModelRunnerOutput]:
        """Launches a step; returns what waits for its outcome."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in scheduled.num_scheduled_tokens:
            self.cached_tokens.setdefault(request_id, computed[request_id])
        for request_id in [*(new.req_id for new in scheduled.scheduled_new_reqs), *cached.resumed_req_ids]:
            known = list(self.scheduler.requests[request_id].all_token_ids)
            self.device.launch(functools.partial(self.sequences[request_id].restart, known))
        chunks = {
            request_id: Chunk(
                self.sequences[request_id],
                tables[request_id],
                computed[request_id],
                count,
                scheduled.scheduled_spec_decode_tokens.get(request_id, ()),
            )
            for request_id, count in scheduled.num_scheduled_tokens.items()
        }
        metadata = pickle.dumps(scheduled.kv_connector_metadata)
        hooked = []
        for rank in self.ranks:
            with rank:
                hooked.append(self.run_rank(rank, scheduled, pickle.loads(metadata), chunks))
        sampled: list[list[int]] = []
        self.device.launch(lambda: sampled.extend(self._sample(chunk) for chunk in chunks.values()))
        mark = self.device.mark()

        def outcome() -> ModelRunnerOutput:
            self.device.catch_up(mark)
            outputs = []
            for connector_output in hooked:
                output = ModelRunnerOutput(list(chunks), {name: idx for idx, name in enumerate(chunks)}, sampled)
                output.kv_connector_output = connector_output
                outputs.append(output)
            merged = self._aggregator.aggregate(pickle.loads(pickle.dumps(outputs)))
            assert merged is not None
            return merged

        return outcome

    def run_rank(
        self,
        rank: Rank,
        scheduled: SchedulerOutput,
        metadata: Any,
        chunks: Mapping[str, Chunk],
    ) -> KVConnectorOutput:
        """One rank's step: the hooks and the forward pass in the order of vLLM's model runner."""
        connector = rank.connector
        context = rank.forward_context(bool(scheduled.num_scheduled_tokens))
        for copy in scheduled.kv_cache_block_copies or ():
            self.device.launch(functools.partial(rank.cache.copy, copy.src_block_id, copy.dst_block_id))
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(context)
        if scheduled.num_scheduled_tokens:
            for layer in rank.cache.layers:
                connector.wait_for_layer_load(layer)
            for request_id, chunk in chunks.items():
                self.device.launch(functools.partial(self.forward, rank, request_id, chunk))
            for layer, kv in rank.cache.layers.items():
                connector.save_kv_layer(layer, kv, context.attn_metadata[layer])
        if not scheduled.has_sync_kv_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    def forward(self, rank: Rank, request_id: str, chunk: Chunk) -> None:
        first, hashes = chunk.first(), chunk.hashes()
        for wrong in rank.cache.wrong(chunk.tables, hashes, first):
            self.found_wrong(rank, request_id, wrong)
        rank.cache.write(chunk.tables, hashes, first, first + chunk.count)

    def found_wrong(self, rank: Rank, request_id: str, wrong: Wrong) -> None:
        raise AssertionError(f"{request_id}: attention reads KV that is not of its prefix: {wrong}")

    def _sample(self, chunk: Chunk) -> list[int]:
        sampled = chunk.sample()
        if sampled:
            self.num_rejected_drafts += len(chunk.scheduled_drafts) + 1 - len(sampled)
            chunk.model.draft(self._num_drafts)
        return sampled

    def _update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        drafts = {name: self.sequences[name].drafts for name in output.req_ids} if self._num_drafts else {}
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.answers[one.request_id].extend(one.new_token_ids)
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.count_stats(outputs.scheduler_stats.kv_connector_stats)
        if drafts and not self._steps_ahead:  # Else the worker keeps them, and the scheduler counts on them.
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def count_stats(self, stats: dict[str, Any]) -> None:
        self.stats.aggregate(KVPoolStats(stats))
