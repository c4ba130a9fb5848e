"""What waits for the device: prompt tokens of requests that wait, load or run, as far as vLLM tells the connector."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

SHARE_DECAY = 0.95
"""Of the share of prompts that is computed, for each prompt that is admitted."""


class Stage(enum.Enum):
    """Where a request is on its way to its first token."""

    WAITING = "arrived, and without blocks"
    LOADING = "the rest is computed once its load has ended"
    RUNNING = "computed in the order of arrival"


class PrefillQueue:
    """Prompt tokens of an engine that are not computed yet, by the stage of their request.

    Attributes:
        tokens: still to be computed, by stage; of waiting requests all, since their hits are not known.
        computed_share: of the tokens of prompts, how many were computed lately.
    """

    def __init__(self) -> None:
        self._left: dict[Stage, dict[str, tuple[Request, int]]] = {stage: {} for stage in Stage}
        self._new: dict[str, Request] = {}  # They wait, and `next_waiting` has not returned them.
        self.tokens = dict.fromkeys(Stage, 0)
        self.computed_share = 1.0

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def put(self, request: Request, stage: Stage, num_there: int = 0) -> None:
        """A request is in another stage, or has the KV of more tokens; once all is there it leaves."""
        self.drop(request.request_id)
        if (num_tokens := request.num_tokens - num_there) > 0:
            self._left[stage][request.request_id] = request, num_tokens
            self.tokens[stage] += num_tokens
            if stage is Stage.WAITING:
                self._new[request.request_id] = request

    def drop(self, request_id: str) -> None:
        """A request has ended, or is about to be in another stage."""
        self._new.pop(request_id, None)
        for stage, left in self._left.items():
            if request_id in left:
                self.tokens[stage] -= left.pop(request_id)[1]

    def next_waiting(self) -> Request | None:
        """The oldest request that waits and was not returned before; None: there is none."""
        return self._new.pop(next(iter(self._new))) if self._new else None

    def admitted(self, request: Request, local: int, num_loaded: int) -> None:
        """A request was given blocks: of its tokens, what is neither `local` nor loaded is computed."""
        there = request.num_computed_tokens  # None, unless a load has ended.
        if not there:
            there = local + num_loaded
            share = 1 - there / request.num_tokens
            self.computed_share += (1 - SHARE_DECAY) * (share - self.computed_share)
        self.put(request, Stage.LOADING if num_loaded else Stage.RUNNING, there)

    def step(self, scheduled: Mapping[str, int]) -> int:
        """A step computes so many tokens of each request; returns how many of them are of prompts."""
        num_prefill, running = 0, self._left[Stage.RUNNING]
        for request_id in running.keys() & scheduled.keys():
            request, count = running[request_id][0], scheduled[request_id]
            # What vLLM says is there, not what it was admitted with: another connector may have loaded a part.
            num_prefill += min(count, request.num_tokens - request.num_computed_tokens)
            self.put(request, Stage.RUNNING, request.num_computed_tokens + count)
        return num_prefill

    def behind(self, request_id: str) -> tuple[int, float]:
        """(requests, tokens to be computed) behind one that is about to be admitted."""
        waiting = self._left[Stage.WAITING]
        own = waiting[request_id][1] if request_id in waiting else 0
        num_requests = len(waiting) - (own > 0) + len(self._left[Stage.LOADING])
        return num_requests, self.computed_share * (self.tokens[Stage.WAITING] - own) + self.tokens[Stage.LOADING]
