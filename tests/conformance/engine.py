"""The toy engine with a recorder before its connector, and checks of who reads and writes its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.conformance.ownership import Ownership
from tests.conformance.recorder import SCHEDULER, WORKER, Recorder, Recording
from tests.support.toy.cache import Wrong
from tests.support.toy.engine import Rank, ToyEngine, create_connector
from tests.support.toy.model import Chunk, answer
from tests.support.vllm_objects import full_attention


class HaltedError(Exception):
    """The engine cannot go on; the recording says why."""


class RecordedEngine(ToyEngine):
    """Notes every failure in one recording instead of raising it; `HaltedError` alone is raised.

    Args:
        hook_limit_s: how long a hook may take.
        drain_limit_s: how long requests may take to end.
        toy: options of `ToyEngine`.
    """

    def __init__(self, config: VllmConfig, hook_limit_s: float = 5.0, drain_limit_s: float = 30.0, **toy: Any):
        self._drain_limit_s = drain_limit_s
        self.recording = Recording(hook_limit_s, world_size=toy.get("tp_size", 1))
        specs = toy.get("specs") or (full_attention(),)
        self.recording.num_groups = len(specs)
        self._ownership = Ownership(self.recording, [spec.block_size for spec in specs])
        self._recorder = Recorder(self.recording, self._ownership)
        self._num_ranks = 0
        super().__init__(config, wait=False, make=self._make, **toy)
        self._ownership.attach(self.scheduler.kv_cache_manager.block_pool, self.ranks)
        self._prompts: dict[str, tuple[Sequence[int], int]] = {}
        self.steps(2)  # What idle steps look like before anything has happened.

    def _make(self, config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> KVConnectorBase_V1:
        connector = create_connector(config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = connector
            return self._recorder.wrap(connector, SCHEDULER)
        self._num_ranks += 1
        return self._recorder.wrap(connector, WORKER, self._num_ranks - 1)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        self._prompts[request_id] = (prompt, max_tokens)
        self.cached_tokens.pop(request_id, None)
        self.recording.note("added", request_id=request_id)
        return super().add(request_id, prompt, max_tokens, **options)

    def abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._prompts.pop(request_id, None)
                loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                self.recording.note("aborted", request_id=request_id, loading=loading)
        self._guard(super().abort, *request_ids)

    def step(self) -> int:
        self.recording.step += 1
        num_preempted = len(self.preempted)
        computed: int = self._guard(super().step)
        for request_id in self.preempted[num_preempted:]:
            self.recording.note("preempted", request_id=request_id)
        pins = sum(self._ownership.pins.values())
        if pins:
            self.recording.note("holds", pins=pins, pending=self._scheduler_side.has_pending_push_work())
        return computed

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        """Steps until all requests have ended, takes two idle steps, and notes the engine's state."""
        try:
            self.step_until(lambda: not self.scheduler.has_requests(), "requests to end", self._drain_limit_s)
        except AssertionError as too_late:
            unfinished = sorted(name for name, one in self.scheduler.requests.items() if not one.is_finished())
            held = sorted(name for name, one in self.scheduler.requests.items() if one.is_finished())
            self.recording.note("stuck", unfinished=tuple(unfinished), held=tuple(held))
            raise HaltedError("stuck") from too_late
        self.steps(2)
        self._judge_answers()
        used = self.num_used_blocks()
        pool = self.scheduler.kv_cache_manager.block_pool
        self.recording.note(
            "drained",
            used=used,
            pins=dict(self._ownership.pins),
            cleared=self.scheduler.reset_prefix_cache(),
            null_references=pool.null_block.ref_cnt,
        )

    def ask(self, *prompts: Sequence[int], max_tokens: int = 8) -> list[int]:
        """Runs prompts together; returns how many tokens of each were not computed."""
        ids = [f"ask-{self.recording.step}-{idx}" for idx in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, max_tokens)
        self.drain()
        return [self.cached_tokens.get(request_id, 0) for request_id in ids]

    def shutdown(self) -> None:
        for _ in range(2):
            with suppress(Exception):  # It is in the recording.
                super().shutdown()

    def _judge_answers(self) -> None:
        for request_id, (prompt, max_tokens) in self._prompts.items():
            if self.answers[request_id] != answer(prompt, max_tokens, self.weights):
                self.recording.note("wrong-answer", request_id=request_id)
        self._prompts.clear()

    def _guard(self, act: Any, *args: Any) -> Any:
        try:
            return act(*args)
        except Exception as error:
            self.recording.note("crashed", error=f"{type(error).__name__}: {error}")
            raise HaltedError("crashed") from error

    def run_rank(
        self,
        rank: Rank,
        scheduled: SchedulerOutput,
        metadata: Any,
        chunks: Mapping[str, Chunk],
    ) -> KVConnectorOutput:
        bind = rank.connector.bind_connector_metadata

        def bind_and_mark(metadata: Any) -> None:
            # The last moment before the step writes, and the first one after preemptions were handled.
            bind(metadata)
            self._ownership.mark_new_blocks(rank.tp_rank)

        rank.connector.bind_connector_metadata = bind_and_mark
        try:
            return super().run_rank(rank, scheduled, metadata, chunks)
        finally:
            rank.connector.bind_connector_metadata = bind

    def forward(self, rank: Rank, request_id: str, chunk: Chunk) -> None:
        self._ownership.forward_begins(rank.tp_rank)
        super().forward(rank, request_id, chunk)
        self._ownership.forward_ended(rank.tp_rank)

    def found_wrong(self, rank: Rank, request_id: str, wrong: Wrong) -> None:
        why = self._ownership.explain(wrong)
        self.recording.note(f"read-{why}", request_id=request_id, rank=rank.tp_rank)
        wrong.mend()

    def count_stats(self, stats: dict[str, Any]) -> None:
        """Ignores the numbers: any connector may have its own."""
