"""What waits for the device: prompt tokens of requests that wait, load or run, as far as vLLM tells the connector."""

from __future__ import annotations

import enum
from collections.abc import Mapping

SHARE_DECAY = 0.95
"""Of the share of prompts that is computed, for each prompt that is admitted."""


class Stage(enum.Enum):
    """Where a request is on its way to its first token."""

    WAITING = "arrived, and without blocks"
    LOADING = "the rest is computed once its load has ended"
    RUNNING = "computed in the order of arrival"


class PrefillQueue:
    """One engine's.

    Attributes:
        tokens: still to be computed, by stage; of waiting requests all, since their hits are not known.
        computed_share: of the tokens of prompts, how many were computed lately.
    """

    def __init__(self) -> None:
        self._left: dict[Stage, dict[str, int]] = {stage: {} for stage in Stage}
        self.tokens = dict.fromkeys(Stage, 0)
        self.computed_share = 1.0

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def put(self, request_id: str, stage: Stage, num_tokens: int) -> None:
        """A request is in another stage, or has another number of tokens to compute; without any it has left."""
        self.drop(request_id)
        if num_tokens > 0:
            self._left[stage][request_id] = num_tokens
            self.tokens[stage] += num_tokens

    def drop(self, request_id: str) -> None:
        """A request has ended, or is about to be in another stage."""
        for stage, left in self._left.items():
            self.tokens[stage] -= left.pop(request_id, 0)

    def admitted(self, num_tokens: int, num_computed: int) -> None:
        """Of a prompt's tokens so many are neither loaded nor cached."""
        self.computed_share += (1 - SHARE_DECAY) * (num_computed / max(1, num_tokens) - self.computed_share)

    def step(self, scheduled: Mapping[str, int]) -> int:
        """A step computes so many tokens of each request; how many of them are of prompts."""
        before = self.tokens[Stage.RUNNING]
        for request_id in self._left[Stage.RUNNING].keys() & scheduled.keys():
            self.put(request_id, Stage.RUNNING, self._left[Stage.RUNNING][request_id] - scheduled[request_id])
        return before - self.tokens[Stage.RUNNING]

    def behind(self, request_id: str) -> tuple[int, float]:
        """(requests, tokens to be computed) behind one that is about to be admitted."""
        waiting, own = self._left[Stage.WAITING], self._left[Stage.WAITING].get(request_id, 0)
        num_requests = len(waiting) - (own > 0) + len(self._left[Stage.LOADING])
        return num_requests, self.computed_share * (self.tokens[Stage.WAITING] - own) + self.tokens[Stage.LOADING]
