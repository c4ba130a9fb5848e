"""Why prompt tokens are computed: each of them has one cause, and the sums agree with vLLM's own counter.

vLLM counts the tokens that a request computes when it gives its first output, by what it was admitted with
(`Request.prefill_stats`). The causes are noted at the same time, and counted with the step that ends the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpool.protocol.reports import Cause
from kvpool.protocol.types import MissCause
from vllm_plugin.metrics import CAUSE_PREFIX, Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.scheduler.lookups import RequestLookup
from vllm_plugin.scheduler.request_spans import RequestSpans

if TYPE_CHECKING:
    from vllm.v1.request import Request


_OF_SERVER = {cause: Cause[cause.name] for cause in MissCause}


class ComputedTokens:
    """Notes the causes of the computed tokens of each prompt; counts them, also in its span, when the prompt ends."""

    def __init__(self, geometry: Geometry, recorder: Recorder, spans: RequestSpans):
        self._spans = spans
        self._geometry = geometry
        self._kinds = [group.kind for group in geometry.groups]
        self._recorder = recorder
        self._why: dict[str, Cause] = {}
        self._prompts: dict[str, tuple[Request, Counter[Cause]]] = {}

    def __len__(self) -> int:
        return len(self._prompts) + len(self._why)

    def because(self, request: Request, cause: Cause | None) -> None:
        """What keeps a request, by the newest question about it, from asking or from taking what it is told."""
        if cause is None:
            self._why.pop(request.request_id, None)
        else:
            self._why[request.request_id] = cause

    def admitted(self, request: Request, lookup: RequestLookup | None) -> None:
        """A request was given blocks.

        Args:
            lookup: whose answer vLLM takes, or a part of it, or nothing; None if there was none.
        """
        why = self._why.pop(request.request_id, None)
        stats = request.prefill_stats
        # A load that has ended is admitted again, with what it has loaded; a preempted request was counted before.
        if stats is None or request.num_computed_tokens > 0 or request.num_preemptions > 0:
            return
        num_tokens = stats.num_prompt_tokens
        at = num_tokens - stats.num_computed_tokens
        causes: Counter[Cause] = Counter()
        limit = max(at, self._geometry.hit_limit(num_tokens))
        for cause, stop in self._misses(lookup, why, limit):
            if stop > at:
                causes[cause] += min(stop, limit) - at
                at = min(stop, limit)
        causes[Cause.LAST_BLOCK] += num_tokens - at
        self._prompts[request.request_id] = request, causes

    def _misses(self, lookup: RequestLookup | None, why: Cause | None, limit: int) -> Iterator[tuple[Cause, int]]:
        """Causes in the order of the prompt, each with the token before which it ends; the last one ends at `limit`."""
        prefix = None if lookup is None else self._shortest_prefix(lookup)
        if prefix is None:
            yield why or (Cause.LOOKUP_FAILED if lookup is None or not lookup.answers else Cause.WINDOW_OR_STATE), limit
            return
        assert lookup is not None
        idx, stage = prefix
        block_tokens, first = self._kinds[idx].block_tokens, lookup.firsts[idx]
        hits = lookup.answers[stage].hits[idx]
        at = first + hits.num_leading
        yield why or Cause.WINDOW_OR_STATE, at * block_tokens
        if hits.num_pending:
            yield Cause.IN_TIER, (at + hits.num_pending) * block_tokens
        for miss in hits.missing:
            at += miss.count
            yield _OF_SERVER[miss.cause], at * block_tokens
        yield why or Cause.NEVER_STORED, limit

    def _shortest_prefix(self, lookup: RequestLookup) -> tuple[int, int] | None:
        """(group, stage) where the stored prefix ends first; None if no group needs its prefix, or without answers."""
        ends = [
            ((lookup.firsts[idx] + answer.hits[idx].num_leading) * kind.block_tokens, idx, stage)
            for idx, kind in enumerate(self._kinds)
            if kind.needs_prefix
            for stage, answer in enumerate(lookup.answers)
        ]
        return min(ends)[1:] if ends else None

    def step(self, scheduled: dict[str, int]) -> None:
        """A step computes so many tokens of each request: those are counted whose prompts end."""
        if not self._prompts:
            return
        for request_id in self._prompts.keys() & scheduled.keys():
            request, causes = self._prompts[request_id]
            if request.num_computed_tokens + scheduled[request_id] >= request.num_prompt_tokens:
                del self._prompts[request_id]
                self._recorder.tally("num_requests")
                for cause, count in causes.items():
                    self._recorder.add(f"{CAUSE_PREFIX}{cause.label}", count)
                self._spans.prompt_ended(request, causes)

    def finished(self, request_id: str) -> None:
        """A request has ended; one that gave no output is not counted, as vLLM does not count it."""
        self._why.pop(request_id, None)
        self._prompts.pop(request_id, None)
