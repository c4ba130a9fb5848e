"""A toy engine: vLLM's real scheduler and both sides of the connector around a model that needs no weights.

The toy model's KV of a token is a hash of the whole prefix up to it, and its next token is a function of that hash. So
what every block must hold is known, and before each forward pass the toy checks all that attention would read: one
wrong byte, one block reused too early or loaded into the wrong place, and `step` fails.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.processes import wait_for
from tests.vllm_plugin.conftest import BLOCK_TOKENS, TINY
from tests.vllm_plugin.support import LAYERS, cache_config, make_request, of_rank
from vllm_plugin import register
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import KVPoolStats
from vllm_plugin.scheduler import KVPoolScheduler
from vllm_plugin.worker import KVPoolWorker

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1


class Sequences:
    """The toy model: tokens and prefix hashes of one request."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        before = self.hashes[-1] if self.hashes else 1
        self.tokens.append(token)
        self.hashes.append(((before ^ token) * _MULTIPLIER + 1442695040888963407) & _MASK)

    def next_token(self) -> int:
        return 3 + (self.hashes[-1] >> 33) % (TINY.vocab - 3)


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the toy model answers, cold or warm."""
    model = Sequences(prompt)
    for _ in range(max_tokens):
        model.append(model.next_token())
    return model.tokens[len(prompt) :]


class Rank:
    """One tensor-parallel rank: its part of the KV cache, and the connector's worker side."""

    def __init__(self, config: VllmConfig, num_blocks: int, tp_rank: int, tp_size: int):
        kv_cache_config = of_rank(cache_config(num_blocks=num_blocks), tp_size)
        self.heads = kv_cache_config.kv_cache_groups[0].kv_cache_spec.num_kv_heads
        replicas = max(1, tp_size // TINY.kv_heads)
        self._first_head = (tp_rank // replicas) * self.heads
        # [L, B, H, N, C]: float32 and int32 are of one size, and integers compare exactly.
        self.kv = torch.full((len(LAYERS), num_blocks, self.heads, BLOCK_TOKENS, 2 * TINY.head_dim), -1).int()
        extra = ConnectorConfig.parse(config.kv_transfer_config.kv_connector_extra_config)
        self.worker = KVPoolWorker(config, kv_cache_config, extra, tp_rank)
        self.worker.register_kv_caches(dict(zip(LAYERS, self.kv, strict=True)))

    def expected(self, hashes: Sequence[int]) -> torch.Tensor:
        """What the cache must hold for some tokens: int32 [L, tokens, H, C]."""
        layer, head, column = np.ogrid[0 : len(LAYERS), 0 : self.heads, 0 : 2 * TINY.head_dim]
        place = (layer * 7919 + (head + self._first_head) * 104729 + column * 31 + 1).astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = np.asarray(hashes, np.uint64)[None, :, None, None] * (2 * place[:, None] + 1)
        return torch.from_numpy((mixed >> np.uint64(33)).astype(np.int32))

    def cells(self, block_ids: Sequence[int], first: int, stop: int) -> tuple[Any, ...]:
        """Index of tokens [first, stop) of a request."""
        positions = torch.arange(first, stop)
        return (slice(None), torch.tensor(block_ids)[positions // BLOCK_TOKENS], slice(None), positions % BLOCK_TOKENS)


class ToyEngine:
    """See the module.

    Args:
        num_blocks: of the engine's KV cache, the null block among them.
        steps_ahead: steps that are scheduled before the first one's outcome is known; 1 is asynchronous scheduling.
        wait: whether to wait until every side has reached the pool.
    """

    def __init__(
        self, config: VllmConfig, num_blocks: int = 64, tp_size: int = 1, steps_ahead: int = 0, wait: bool = True
    ):
        register()
        config.cache_config.num_gpu_blocks = num_blocks
        config.parallel_config.tensor_parallel_size = tp_size
        config.parallel_config.world_size = tp_size
        config.scheduler_config.async_scheduling = steps_ahead > 0
        scheduler_cls = AsyncScheduler if steps_ahead else Scheduler
        self.scheduler = scheduler_cls(
            config,
            of_rank(cache_config(num_blocks=num_blocks), tp_size),
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        # The core sets it for overlapping batches; a toy with one executor has to say so itself.
        self.scheduler.defer_block_free = steps_ahead > 0 and config.kv_transfer_config.is_kv_consumer
        self.connector: KVPoolScheduler = self.scheduler.connector._of_scheduler
        self.ranks = [Rank(config, num_blocks, tp_rank, tp_size) for tp_rank in range(tp_size)]
        self.num_blocks = num_blocks
        self.stats = KVPoolStats()
        self.answers: dict[str, list[int]] = {}
        self.cached_tokens: dict[str, int] = {}
        self._aggregator = KVOutputAggregator(tp_size)
        self._sequences: dict[str, Sequences] = {}
        self._steps_ahead = steps_ahead
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        if wait:
            self.wait_until_connected()

    def wait_until_connected(self) -> None:
        sessions = [self.connector._session, *(rank.worker._session for rank in self.ranks)]
        wait_for(lambda: all(session.namespace for session in sessions), "connections to the pool")

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        request = make_request(request_id, prompt, max_tokens, **options)
        self._sequences[request_id] = Sequences(prompt)
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
            request_id: self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
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
            rank.worker.shutdown()

    def _execute(self, scheduled: SchedulerOutput, tables: dict[str, list[int]]) -> ModelRunnerOutput:
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            sampled.append(self._forward(request_id, tables[request_id], computed[request_id], count))
            self.cached_tokens.setdefault(request_id, computed[request_id])
        metadata = pickle.dumps(scheduled.kv_connector_metadata)
        outputs = []
        for rank in self.ranks:
            ids = list(scheduled.num_scheduled_tokens)
            output = ModelRunnerOutput(ids, {request_id: idx for idx, request_id in enumerate(ids)}, sampled)
            output.kv_connector_output = self._connector_hooks(rank.worker, pickle.loads(metadata))
            outputs.append(output)
        merged = self._aggregator.aggregate(pickle.loads(pickle.dumps(outputs)))
        assert merged is not None
        return merged

    def _forward(self, request_id: str, block_ids: list[int], start: int, count: int) -> list[int]:
        model = self._sequences[request_id]
        stop = start + count
        assert stop <= len(model.tokens), "the scheduler wants a token computed that nobody has sampled"
        for rank in self.ranks:
            read = rank.kv[rank.cells(block_ids, 0, start)]
            # Indexing puts the gathered axis first where a slice divides the indices: [tokens, L, H, C].
            wanted = rank.expected(model.hashes[:start]).transpose(0, 1)
            assert torch.equal(read, wanted), f"{request_id}: attention reads KV that is not of its prefix"
            rank.kv[rank.cells(block_ids, start, stop)] = rank.expected(model.hashes[start:stop]).transpose(0, 1)
        if stop < len(model.tokens):
            return []
        token = model.next_token()
        model.append(token)
        return [token]

    @staticmethod
    def _connector_hooks(worker: KVPoolWorker, metadata: Any) -> KVConnectorOutput:
        """In the order of vLLM's model runner, after the forward pass."""
        worker.start_loads(metadata)
        worker.start_stores(metadata)
        results = worker.transfer_results()
        return KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=worker.stats(),
            kv_connector_worker_meta=worker.worker_metadata(),
        )

    def _update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.answers[one.request_id].extend(one.new_token_ids)
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.aggregate(KVPoolStats(outputs.scheduler_stats.kv_connector_stats))
