"""Looks up requests before vLLM asks about them, so that the pool's answer is there when it does.

Without it a hit waits for a step of the engine: vLLM asks about a request within a step, does not wait for an answer,
and asks again with the next step, 0.3 s later where prefill is busy.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.admission import Admission
from vllm_plugin.scheduler.prefill_queue import PrefillQueue
from vllm_plugin.scheduler.request_spans import RequestSpans
from vllm_plugin.scheduler.step_budget import StepBudget

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

MAX_STEPS = 4
"""Requests are looked up ahead until they ask for what so many full steps compute. What they find is leased while they
wait, and a small pool has nothing else to evict."""


class LookAhead:
    """Looks up waiting requests, except those with adapters: the names of their blocks may change until vLLM asks."""

    def __init__(
        self,
        geometry: Geometry,
        admission: Admission,
        queue: PrefillQueue,
        budget: StepBudget,
        spans: RequestSpans,
    ):
        self._geometry = geometry
        self._admission = admission
        self._queue = queue
        self._budget = budget
        self._spans = spans
        self._block_pool: BlockPool | None = None
        first = geometry.groups[0]
        is_cached_by_hash = first.kind.block_tokens == geometry.names.hash_tokens
        needs_all = all(group.kind.needs_prefix for group in geometry.groups)
        self._members = list(first.members) if is_cached_by_hash and needs_all else []

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def go_on(self) -> None:
        """Looks up the oldest requests that wait, as far as the step's budget reaches."""
        most = MAX_STEPS * self._geometry.step_tokens
        candidates = self._admission.candidates
        ahead = sum(each.lookup.limit - each.lookup.local for each in candidates.values())
        while ahead < most and self._budget.may_begin and (request := self._queue.next_waiting()) is not None:
            if request.lora_request is None and request.request_id not in candidates:
                local, limit = self._own_tokens(request), self._geometry.hit_limit(request.num_tokens)
                if local < limit and not request.skip_reading_prefix_cache:
                    self._spans.asked(request)
                    self._admission.look_up(request, local, limit)
                    ahead += limit - local

    def _own_tokens(self, request: Request) -> int:
        """About how many tokens the engine has itself: where vLLM finds fewer, the request is looked up again."""
        pool = self._block_pool
        if pool is None or not self._members:
            return 0
        hashes = request.block_hashes
        # vLLM evicts the end of a prefix first: what is cached is a prefix, almost always.
        num_cached = bisect.bisect(hashes, False, key=lambda each: pool.get_cached_block(each, self._members) is None)
        alignment = self._geometry.alignment
        return num_cached * self._geometry.names.hash_tokens // alignment * alignment
