"""Lookups of the scheduler's side: sent once a request, answered while other requests are scheduled.

This module sends lookups, receives answers, and keeps or releases their leases; what follows from an answer is decided
in `admission.py`. Every pipeline stage has a namespace of its own; a block is there if every stage has it.

A lookup may be sent again, while blocks are on their way up from a tier. The leases of an answer are kept until the
next answer has brought its own, so that what was ready stays so.
"""

from __future__ import annotations

import enum
import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, UnavailableError
from kvpool.rpc import PendingLookup
from kvpool.types import Lookup
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.geometry import Geometry
from vllm_plugin.scheduler.request_lookup import Availability, PromotionWait, RequestLookup
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.scheduler.step_budget import StepBudget
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Reply(enum.Enum):
    """What `Lookups.receive` has found."""

    PENDING = "no answer yet"
    ANSWERED = "every stage has answered"
    FAILED = "a stage's call has failed"


class Lookups:
    """Those of one engine.

    Args:
        budget: how long the calls of one step may wait for answers.

    Attributes:
        traceparent_of: of the span of a request's lookup; None: there are no spans.
        by_request: lookups that were sent, by request id; they own the leases of their answers.
    """

    def __init__(
        self, geometry: Geometry, stages: Stages, config: ConnectorConfig, budget: StepBudget, recorder: Recorder
    ):
        self._geometry = geometry
        self.stages = stages
        self._config = config
        self._budget = budget
        self._recorder = recorder
        self._prefix_only = all(group.kind.needs_prefix for group in geometry.groups)
        self.by_request: dict[str, RequestLookup] = {}
        self.traceparent_of: Callable[[str], str] | None = None
        self._released: list[tuple[int, ...]] = []

    def send(self, request: Request, local: int, limit: int) -> RequestLookup | None:
        """Looks up what a request may need beyond its `local` tokens; None if the pool is away.

        A lookup of the request that was sent before is canceled; its verdict and its wait go on.
        """
        before = self.by_request.get(request.request_id)
        self.discard(request.request_id)
        names = self._geometry.names
        runs, firsts, probes = [], [], []
        for idx, group in enumerate(self._geometry.groups):
            kind = group.kind
            first = local // kind.block_tokens
            if first and kind.is_positional:
                # In a run of its own: a gap there must not hide what lies behind it.
                probes.append(names.run(request, idx, kind, first - 1, first))
            stop = min(len(request.block_hashes) * names.hash_tokens // kind.block_tokens, kind.end(limit))
            runs.append(names.run(request, idx, kind, first, max(first, stop)))
            firsts.append(first)
        wait = PromotionWait(self._config.promotion_wait_ms / 1000)
        lookup = RequestLookup(local, limit, runs, probes, firsts, wait, asked=local, boundary=local)
        if self.traceparent_of is not None:
            lookup.traceparent = self.traceparent_of(request.request_id)
        if not self.send_again(lookup):
            return None
        self.by_request[request.request_id] = lookup
        if before is not None:  # A hit is judged once, and waited for once.
            lookup.verdict, lookup.most, lookup.wait = before.verdict, before.most, before.wait
            lookup.is_declined = before.is_declined
        return lookup

    def send_again(self, lookup: RequestLookup, answer_s: float = 0.0) -> bool:
        """Asks every stage; False if the pool is away.

        Args:
            answer_s: how long the pool may wait for blocks on their way up before it answers.
        """
        if not self._prefix_only:  # Blocks that the hit does not need may be pending longest.
            answer_s = min(answer_s, lookup.retry_s)
        lookup.sent_at, lookup.answered_at = time.monotonic(), math.inf
        for session in self.stages.sessions:
            namespace = session.namespace
            try:
                if namespace is None:
                    raise UnavailableError("kvpool is away")
                call = session.client.rpc.lookup_async(
                    namespace,
                    lookup.question,
                    prefix_only=self._prefix_only,
                    locate=True,
                    explain=True,
                    wait_ms=math.ceil(1000 * answer_s),
                    traceparent=lookup.traceparent,
                )
                lookup.calls.append(call)
                call.on_done(lookup.answered)
            except UnavailableError:
                self.abandon(lookup)
                return False
        return True

    def receive(self, lookup: RequestLookup) -> Reply:
        """Receives the answers if they are there, or come within what this step may still wait."""
        answers: list[Lookup] = []
        for session, call in zip(self.stages.sessions, lookup.calls, strict=True):
            # An answer that waits for a tier is not waited for here: other requests need the step's budget.
            wait_s = 0.0 if lookup.is_waiting else self._budget.wait_s
            if not wait_s and not call.done():
                return Reply.PENDING
            asked_at = time.monotonic()
            try:
                answer = call.result(wait_s)
            except KVPoolError as error:
                session.report(error, "lookup")
                self._recorder.add("lookup_failures")
                self.abandon(lookup)
                return Reply.FAILED
            finally:
                self._budget.waited(time.monotonic() - asked_at)
            if answer is None:
                return Reply.PENDING
            answers.append(answer)
            session.report(None, "lookup")
        lookup.calls = []
        self._recorder.add("lookups")
        if not lookup.is_waiting:  # Else the answer may have waited for a tier.
            self._recorder.observe("lookup_seconds", min(time.monotonic(), lookup.answered_at) - lookup.sent_at)
        self._keep(lookup, answers)
        return Reply.ANSWERED

    def _keep(self, lookup: RequestLookup, answers: Sequence[Lookup]) -> None:
        """Keeps what the stages have answered, and the leases."""
        self.release(lookup.lease_ids)  # Of the answers before these, whose own leases are there now.
        lookup.lease_ids = tuple(answer.lease_id for answer in answers)
        lookup.answers = answers
        ttl_ms = min(answer.lease_ttl_ms for answer in answers) or self._config.load_timeout_ms
        lookup.good_until = lookup.sent_at + max(ttl_ms - self._config.load_timeout_ms, ttl_ms // 2) / 1000
        lookup.availability = [
            Availability.of(group.kind, first, len(run), [answer.hits[idx] for answer in answers])
            for idx, (group, first, run) in enumerate(
                zip(self._geometry.groups, lookup.firsts, lookup.runs, strict=True)
            )
        ]
        # Without a lease nothing keeps the blocks there.
        lookup.found = [each.found() for each in lookup.availability] if all(lookup.lease_ids) else []
        lookup.num_ready = sum(
            max(hits.num_leading, hits.complete.bit_count()) for each in answers for hits in each.hits
        )
        lookup.retry_s = max(answer.retry_after_ms for answer in answers) / 1000
        lookup.proven = {
            probe.group_idx
            for nth, probe in enumerate(lookup.probes, len(lookup.runs))
            if all(answer.hits[nth].num_leading for answer in answers)
        }

    def discard(self, request_id: str) -> None:
        """Cancels and forgets a request's lookup, if there is one."""
        lookup = self.by_request.pop(request_id, None)
        if lookup is not None:
            self.cancel(lookup)

    def discard_all(self) -> None:
        for request_id in list(self.by_request):
            self.discard(request_id)

    def cancel(self, lookup: RequestLookup) -> None:
        """Releases the leases of a lookup, also those that a late answer will bring."""
        self.release(lookup.lease_ids)
        lookup.lease_ids = ()
        self.abandon(lookup)

    def abandon(self, lookup: RequestLookup) -> None:
        """Waits no longer for the calls under way; their leases are released when they are answered."""
        for session, call in zip(self.stages.sessions, lookup.calls, strict=False):
            call.on_done(functools.partial(self._release_late, session))
        lookup.calls = []

    def release(self, lease_ids: Sequence[int]) -> None:
        """Releases leases, one a stage, with the next `flush`."""
        if any(lease_ids):
            self._released.append(tuple(lease_ids))

    def flush(self) -> None:
        """Tells the pool of all leases that were released: one call a stage, which is not waited for."""
        released, self._released = self._released, []  # Once, even where that fails: leases expire by themselves.
        for session, lease_ids in zip(self.stages.sessions, zip(*released, strict=True), strict=False):
            session.client.rpc.release_quietly(*lease_ids)

    def _release_late(self, session: Session, pending: PendingLookup) -> None:
        """Releases the lease of an answer that nobody waits for. Runs on the thread that has received it."""
        with self._recorder.guard.part("the release of a late answer's lease"), suppress(KVPoolError):
            found = pending.result(0)
            if found is not None:
                session.client.rpc.release_quietly(found.lease_id)
