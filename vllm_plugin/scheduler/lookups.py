"""Lookups of the scheduler's side: sent once a request, answered while other requests are scheduled.

A request's first answer is "ask again" while its lookup is under way. An answer may be thrown away or cut by the
scheduler, so asking again costs nothing and changes nothing. Every pipeline stage has a namespace of its own; a block
is there if every stage has it.

An answer is not final while blocks that would lengthen the hit are on their way up from a tier: "ask again", and the
lookup is sent again when the pool says, for as long as the request's wait lasts (`promotion_wait.py`). The leases of an
answer are kept until the next one has brought its own, so that what was ready stays so.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, UnavailableError
from kvpool.rpc import PendingLookup
from kvpool.types import Lookup
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.block_names import BlockNames
from vllm_plugin.model.hit_rules import Found, Reach, Rule, longest
from vllm_plugin.scheduler.availability import Availability
from vllm_plugin.scheduler.load_policy import Verdict
from vllm_plugin.scheduler.promotion_wait import PromotionWait
from vllm_plugin.scheduler.request_lookup import RequestLookup
from vllm_plugin.scheduler.step_budget import StepBudget
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Lookups:
    """Those of one engine.

    Args:
        rules: one a group.
        alignment: of boundaries, in tokens.
        names: of blocks in the pool.
        sessions: one a stage; empty until the stages are known.
        missing: told which blocks of a group a lookup has not found, and that are not on their way either.
        verdict: of a hit between two boundaries.
        compute_s: seconds that computing so many tokens takes; infinite while unknown.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        alignment: int,
        names: BlockNames,
        sessions: Sequence[Session],
        config: ConnectorConfig,
        recorder: Recorder,
        budget: StepBudget,
        missing: Callable[[int, Sequence[bytes]], None],
        verdict: Callable[[int, int], Verdict],
        compute_s: Callable[[int], float],
    ):
        self._rules = rules
        self._alignment = alignment
        self._names = names
        self._sessions = sessions
        self._config = config
        self._recorder = recorder
        self._budget = budget
        self._missing = missing
        self._verdict = verdict
        self._compute_s = compute_s
        self._prefix_only = all(rule.reach is Reach.ALL for rule in rules)
        self._by_request: dict[str, RequestLookup] = {}
        self._released: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._by_request)

    def boundary(self, request: Request, local: int) -> int | None:
        """The longest hit beyond `local` tokens that the engine has itself; `local` for none; None: ask again."""
        # The last token is always computed: its logits are what the request is waiting for.
        limit = (request.num_tokens - 1) // self._alignment * self._alignment
        if limit <= local or not self._sessions:
            return local
        if request.lora_request is not None and not self._names.are_current(request):
            self.forget(request.request_id)
            return self._wait(local) if self._names.are_coming(request) else local
        lookup = self._by_request.get(request.request_id)
        if lookup is None or lookup.local > local or (not lookup.calls and time.monotonic() > lookup.good_until):
            if None in [session.namespace for session in self._sessions]:
                self.forget(request.request_id)
                return local  # The pool is away.
            if not self._budget.may_begin:
                return self._wait(local)
            before = lookup
            self.forget(request.request_id)
            lookup = self._send(request, local, limit)
            if lookup is None:
                return local
            if before is not None:  # A hit is judged once, and waited for once.
                lookup.verdict, lookup.wait = before.verdict, before.wait
        lookup.asked = local
        if lookup.calls and not self._budget.may_begin:
            return self._wait(local)  # Its answer is taken with a later step.
        if not self._is_final(lookup):
            if not lookup.is_waiting:
                return self._wait(local)
            if self._budget.may_wait(local):
                return None
            self._recorder.add("waits_declined")
            self._leave(lookup)
            self._settle(lookup)
        if lookup.found and lookup.searched != (local, limit):
            lookup.searched = (local, limit)
            lookup.boundary = longest(self._rules, lookup.found, local, min(limit, lookup.limit), self._alignment)
            self._judge(lookup)
        return max(local, lookup.boundary)

    def _wait(self, local: int) -> int | None:
        """The request waits for its lookup, unless too many others wait: then it is computed."""
        if self._budget.may_wait(local, is_lookup=True):
            return None
        self._recorder.add("waits_declined")
        return local

    def _judge(self, lookup: RequestLookup) -> None:
        """Once a hit: whether loading it is worth while."""
        if lookup.verdict is None and lookup.boundary > lookup.asked:
            lookup.verdict = self._verdict(lookup.asked, lookup.boundary)
        if lookup.verdict is not None and not lookup.verdict.take:
            self.let_go(lookup)
            lookup.found, lookup.boundary = [], lookup.local
            lookup.good_until = math.inf  # Asking again would count again.

    def take(self, request_id: str) -> RequestLookup | None:
        """Hands over a lookup with its leases, if there is one."""
        return self._by_request.pop(request_id, None)

    def let_go(self, lookup: RequestLookup) -> None:
        """Ends the leases of a lookup, also of one that is not answered yet."""
        self.release(lookup.lease_ids)
        lookup.lease_ids = ()
        self._leave(lookup)

    def forget(self, request_id: str) -> None:
        """Ends a lookup, if there is one."""
        lookup = self.take(request_id)
        if lookup is not None:
            self.let_go(lookup)

    def forget_all(self) -> None:
        for request_id in list(self._by_request):
            self.forget(request_id)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Ends leases, one a stage, with the next `flush`."""
        if any(lease_ids):
            self._released.append(tuple(lease_ids))

    def flush(self) -> None:
        """Tells the pool of all leases that were released: one call a stage, which is not waited for."""
        if self._released:
            for session, lease_ids in zip(self._sessions, zip(*self._released, strict=True), strict=False):
                session.client.release_quietly(*lease_ids)
            self._released.clear()

    def divergence(self, lookup: RequestLookup) -> int:
        """Where a request parts from what the pool knows, if a hit falls short of it for want of windows; else 0."""
        leading = [
            blocks.leading * rule.block_tokens
            for rule, blocks in zip(self._rules, lookup.found, strict=False)
            if rule.reach is Reach.ALL
        ]
        known = min(leading, default=0) // self._alignment * self._alignment
        return known if known > lookup.boundary else 0

    def _send(self, request: Request, local: int, limit: int) -> RequestLookup | None:
        runs, firsts, probes = [], [], []
        for idx, rule in enumerate(self._rules):
            first = local // rule.block_tokens
            if first and rule.reach is not Reach.STATE:
                # In a run of its own: a gap there must not hide what lies behind it.
                probes.append(self._names.run(request, idx, rule, first - 1, first))
            stop = min(len(request.block_hashes) * self._names.hash_tokens // rule.block_tokens, rule.end(limit))
            runs.append(self._names.run(request, idx, rule, first, max(first, stop)))
            firsts.append(first)
        wait = PromotionWait(self._config.promotion_wait_ms / 1000)
        lookup = RequestLookup(local, local, limit, runs, probes, firsts, wait, boundary=local)
        if not self._call(lookup):
            return None
        self._by_request[request.request_id] = lookup
        return lookup

    def _call(self, lookup: RequestLookup) -> bool:
        """Asks every stage; False if the pool is away."""
        lookup.sent_at = time.monotonic()
        for session in self._sessions:
            namespace = session.namespace
            runs = [*lookup.runs, *lookup.probes]
            try:
                if namespace is None:
                    raise UnavailableError("kvpool is away")
                lookup.calls.append(session.client.lookup_async(namespace, runs, prefix_only=self._prefix_only))
            except UnavailableError:
                self._leave(lookup)
                return False
        return True

    def _leave(self, lookup: RequestLookup) -> None:
        """Waits for no answer any more."""
        for session, call in zip(self._sessions, lookup.calls, strict=False):
            # The answer may bring a lease that nobody wants any more.
            call.on_done(functools.partial(_release_late, session))
        lookup.calls = []

    def _is_final(self, lookup: RequestLookup) -> bool:
        """Whether the newest answer is the one to take. Asks for another one when it is time to."""
        if lookup.calls and not self._receive(lookup) and not lookup.is_waiting:
            return False
        now = time.monotonic()
        if lookup.is_waiting and lookup.wait.has_ended(now):
            self._leave(lookup)
            self._settle(lookup)
        elif lookup.is_waiting and not lookup.calls and lookup.wait.is_due(now) and not self._call(lookup):
            self._give_up(lookup)
        return not lookup.is_waiting

    def _receive(self, lookup: RequestLookup) -> bool:
        """Takes the answers if they are there, or come within what this step may still wait."""
        answers: list[Lookup] = []
        for session, call in zip(self._sessions, lookup.calls, strict=True):
            wait_s = self._budget.wait_s
            if not wait_s and not call.done():
                return False
            asked_at = time.monotonic()
            try:
                answer = call.result(wait_s)
            except KVPoolError as error:
                session.report(error, "lookup")
                self._recorder.add("lookup_failures")
                self._leave(lookup)
                if lookup.is_waiting and all(each.namespace for each in self._sessions):
                    self._settle(lookup)  # Late, and not gone: what was ready before still is.
                else:
                    self._give_up(lookup)
                return True
            finally:
                self._budget.waited(time.monotonic() - asked_at)
            if answer is None:
                return False
            answers.append(answer)
            session.report(None, "lookup")
        lookup.calls = []
        self._recorder.add("lookups")
        self._recorder.observe("lookup_seconds", time.monotonic() - lookup.sent_at)
        self._take_answers(lookup, answers)
        return True

    def _take_answers(self, lookup: RequestLookup, answers: Sequence[Lookup]) -> None:
        """Keeps what was found; decides whether to wait for what is on its way."""
        self.release(lookup.lease_ids)  # Of the answers before these, whose own leases are there now.
        lookup.lease_ids = tuple(answer.lease_id for answer in answers)
        ttl_ms = min(answer.lease_ttl_ms for answer in answers) or self._config.load_timeout_ms
        lookup.good_until = lookup.sent_at + max(ttl_ms - self._config.load_timeout_ms, ttl_ms // 2) / 1000
        lookup.availability = [
            Availability.of(rule, first, len(run), [answer.hits[idx] for answer in answers])
            for idx, (rule, first, run) in enumerate(zip(self._rules, lookup.firsts, lookup.runs, strict=True))
        ]
        self._take_proofs(lookup, answers)
        found = [each.found() for each in lookup.availability]
        lookup.found = found if all(lookup.lease_ids) else []  # Without a lease nothing keeps the blocks there.
        lookup.coming_tokens = 0
        retry_ms = max(answer.retry_after_ms for answer in answers)
        if retry_ms:
            promised = [each.promised() for each in lookup.availability]
            lookup.coming_tokens = self._longest(lookup, promised) - self._longest(lookup, found)
        num_ready = sum(max(hits.num_leading, hits.complete.bit_count()) for each in answers for hits in each.hits)
        if lookup.coming_tokens and lookup.wait.lasts(
            time.monotonic(), num_ready, self._compute_s(lookup.coming_tokens), retry_ms / 1000
        ):
            lookup.is_waiting = True
        else:
            self._settle(lookup)

    def _take_proofs(self, lookup: RequestLookup, answers: Sequence[Lookup]) -> None:
        """Which probes every stage has."""
        for nth, probe in enumerate(lookup.probes, len(lookup.runs)):
            if all(answer.hits[nth].num_leading for answer in answers):
                lookup.proven.add(probe.group_idx)
            else:
                lookup.proven.discard(probe.group_idx)
                self._missing(probe.group_idx, probe.block_hashes)

    def _settle(self, lookup: RequestLookup) -> None:
        """The newest answer is final."""
        if lookup.is_waiting:
            lookup.is_waiting = False
            self._recorder.add("promotion_waits")
            self._recorder.observe("promotion_wait_seconds", time.monotonic() - lookup.wait.began_at)
        self._recorder.add("promotion_missed_tokens", lookup.coming_tokens)
        # There is no availability where nobody has answered.
        for run, each in zip(lookup.runs, lookup.availability, strict=False):
            self._missing(run.group_idx, each.missing(run.block_hashes))

    def _give_up(self, lookup: RequestLookup) -> None:
        """The pool does not answer: a miss."""
        self._settle(lookup)
        self.let_go(lookup)
        lookup.found = []
        lookup.good_until = math.inf  # One budget of waiting a request, not one a try.

    def _longest(self, lookup: RequestLookup, found: Sequence[Found]) -> int:
        return longest(self._rules, found, lookup.asked, lookup.limit, self._alignment)


def _release_late(session: Session, pending: PendingLookup) -> None:
    try:
        found = pending.result(0)
    except KVPoolError:
        return
    if found is not None:
        session.client.release_quietly(found.lease_id)
