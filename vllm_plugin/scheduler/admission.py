"""Decides, each time that vLLM asks, how many tokens of a request are loaded: a hit, none, or "ask again".

A question takes these steps in order, each once:

  1. `Lookups`: what does the pool have?                     not answered yet -> ask again
  2. `PromotionWait`: wait for blocks on their way up?       worth it -> ask again
  3. `longest`: which is the longest hit?
  4. `LoadPolicy`: how much of it is worth its load?         slower than computing -> less, or no hit
  5. `Loads`: is there room, should every load fail?         not now -> ask again

vLLM may throw an answer away, cut it, or ask again with every step, so asking again costs nothing and changes nothing.
Each "ask again" needs the step's budget (`StepBudget`); without it the request is computed.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.protocol.reports import Cause
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.model.kinds import Found, longest
from vllm_plugin.scheduler.load_policy import PrefillQueue
from vllm_plugin.scheduler.loads import Loads
from vllm_plugin.scheduler.lookups import Lookups, RequestLookup, StepBudget
from vllm_plugin.scheduler.pool_contents import PoolContents
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.telemetry import ComputedTokens, RequestSpans

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

MAX_STEPS_AHEAD = 4
"""Requests are looked up ahead until they ask for what so many full steps compute. What they find is leased while they
wait, and a small pool has nothing else to evict."""
STUCK_S = 0.25
"""A tier that has brought no block for so long, and over two more answers, may have lost them: the wait ends."""
MAX_ANSWER_S = 0.2
"""The longest that the pool may wait for a tier before it answers: from the answers the wait learns of progress."""


class PromotionWait:
    """The wait of one request, over all its lookups, for blocks on their way up from a tier.

    A request waits no longer than `wait_s` and than computing the blocks would take, and not for a tier that brings
    nothing. Times are monotonic seconds.
    """

    def __init__(self, wait_s: float):
        self.began_at = math.inf  # When an answer first said that blocks are on their way.
        self.due_at = self.ends_at = math.inf  # When to ask again, and when the wait ends.
        self._num_ready = -1
        self._progress_at = -math.inf
        self._wait_s = wait_s

    def lasts(
        self, now: float, num_ready: int, compute_s: float, retry_s: float, asked_at: float | None = None
    ) -> bool:
        """Whether to ask again, after an answer with blocks on their way.

        Args:
            num_ready: blocks that are ready, in any measure that grows with them.
            compute_s: of computing the blocks on their way; infinite while unknown.
            retry_s: when the pool is asked again: more blocks are likely to be up. If that is too late, the wait ends.
            asked_at: when a pool was asked that could wait with its answer; None for the first answer.
        """
        if math.isinf(self.began_at):
            self.began_at, self.ends_at = now, now + self._wait_s
        if num_ready > self._num_ready:
            self._num_ready, self._progress_at = num_ready, now
        self.ends_at = min(self.ends_at, now + compute_s)
        self.due_at = now if asked_at is None else asked_at + retry_s
        return now + retry_s < self.ends_at and now - self._progress_at < max(STUCK_S, 2 * retry_s)

    def answer_s(self, now: float) -> float:
        """How long the pool may wait for the tier before it answers, so that its answer comes before the end."""
        return min(MAX_ANSWER_S, max(0.0, self.ends_at - now) / 2)


@dataclass(slots=True)
class Candidate:
    """A request that has no blocks yet: its newest lookup, and what `Admission` has decided by the answers."""

    lookup: RequestLookup
    wait: PromotionWait
    asked: int  # Tokens that the engine had itself when vLLM asked last.
    boundary: int  # The longest hit; `lookup.local` if there is none, or none that is worth its load.
    most: float = math.inf  # Nothing is loaded beyond this token; infinite until the hit was judged.
    is_declined: bool = False  # A part of the hit is computed, or all of it.
    is_waiting: bool = False  # The newest answer is not final, because blocks on their way up are waited for.
    coming_tokens: int = 0  # By how many tokens such blocks would lengthen the hit.
    searched: tuple[int, int] | None = None  # (asked, limit) of the last search for the longest hit.


@dataclass(eq=False)
class Admission:
    """Answers vLLM's questions how many tokens of a request are loaded."""

    _geometry: Geometry
    _stages: Stages
    _config: ConnectorConfig
    _lookups: Lookups
    _loads: Loads
    _queue: PrefillQueue
    _contents: PoolContents
    _budget: StepBudget
    _computed: ComputedTokens
    _spans: RequestSpans
    _recorder: Recorder
    _block_pool: BlockPool | None = field(default=None, init=False)
    candidates: dict[str, Candidate] = field(default_factory=dict, init=False)  # By request id.
    # Requests whose newest answer is "ask again" for want of a lookup, and the tokens that the engine had.
    asking: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._kinds = [group.kind for group in self._geometry.groups]

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    # Ahead of vLLM's question

    def look_ahead(self) -> None:
        """Looks up the oldest requests that wait, as far as the step's budget reaches.

        vLLM does not wait for an answer, and asks again with the next step: 0.3 s later where prefill is busy. Requests
        with adapters are left out: the names of their blocks may change until vLLM asks.
        """
        most = MAX_STEPS_AHEAD * self._geometry.step_tokens
        ahead = sum(each.lookup.limit - each.lookup.local for each in self.candidates.values())
        while ahead < most and self._budget.may_begin:
            with self._budget:  # Each request by itself: the budget counts calls that have ended.
                if (request := self._queue.next_waiting()) is None:
                    return
                if request.lora_request is None and request.request_id not in self.candidates:
                    local, limit = self._own_tokens(request), self._geometry.hit_limit(request.num_tokens)
                    if local < limit and not request.skip_reading_prefix_cache:
                        self._spans.asked(request)
                        self.look_up(request, local, limit)
                        ahead += limit - local

    def _own_tokens(self, request: Request) -> int:
        """About how many tokens the engine has itself: where vLLM finds fewer, the request is looked up again."""
        pool, first, unit = self._block_pool, self._geometry.groups[0], self._geometry.names.hash_tokens
        is_cached_by_hash = first.kind.block_tokens == unit and all(kind.needs_prefix for kind in self._kinds)
        if pool is None or not is_cached_by_hash:
            return 0
        members = list(first.members)
        # vLLM evicts the end of a prefix first: what is cached is a prefix, almost always.
        num_cached = bisect.bisect(
            request.block_hashes, False, key=lambda each: pool.get_cached_block(each, members) is None
        )
        return num_cached * unit // self._geometry.alignment * self._geometry.alignment

    # A question

    def matched_tokens(self, request: Request, local: int, is_admitted: bool) -> int | None:
        """How many tokens are loaded beyond the `local` ones that the engine has itself; None: ask again.

        If `is_admitted`, the request was answered before in this step, and vLLM asks again before it allocates blocks.
        """
        if self.asking.pop(request.request_id, -1) == local and not self._budget.may_begin:
            boundary = self._ask_again(request, local)  # As before: most questions of a step with many requests.
        else:
            boundary = self.boundary(request, local)
        if boundary is None:
            return None
        if boundary > local and not ((is_admitted or self._budget.may_begin) and self._loads.has_room(request)):
            if self._budget.may_wait(local):
                return None
            boundary = self._compute(request, local, Cause.TOO_MANY_WAITING)
        if boundary == local:
            self._loads.stop_waiting(request.request_id)
        return boundary - local

    def boundary(self, request: Request, local: int) -> int | None:
        """The longest hit that is worth its load; `local` for none; None: ask again."""
        limit = self._geometry.hit_limit(request.num_tokens)
        self._computed.because(request, None)
        if limit <= local:
            return local
        if not self._stages.sessions:
            return self._compute(request, local, Cause.POOL_AWAY)
        if request.lora_request is not None and not self._geometry.names.are_current(request):
            self.discard(request.request_id)
            if self._geometry.names.are_coming(request):
                return self._ask_again(request, local)
            return self._compute(request, local, Cause.ADAPTER)
        candidate = self.candidates.get(request.request_id)
        if candidate is None or candidate.lookup.must_be_sent_again(local):
            if not self._stages.are_open:
                self.discard(request.request_id)
                return self._compute(request, local, Cause.POOL_AWAY)
            if not self._budget.may_begin:
                return self._ask_again(request, local)
            if (candidate := self.look_up(request, local, limit)) is None:
                return self._compute(request, local, Cause.POOL_AWAY)
        candidate.asked = local
        if candidate.lookup.calls and not self._budget.may_begin:
            return self._ask_again(request, local)  # Its answer is received with a later step.
        if not self._is_final(candidate):
            if not candidate.is_waiting:
                return self._ask_again(request, local)
            if self._budget.may_wait(local):
                return None
            self._accept(candidate)
        found = candidate.lookup.found
        if found and candidate.searched != (local, limit):
            candidate.searched = (local, limit)
            limit = min(limit, candidate.lookup.limit)
            candidate.boundary = longest(self._kinds, found, local, limit, self._geometry.alignment)
            self._judge(request.request_id, candidate, limit)
        if candidate.is_declined:
            self._computed.because(request, Cause.DECLINED)
        return max(local, candidate.boundary)

    def _compute(self, request: Request, local: int, cause: Cause) -> int:
        self._computed.because(request, cause)
        return local

    def _ask_again(self, request: Request, local: int) -> int | None:
        """The request waits for its lookup, unless too many others wait: then it is computed."""
        if self._budget.may_wait(local, is_lookup=True):
            self.asking[request.request_id] = local
            return None
        return self._compute(request, local, Cause.TOO_MANY_WAITING)

    # A candidate

    def look_up(self, request: Request, local: int, limit: int) -> Candidate | None:
        """Looks up what a request may need beyond its `local` tokens; None if the pool is away.

        A lookup of the request that was sent before is canceled; its verdict and its wait go on: a hit is judged once,
        and waited for once.
        """
        before = self.candidates.get(request.request_id)
        self.discard(request.request_id)
        if (lookup := self._lookups.send(request, local, limit)) is None:
            return None
        candidate = Candidate(lookup, PromotionWait(self._config.promotion_wait_ms / 1000), asked=local, boundary=local)
        if before is not None:
            candidate.wait, candidate.most, candidate.is_declined = before.wait, before.most, before.is_declined
        self.candidates[request.request_id] = candidate
        return candidate

    def discard(self, request_id: str) -> None:
        """Forgets a request, and cancels its lookup, if there is one."""
        if (candidate := self.admitted(request_id)) is not None:
            self._lookups.cancel(candidate.lookup)

    def admitted(self, request_id: str) -> Candidate | None:
        """Forgets a request that was given blocks, whose lookup the caller ends."""
        self.asking.pop(request_id, None)
        return self.candidates.pop(request_id, None)

    def discard_all(self) -> None:
        """Forgets every request, and releases the leases at once."""
        for request_id in (*self.candidates, *self.asking):
            self.discard(request_id)
        self._lookups.flush()

    def divergence(self, candidate: Candidate) -> int:
        """Where a request parts from what the pool knows, if a hit falls short of it for want of windows; else 0."""
        leading = [
            blocks.leading * kind.block_tokens
            for kind, blocks in zip(self._kinds, candidate.lookup.found, strict=False)
            if kind.needs_prefix
        ]
        known = min(leading, default=0) // self._geometry.alignment * self._geometry.alignment
        return known if known > candidate.boundary else 0

    # An answer

    def _is_final(self, candidate: Candidate) -> bool:
        """Whether the newest answer is the one to act on. Sends the lookup again when that is due."""
        if candidate.lookup.calls:
            has_answer = self._lookups.receive(candidate.lookup)
            if has_answer is None:
                if not candidate.is_waiting:
                    return False
            elif has_answer:
                self._weigh(candidate)
            elif candidate.is_waiting and self._stages.are_open:
                self._accept(candidate)  # The answer is late; the blocks that were ready before still are.
            else:
                self._give_up(candidate)
        if candidate.is_waiting:
            self._go_on_waiting(candidate)
        return not candidate.is_waiting

    def _go_on_waiting(self, candidate: Candidate) -> None:
        """Ends the wait for blocks on their way up, or sends the lookup again, when that is due."""
        now, wait, lookup = time.monotonic(), candidate.wait, candidate.lookup
        if now >= wait.ends_at:
            self._accept(candidate)
            return
        is_due = not lookup.calls and now >= wait.due_at and self._budget.may_begin
        if is_due and not self._lookups.send_again(lookup, wait.answer_s(now)):
            self._give_up(candidate)

    def _weigh(self, candidate: Candidate) -> None:
        """A new answer: whether to accept it, or to wait for blocks on their way up from a tier."""
        lookup = candidate.lookup
        for probe in lookup.probes:
            if probe.group_idx not in lookup.proven:
                self._contents.missing(probe.group_idx, probe.block_hashes)
        candidate.coming_tokens = 0
        if lookup.retry_s:
            candidate.coming_tokens = self._longest(candidate, lookup.promised) - self._longest(candidate, lookup.ready)
        compute_s = self._loads.compute_seconds(candidate.coming_tokens)
        asked_at = lookup.sent_at if candidate.is_waiting else None
        if candidate.coming_tokens and candidate.wait.lasts(
            time.monotonic(), lookup.num_ready, compute_s, lookup.retry_s, asked_at
        ):
            candidate.is_waiting = True
        else:
            self._accept(candidate)

    def _accept(self, candidate: Candidate) -> None:
        """The newest answer is final: a later one is not waited for."""
        self._lookups.abandon(candidate.lookup)
        if candidate.is_waiting:
            candidate.is_waiting = False
            self._recorder.add("promotion_waits")
            self._recorder.observe("promotion_wait_seconds", time.monotonic() - candidate.wait.began_at)
        self._recorder.add("promotion_missed_tokens", candidate.coming_tokens)
        # Without an answer nothing is promised.
        for run, promised in zip(candidate.lookup.runs, candidate.lookup.promised, strict=False):
            self._contents.missing(run.group_idx, promised.missing(run.block_hashes))

    def _give_up(self, candidate: Candidate) -> None:
        """The pool does not answer: a miss."""
        self._accept(candidate)
        self._lookups.finish(candidate.lookup)

    def _judge(self, request_id: str, candidate: Candidate, limit: int) -> None:
        """Decides once per hit how much of it is worth its load."""
        asked, lookup = candidate.asked, candidate.lookup
        if math.isinf(candidate.most) and candidate.boundary > asked:
            candidate.most = asked + self._loads.verdict(request_id, asked, candidate.boundary)
            candidate.is_declined = candidate.most < candidate.boundary
        if candidate.most < candidate.boundary:
            limit = min(limit, int(candidate.most))
            candidate.boundary = longest(self._kinds, lookup.found, asked, limit, self._geometry.alignment)
        if candidate.is_declined and candidate.boundary <= asked:
            self._lookups.finish(lookup)
            candidate.boundary = lookup.local

    def _longest(self, candidate: Candidate, found: Sequence[Found]) -> int:
        return longest(self._kinds, found, candidate.asked, candidate.lookup.limit, self._geometry.alignment)
