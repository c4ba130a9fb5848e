"""The toy engine with a contract around its connector, and checks of who reads and writes its memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from tests.conformance.checked import SCHEDULER, Checked
from tests.conformance.contract import Contract
from tests.conformance.ownership import Ownership
from tests.support.toy.cache import Wrong
from tests.support.toy.engine import Rank, ToyEngine, create_connector
from tests.support.toy.model import Chunk, answer
from tests.support.vllm_objects import full_attention


class HaltedError(Exception):
    """The engine cannot go on; the contract says why."""


class CheckedEngine(ToyEngine):
    """Notes every failure in the contract instead of raising it; `HaltedError` alone is raised.

    Args:
        hook_limit_s: how long a hook may take.
        drain_limit_s: how long requests may take to end.
        toy: options of `ToyEngine`.
    """

    def __init__(self, config: VllmConfig, hook_limit_s: float = 5.0, drain_limit_s: float = 30.0, **toy: Any):
        self._hook_limit_s, self._drain_limit_s = hook_limit_s, drain_limit_s
        specs = toy.get("specs") or (full_attention(),)
        self.contract = Contract([spec.block_size for spec in specs], num_ranks=toy.get("tp_size", 1))
        self._ownership = Ownership(self.contract)
        self._num_ranks = 0
        super().__init__(config, wait=False, make=self._make, **toy)
        self._ownership.attach(self.scheduler.kv_cache_manager.block_pool, self.ranks)
        self._prompts: dict[str, tuple[Sequence[int], int]] = {}
        self.steps(2)  # What idle steps look like before anything has happened.

    def _make(self, config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> KVConnectorBase_V1:
        connector = create_connector(config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = connector
            return Checked(connector, self._ownership, SCHEDULER, self._hook_limit_s)
        self._num_ranks += 1
        return Checked(connector, self._ownership, self._num_ranks - 1, self._hook_limit_s)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
        self._prompts[request_id] = (prompt, max_tokens)
        self.cached_tokens.pop(request_id, None)
        self.contract.added(request_id)
        return super().add(request_id, prompt, max_tokens, **options)

    def abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._prompts.pop(request_id, None)
                self.contract.aborted(request_id, request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
        self._guard(super().abort, *request_ids)

    def step(self) -> int:
        self.contract.step += 1
        computed: int = self._guard(super().step)
        self.contract.reached["preempted"] = len(self.preempted)
        self.contract.stepped(sum(self._ownership.pins.values()), self._scheduler_side.has_pending_push_work())
        return computed

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        """Steps until all requests have ended, takes two idle steps, and judges the engine's state."""
        contract = self.contract
        try:
            self.step_until(lambda: not self.scheduler.has_requests(), "requests to end", self._drain_limit_s)
        except AssertionError as too_late:
            contract.ended()
            if self.scheduler.requests:
                contract.broke("every-request-ends", sorted(self.scheduler.requests))
            else:
                contract.broke("an-idle-engine-has-no-pending-push-work", "no request is left")
            raise HaltedError("stuck") from too_late
        self.steps(2)
        for request_id, (prompt, max_tokens) in self._prompts.items():
            if self.answers[request_id] != answer(prompt, max_tokens, self.weights):
                contract.broke("every-request-is-answered", f"{request_id} has not the answer of the model")
        self._prompts.clear()
        contract.ended()
        if self.num_used_blocks() or self._ownership.pins:
            held = f"{self.num_used_blocks()} blocks, references {self._ownership.pins}"
            contract.broke("a-drained-engine-has-no-block-in-use", held)
        if not self.scheduler.reset_prefix_cache():
            contract.broke("a-drained-engine-can-reset-its-cache", "reset_prefix_cache() failed")

    def ask(self, *prompts: Sequence[int], max_tokens: int = 8) -> list[int]:
        """Runs prompts together; returns how many tokens of each were not computed."""
        ids = [f"ask-{self.contract.step}-{idx}" for idx in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, max_tokens)
        self.drain()
        return [self.cached_tokens.get(request_id, 0) for request_id in ids]

    def shutdown(self) -> None:
        for _ in range(2):
            with suppress(Exception):  # The contract has it.
                super().shutdown()

    def _guard(self, act: Any, *args: Any) -> Any:
        try:
            return act(*args)
        except Exception as error:
            self.contract.broke("engine-survives", f"{type(error).__name__}: {error}")
            raise HaltedError("crashed") from error

    def forward(self, rank: Rank, request_id: str, chunk: Chunk) -> None:
        self._ownership.forward_begins(rank.tp_rank)
        super().forward(rank, request_id, chunk)
        self._ownership.forward_ended(rank.tp_rank)

    def found_wrong(self, rank: Rank, request_id: str, wrong: Wrong) -> None:
        self._ownership.read_wrong(request_id, wrong)
        wrong.mend()

    def count_stats(self, stats: dict[str, Any]) -> None:
        """Ignores the numbers: any connector may have its own."""
