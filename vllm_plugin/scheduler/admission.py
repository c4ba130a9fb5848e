"""Decides, each time that vLLM asks, how many tokens of a request are loaded: a hit, none, or "ask again".

The path of a question goes one way, each step asked once:

  1. `lookups`: what does the pool have?                     not answered yet -> ask again
  2. `promotion_wait`: wait for blocks on their way up?      worth it -> ask again
  3. `hit_rules`: which is the longest hit?
  4. `load_policy`: how much of it is worth its load?        slower than computing -> less, or no hit
  5. `loads`: is there room, should every load fail?         not now -> ask again

vLLM may throw an answer away, cut it, or ask again with every step, so asking again costs nothing and changes nothing.
Each "ask again" needs the step's budget (`step_budget.py`); without it the request is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.causes import Cause
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.geometry import Geometry
from vllm_plugin.model.hit_rules import Found, longest
from vllm_plugin.scheduler.computed_tokens import ComputedTokens
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups, Reply
from vllm_plugin.scheduler.pool_contents import PoolContents
from vllm_plugin.scheduler.request_lookup import RequestLookup
from vllm_plugin.scheduler.step_budget import StepBudget

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Admission:
    """One engine's.

    Args:
        contents: told of the blocks that a lookup has found missing.
        computed: told why a request is computed.
    """

    def __init__(
        self,
        geometry: Geometry,
        lookups: Lookups,
        loads: Loads,
        contents: PoolContents,
        budget: StepBudget,
        computed: ComputedTokens,
        recorder: Recorder,
    ):
        self._geometry = geometry
        self._kinds = [group.kind for group in geometry.groups]
        self._lookups = lookups
        self._loads = loads
        self._contents = contents
        self._budget = budget
        self._computed = computed
        self._recorder = recorder

    def matched_tokens(self, request: Request, local: int, is_admitted: bool) -> int | None:
        """How many tokens are loaded beyond the `local` ones that the engine has itself; None: ask again.

        Args:
            is_admitted: the request was answered before in this step, and vLLM asks again before it allocates blocks.
        """
        boundary = self.boundary(request, local)
        if boundary is None:
            return None
        if boundary > local and not ((is_admitted or self._budget.may_begin) and self._loads.has_room(request)):
            if self._budget.may_wait(local):
                return None
            boundary = local
            self._computed.because(request, Cause.WAITING)
        if boundary == local:
            self._loads.stop_waiting(request.request_id)
        return boundary - local

    def divergence(self, lookup: RequestLookup) -> int:
        """Where a request parts from what the pool knows, if a hit falls short of it for want of windows; else 0."""
        leading = [
            blocks.leading * kind.block_tokens
            for kind, blocks in zip(self._kinds, lookup.found, strict=False)
            if kind.needs_prefix
        ]
        known = min(leading, default=0) // self._geometry.alignment * self._geometry.alignment
        return known if known > lookup.boundary else 0

    def boundary(self, request: Request, local: int) -> int | None:
        """The longest hit that is worth its load; `local` for none; None: ask again."""
        limit = self._geometry.hit_limit(request.num_tokens)
        self._computed.because(request, None)
        if limit <= local:
            return local
        if not self._lookups.stages.sessions:
            return self._compute(request, local, Cause.POOL_AWAY)
        if request.lora_request is not None and not self._geometry.names.are_current(request):
            self._lookups.discard(request.request_id)
            if self._geometry.names.are_coming(request):
                return self._ask_again(request, local)
            return self._compute(request, local, Cause.ADAPTER)
        lookup = self._lookups.by_request.get(request.request_id)
        if lookup is None or lookup.must_be_sent_again(local):
            if not self._lookups.stages.are_open:
                self._lookups.discard(request.request_id)
                return self._compute(request, local, Cause.POOL_AWAY)
            if not self._budget.may_begin:
                return self._ask_again(request, local)
            lookup = self._lookups.send(request, local, limit)
            if lookup is None:
                return self._compute(request, local, Cause.POOL_AWAY)
        lookup.asked = local
        if lookup.calls and not self._budget.may_begin:
            return self._ask_again(request, local)  # Its answer is received with a later step.
        if not self._is_final(lookup):
            if not lookup.is_waiting:
                return self._ask_again(request, local)
            if self._budget.may_wait(local):
                return None
            self._lookups.abandon(lookup)
            self._accept(lookup)
        if lookup.found and lookup.searched != (local, limit):
            lookup.searched = (local, limit)
            limit = min(limit, lookup.limit)
            lookup.boundary = longest(self._kinds, lookup.found, local, limit, self._geometry.alignment)
            self._judge(request.request_id, lookup, limit)
        if lookup.is_declined:
            self._computed.because(request, Cause.DECLINED)
        return max(local, lookup.boundary)

    def _compute(self, request: Request, local: int, cause: Cause) -> int:
        """The request is computed from `local` on."""
        self._computed.because(request, cause)
        return local

    def _ask_again(self, request: Request, local: int) -> int | None:
        """The request waits for its lookup, unless too many others wait: then it is computed."""
        if self._budget.may_wait(local, is_lookup=True):
            return None
        return self._compute(request, local, Cause.WAITING)

    def _is_final(self, lookup: RequestLookup) -> bool:
        """Whether the newest answer is the one to act on. Sends the lookup again when that is due."""
        if lookup.calls:
            reply = self._lookups.receive(lookup)
            if reply is Reply.ANSWERED:
                self._weigh(lookup)
            elif reply is Reply.FAILED and lookup.is_waiting and self._lookups.stages.are_open:
                self._accept(lookup)  # Late, and not gone: what was ready before still is.
            elif reply is Reply.FAILED:
                self._give_up(lookup)
            elif not lookup.is_waiting:
                return False
        if lookup.is_waiting:
            self._go_on_waiting(lookup)
        return not lookup.is_waiting

    def _go_on_waiting(self, lookup: RequestLookup) -> None:
        """Ends the wait for blocks on their way up, or sends the lookup again, when that is due."""
        now = time.monotonic()
        if lookup.wait.has_ended(now):
            self._lookups.abandon(lookup)
            self._accept(lookup)
            return
        is_due = not lookup.calls and lookup.wait.is_due(now) and self._budget.may_begin
        if is_due and not self._lookups.send_again(lookup, lookup.wait.answer_s(now)):
            self._give_up(lookup)

    def _weigh(self, lookup: RequestLookup) -> None:
        """A new answer: whether to accept it, or to wait for blocks on their way up from a tier."""
        for probe in lookup.probes:
            if probe.group_idx not in lookup.proven:
                self._contents.missing(probe.group_idx, probe.block_hashes)
        lookup.coming_tokens = 0
        if lookup.retry_s:
            promised = [each.promised() for each in lookup.availability]
            found = [each.found() for each in lookup.availability]
            lookup.coming_tokens = self._longest(lookup, promised) - self._longest(lookup, found)
        if lookup.coming_tokens and lookup.wait.lasts(
            time.monotonic(),
            lookup.num_ready,
            self._loads.policy.compute_seconds(lookup.coming_tokens),
            lookup.retry_s,
            lookup.sent_at if lookup.is_waiting else None,
        ):
            lookup.is_waiting = True
        else:
            self._accept(lookup)

    def _accept(self, lookup: RequestLookup) -> None:
        """The newest answer is final."""
        if lookup.is_waiting:
            lookup.is_waiting = False
            self._recorder.add("promotion_waits")
            self._recorder.observe("promotion_wait_seconds", time.monotonic() - lookup.wait.began_at)
        self._recorder.add("promotion_missed_tokens", lookup.coming_tokens)
        # Without an answer there is no availability.
        for run, each in zip(lookup.runs, lookup.availability, strict=False):
            self._contents.missing(run.group_idx, each.missing(run.block_hashes))

    def _give_up(self, lookup: RequestLookup) -> None:
        """The pool does not answer: a miss."""
        self._accept(lookup)
        self._lookups.cancel(lookup)
        lookup.found = []
        lookup.good_until = math.inf  # One budget of waiting a request, not one a try.

    def _judge(self, request_id: str, lookup: RequestLookup, limit: int) -> None:
        """Decides once per hit how much of it is worth its load, and cuts it there."""
        if lookup.verdict is None and lookup.boundary > lookup.asked:
            lookup.verdict = self._loads.verdict(request_id, lookup.asked, lookup.boundary)
            lookup.most = lookup.asked + lookup.verdict.num_tokens
            lookup.is_declined = lookup.most < lookup.boundary
        if lookup.most < lookup.boundary:
            limit = min(limit, int(lookup.most))
            lookup.boundary = longest(self._kinds, lookup.found, lookup.asked, limit, self._geometry.alignment)
        if lookup.is_declined and lookup.boundary <= lookup.asked:
            self._lookups.cancel(lookup)
            lookup.found, lookup.boundary = [], lookup.local
            lookup.good_until = math.inf  # Asking again would count again.

    def _longest(self, lookup: RequestLookup, found: Sequence[Found]) -> int:
        return longest(self._kinds, found, lookup.asked, lookup.limit, self._geometry.alignment)
