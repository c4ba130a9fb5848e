"""A toy engine: vLLM's real scheduler and both sides of a connector around a model that needs no weights.

It calls the public hooks of `KVConnectorBase_V1` alone, in the order of vLLM's model runner, so any connector fits.

The toy model's KV of a token is a hash of the whole prefix up to it, and its next token is a function of that hash. So
what every block must hold is known, and before each forward pass the toy checks all that attention would read: one
wrong byte, one block reused too early or loaded into the wrong place, and `step` fails.
"""

from __future__ import annotations

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
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.processes import wait_for
from tests.vllm_plugin.conftest import BLOCK_TOKENS, TINY
from tests.vllm_plugin.support import cache_config, make_request
from tests.vllm_plugin.toy_cache import Tables, ToyCache, Wrong, config_of_rank
from vllm_plugin import register
from vllm_plugin.metrics import KVPoolStats
from vllm_plugin.scheduler import KVPoolScheduler
from vllm_plugin.worker import KVPoolWorker

MakeConnector = Callable[[VllmConfig, KVConnectorRole, KVCacheConfig], KVConnectorBase_V1]
create_connector: MakeConnector = KVConnectorFactory.create_connector  # Engines patch it while they start.
_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1


class Sequences:
    """The toy model: tokens and prefix hashes of one request. Other weights give other hashes."""

    def __init__(self, prompt: Sequence[int], weights: int = 1):
        self._weights = weights
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        before = self.hashes[-1] if self.hashes else self._weights
        self.tokens.append(token)
        self.hashes.append(((before ^ token) * _MULTIPLIER + 1442695040888963407) & _MASK)

    def next_token(self) -> int:
        return 3 + (self.hashes[-1] >> 33) % (TINY.vocab - 3)


def answer(prompt: Sequence[int], max_tokens: int, weights: int = 1) -> list[int]:
    """What the toy model answers, cold or warm."""
    model = Sequences(prompt, weights)
    for _ in range(max_tokens):
        model.append(model.next_token())
    return model.tokens[len(prompt) :]


@contextmanager
def as_rank(tp_rank: int, tp_size: int, stage: int = 0) -> Iterator[None]:
    """What a worker's process knows of its place among the ranks."""
    with (
        patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=tp_rank, world_size=tp_size)),
        patch.object(parallel_state, "_PP", SimpleNamespace(rank_in_group=stage)),
    ):
        yield


class Rank:
    """One rank: its part of the KV cache, and the connector's worker side, which is there first."""

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
        worker: KVPoolWorker = self.connector._of_worker  # type: ignore[attr-defined]
        return worker

    def forward_context(self, forward: bool) -> ForwardContext:
        """What hooks are told of a step's forward pass; a step without one has no attention metadata."""
        layers = {name: SimpleNamespace(kv_cache=kv) for name, kv in self.cache.layers.items()}
        attention = {name: SimpleNamespace() for name in layers} if forward else None
        return ForwardContext(no_compile_layers=layers, attn_metadata=attention, slot_mapping={})


class ToyEngine:
    """See the module.

    Args:
        num_blocks: of the engine's KV cache, the null block among them.
        steps_ahead: steps that are scheduled before the first one's outcome is known; 1 is asynchronous scheduling.
        wait: whether to wait until every side has reached the pool; for a `KVPoolConnector`.
        make: constructs the connector's sides; what the configuration names by default.
        specs: of the model's KV-cache groups, with all heads; one full-attention group by default.
        num_stages: of the pipeline.
    """

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int = 64,
        tp_size: int = 1,
        steps_ahead: int = 0,
        wait: bool = True,
        make: MakeConnector = create_connector,
        specs: Sequence[KVCacheSpec] = (),
        num_stages: int = 1,
    ):
        register()
        whole = cache_config(*specs, num_blocks=num_blocks)
        config.cache_config.num_gpu_blocks = num_blocks
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
        self.ranks = [
            Rank(config, whole, make, tp_rank, stage) for stage in range(num_stages) for tp_rank in range(tp_size)
        ]
        told = {(rank.stage, rank.tp_rank): rank.connector.get_handshake_metadata() for rank in self.ranks}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {ranks: metadata for ranks, metadata in told.items() if metadata is not None}
        )
        self.num_blocks = num_blocks
        self.stats = KVPoolStats()
        self.weights = 1
        self.answers: dict[str, list[int]] = {}
        self.cached_tokens: dict[str, int] = {}
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, len(self.ranks))
        self._sequences: dict[str, Sequences] = {}
        self._steps_ahead = steps_ahead
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        if wait:
            self.wait_until_connected()

    @property
    def connector(self) -> KVPoolScheduler:
        """Of a `KVPoolConnector`."""
        side: KVPoolScheduler = self.scheduler.connector._of_scheduler
        return side

    def wait_until_connected(self) -> None:
        sessions = [*self.connector._sessions, *(rank.worker._session for rank in self.ranks)]
        wait_for(lambda: all(session.namespace for session in sessions), "connections to the pool")

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        request = make_request(request_id, prompt, max_tokens, **options)
        self._sequences[request_id] = Sequences(prompt, self.weights)
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return request

    def run(self, deadline_s: float = 30.0) -> None:
        """Steps until every request has its answer, and every block is free again."""
        ends_at = time.monotonic() + deadline_s
        while self.scheduler.has_requests():
            assert time.monotonic() < ends_at, (
                f"the engine is not done within {deadline_s} s: {self.scheduler.requests}"
            )
            if not self.step():
                time.sleep(0.001)

    def generate(self, *prompts: Sequence[int], max_tokens: int = 8, **options: Any) -> list[list[int]]:
        """Answers to prompts that are submitted together; `cached_tokens[i]` says how much was not computed."""
        ids = [f"prompt-{idx}" for idx in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, max_tokens, **options)
        self.run()
        return [self.answers[request_id] for request_id in ids]

    def step(self) -> int:
        """One step; returns how many tokens were computed."""
        scheduled = self.scheduler.schedule()
        tables = {
            request_id: self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for request_id in scheduled.num_scheduled_tokens
        }
        self._in_flight.append((scheduled, self._execute(scheduled, tables)))
        ahead = self._steps_ahead if scheduled.num_scheduled_tokens else 0
        while len(self._in_flight) > ahead:
            self._update(*self._in_flight.popleft())
        return scheduled.total_num_scheduled_tokens

    def num_used_blocks(self) -> int:
        """Blocks with a reference; the null block is not counted."""
        return self.num_blocks - 1 - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def counted(self, name: str) -> Any:
        """A counter of the connector, over the engine's life."""
        return self.stats.data.get(name, 0)

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def _execute(self, scheduled: SchedulerOutput, tables: dict[str, list[int]]) -> ModelRunnerOutput:
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in scheduled.num_scheduled_tokens:
            self.cached_tokens.setdefault(request_id, computed[request_id])
        metadata = pickle.dumps(scheduled.kv_connector_metadata)
        hooked = []
        for rank in self.ranks:
            with rank:
                hooked.append(self._run_rank(rank, scheduled, pickle.loads(metadata), computed, tables))
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [
            self._sample(request_id, computed[request_id] + scheduled.num_scheduled_tokens[request_id])
            for request_id in ids
        ]
        outputs = []
        for connector_output in hooked:
            output = ModelRunnerOutput(ids, {request_id: idx for idx, request_id in enumerate(ids)}, sampled)
            output.kv_connector_output = connector_output
            outputs.append(output)
        merged = self._aggregator.aggregate(pickle.loads(pickle.dumps(outputs)))
        assert merged is not None
        return merged

    def _run_rank(
        self,
        rank: Rank,
        scheduled: SchedulerOutput,
        metadata: Any,
        computed: Mapping[str, int],
        tables: Mapping[str, Tables],
    ) -> KVConnectorOutput:
        """One rank's step: the hooks and the forward pass in the order of vLLM's model runner."""
        connector = rank.connector
        context = rank.forward_context(bool(scheduled.num_scheduled_tokens))
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(context)
        if scheduled.num_scheduled_tokens:
            for layer in rank.cache.layers:
                connector.wait_for_layer_load(layer)
            for request_id, count in scheduled.num_scheduled_tokens.items():
                self._forward(rank, request_id, tables[request_id], computed[request_id], count)
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

    def _forward(self, rank: Rank, request_id: str, tables: Tables, start: int, count: int) -> None:
        model = self._sequences[request_id]
        stop = start + count
        assert stop <= len(model.tokens), "the scheduler wants a token computed that nobody has sampled"
        for wrong in rank.cache.wrong(tables, model.hashes, start):
            self._found_wrong(rank, request_id, wrong)
        rank.cache.write(tables, model.hashes, start, stop)

    def _found_wrong(self, rank: Rank, request_id: str, wrong: Wrong) -> None:
        raise AssertionError(f"{request_id}: attention reads KV that is not of its prefix: {wrong}")

    def _sample(self, request_id: str, stop: int) -> list[int]:
        model = self._sequences[request_id]
        if stop < len(model.tokens):
            return []
        token = model.next_token()
        model.append(token)
        return [token]

    def _update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.answers[one.request_id].extend(one.new_token_ids)
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self._count(outputs.scheduler_stats.kv_connector_stats)

    def _count(self, stats: dict[str, Any]) -> None:
        self.stats.aggregate(KVPoolStats(stats))
