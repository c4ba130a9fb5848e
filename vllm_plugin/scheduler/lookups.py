"""Lookups of the scheduler's side: sent once per request, answered while other requests are scheduled.

`Lookups` sends lookups, receives answers, and keeps or releases their leases; `Admission` decides what follows from an
answer. Every pipeline stage has a namespace of its own; a block is in the pool if every stage has it.

A lookup may be sent again, while blocks are on their way up from a tier. The leases of an answer are kept until the
next answer has brought its own, so that the ready blocks stay ready. `StepBudget` bounds what all this may cost a step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.client.rpc import KeptRuns, PendingLookup
from kvpool.protocol.errors import KVPoolError, UnavailableError
from kvpool.protocol.types import BlockRun, LeasedSlots, Lookup, RunHits
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.groups import Geometry
from vllm_plugin.model.kinds import Found, Kind
from vllm_plugin.scheduler.stages import Stages
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request

MIN_WAIT_S, MAX_WAIT_SHARE, ASYNC_WAIT_SHARE = 0.5e-3, 0.1, 0.25
"""All lookups of one step together wait so long for their answers, and this part of a step for answers that are due:
more of a short step with asynchronous scheduling, where the device works meanwhile. A request whose answer comes later
waits for a whole step."""
MAX_BEGIN_S = 1e-3
"""Once the connector has worked so long in one step, waiting left out, the step begins no more lookups and loads, and
receives no more answers. What has begun costs as much again later: in the metadata, and when it ends."""
SHORT_STEP_S, LONG_STEP_S = 0.05, 0.25
"""`MAX_BEGIN_S` is 2 % of a short step. A longer step has more in proportion, as its requests wait longer for the next
one; up to that of a long step, since the engine may have been idle."""
WALK_S = 15e-6
WALK_TOKEN_S = 55e-9
"""Measured: 1.75 ms for 32,768 tokens."""
MAX_WALKS_S = 2e-3
"""Bound for requests that wait for room or for blocks on their way up from a tier, which may take seconds."""
MAX_LOOKUP_WALKS_S = 10e-3
"""Bound for all requests that wait. A lookup is answered by the next step as a rule, and a request has one."""


class StepBudget:
    """What the connector may cost one step of the engine: time of the scheduler's thread, and repeated prefix searches.

    Every answer "ask again" makes vLLM search (walk) the request's prefix in its own cache once more, with the next
    step: `WALK_TOKEN_S` for every token that the engine has itself, on the scheduler's thread, for as long as the
    request waits. Beyond the bounds a request is computed instead of waiting. One request may always wait.
    """

    def __init__(self, recorder: Recorder, *, is_async: bool = False) -> None:
        self._recorder, self._is_async = recorder, is_async
        self._spent_s = self._waited_s = self._walks_s = 0.0
        self._lasted_s = self._answer_s = 0.0
        self._began_at: float | None = None
        self._step_began_at = time.monotonic()

    def new_step(self) -> None:
        """The step that is being scheduled is over."""
        now = time.monotonic()
        self._lasted_s, self._step_began_at = now - self._step_began_at, now
        self._spent_s = self._waited_s = self._walks_s = 0.0

    @property
    def _step_s(self) -> float:
        """How long the step is taken to be: as the last one, or as the time since that was scheduled, if it is longer.

        Behind an idle time vLLM schedules two steps at once.
        """
        return min(max(self._lasted_s, time.monotonic() - self._step_began_at), LONG_STEP_S)

    def __enter__(self) -> None:
        """A call of the connector begins; calls do not nest."""
        self._began_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert self._began_at is not None
        self._spent_s += time.monotonic() - self._began_at
        self._began_at = None

    @property
    def may_begin(self) -> bool:
        """Whether a lookup or a load may begin in this step."""
        return self._spent_s < max(1, self._step_s / SHORT_STEP_S) * MAX_BEGIN_S

    def wait_s(self, sent_at: float) -> float:
        """How long a lookup may wait for its answer now."""
        wait_s = MAX_WAIT_SHARE * self._step_s
        if self._is_async:
            wait_s = max(wait_s, ASYNC_WAIT_SHARE * min(self._step_s, SHORT_STEP_S))
        least_s, most_s = (most - self._waited_s for most in (MIN_WAIT_S, wait_s))
        is_due = sent_at + self._answer_s < time.monotonic() + most_s
        return max(0.0, least_s, most_s if is_due else 0.0)

    def answered(self, seconds: float) -> None:
        """So long after it was sent a lookup was answered."""
        self._answer_s += (seconds - self._answer_s) / 8

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds
        self._spent_s -= seconds  # The call that waits counts it, too.

    def may_wait(self, local_tokens: int, is_lookup: bool = False) -> bool:
        """Whether one more request may be told to ask again, for a lookup's answer if `is_lookup`; counts it if so."""
        walk_s = WALK_S + WALK_TOKEN_S * local_tokens
        bound_s = MAX_LOOKUP_WALKS_S if is_lookup else MAX_WALKS_S
        if self._walks_s and self._walks_s + walk_s > bound_s:
            self._recorder.add("declined_waits")
            return False
        self._walks_s += walk_s
        return True


def availability(kind: Kind, first: int, length: int, stages: Iterable[RunHits]) -> tuple[Found, Found]:
    """Which blocks of one group every stage has; and which once all are ready that may come.

    An answer says how many blocks are on their way up from a tier. For a group that needs its whole prefix they are
    taken to be those right behind the leading ones: with `prefix_only` they are, and others would not lengthen a hit.
    For any other kind one of them may be all that a hit lacks, whichever it is. `length` blocks were asked for, from
    the block with index `first` on.
    """
    ready = coming = everything = (1 << length) - 1
    for hits in stages:
        here = hits.complete | (1 << hits.num_leading) - 1
        ready &= here
        if kind.needs_prefix:
            coming &= here | (1 << hits.num_leading + hits.num_pending) - 1
        elif not hits.num_pending:
            coming &= here
    return Found(first, ready & everything, length), Found(first, coming & everything, length)


@dataclass(slots=True)
class RequestLookup:
    """What was asked for a request, and what the pool has answered. `Lookups` alone writes it."""

    local: int  # Tokens that the engine had itself when the lookup was sent.
    limit: int  # Tokens that the hit may not exceed.
    runs: list[BlockRun]  # Blocks that were asked for, one run per group.
    probes: list[BlockRun]  # The last block of each group that the engine had itself.
    firsts: list[int]  # Index of each run's first block.
    traceparent: str = ""  # Of the lookup's span; empty if it has none.
    question: KeptRuns = field(init=False)
    sent_at: float = 0.0  # Monotonic seconds of the last sending.
    answered_at: float = math.inf  # Monotonic seconds of its answer; vLLM may ask long after that.
    calls: list[PendingLookup] = field(default_factory=list)  # One per stage, while they are under way.
    # All of what follows is by the newest answer.
    answers: Sequence[Lookup] = ()  # One per stage.
    lease_ids: tuple[int, ...] = ()  # One per stage.
    good_until: float = 0.0  # By when a load must have begun; then the lookup is sent again.
    ready: Sequence[Found] = ()  # One per group, as is `promised`: see `availability`.
    promised: Sequence[Found] = ()
    found: Sequence[Found] = ()  # `ready`; empty without leases, which alone keep the blocks there.
    num_ready: int = 0  # Blocks, in a measure that grows while a tier brings more.
    retry_s: float = 0.0  # When the pool wants to be asked again; 0: no block is on its way up from a tier.
    proven: set[int] = field(default_factory=set)  # Groups whose probe the pool has.

    def __post_init__(self) -> None:
        self.question = KeptRuns((*self.runs, *self.probes))

    def answered(self, call: PendingLookup) -> None:
        """A call has ended. Runs on another thread than the scheduler's, and decodes the answer there."""
        self.answered_at = time.monotonic()
        with suppress(Exception):  # `Lookups.receive` raises it, too.
            call.result(0)

    @property
    def took_s(self) -> float:
        return min(time.monotonic(), self.answered_at) - self.sent_at

    def leased(self, idx: int, start: int, stop: int) -> tuple[LeasedSlots | None, ...]:
        """Where blocks [start, stop) of a group lie, one a stage, as far as the answers say it."""
        first = self.firsts[idx]
        return tuple(answer.leased(idx, start - first, stop - first) for answer in self.answers)

    def must_be_sent_again(self, local: int) -> bool:
        """Whether the engine has fewer tokens than the lookup assumes, or the leases of its answer may expire."""
        return self.local > local or (not self.calls and time.monotonic() > self.good_until)


@dataclass(eq=False)
class Lookups:
    """Sends the lookups of an engine, and receives their answers."""

    _geometry: Geometry
    _stages: Stages
    _config: ConnectorConfig
    _budget: StepBudget
    _recorder: Recorder
    _traceparent_of: Callable[[str], str]  # Of the span of a request's lookup, by the request's id; "" without one.
    _released: list[tuple[int, ...]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._prefix_only = all(group.kind.needs_prefix for group in self._geometry.groups)

    def send(self, request: Request, local: int, limit: int) -> RequestLookup | None:
        """Looks up what a request may need beyond its `local` tokens; None if the pool is away."""
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
        lookup = RequestLookup(local, limit, runs, probes, firsts, self._traceparent_of(request.request_id))
        return lookup if self.send_again(lookup) else None

    def send_again(self, lookup: RequestLookup, answer_s: float = 0.0) -> bool:
        """Asks every stage, which may wait `answer_s` for blocks on their way up; False if the pool is away."""
        if not self._prefix_only:  # Blocks that the hit does not need may be pending longest.
            answer_s = min(answer_s, lookup.retry_s)
        lookup.sent_at, lookup.answered_at = time.monotonic(), math.inf
        for session in self._stages.sessions:
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

    def receive(self, lookup: RequestLookup) -> bool | None:
        """Receives the answers if they are there, or come within what this step may still wait.

        Returns: True if every stage has answered, False if a call has failed; None: no answer yet.
        """
        answers: list[Lookup] = []
        is_repeated = bool(lookup.answers)  # The pool may wait for a tier before it answers.
        for session, call in zip(self._stages.sessions, lookup.calls, strict=True):
            wait_s = 0.0 if is_repeated else self._budget.wait_s(lookup.sent_at)  # Other requests need the budget.
            if not wait_s and not call.done():
                return None
            asked_at = time.monotonic()
            try:
                answer = call.result(wait_s)
            except KVPoolError as error:
                session.report(error, "lookup")
                self._recorder.add("lookup_failures")
                if not is_repeated:  # vLLM may have asked long after the call has failed.
                    self._budget.answered(min(lookup.took_s, self._config.lookup_timeout_ms / 1000))
                self.abandon(lookup)
                return False
            finally:
                self._budget.waited(time.monotonic() - asked_at)
            if answer is None:
                return None
            answers.append(answer)
            session.report(None, "lookup")
        lookup.calls = []
        self._recorder.add("lookups")
        if not is_repeated:
            self._recorder.observe("lookup_seconds", took_s := lookup.took_s)
            self._budget.answered(took_s)
        self._keep(lookup, answers)
        return True

    def _keep(self, lookup: RequestLookup, answers: Sequence[Lookup]) -> None:
        self.release(lookup.lease_ids)  # Of the answers before these, whose own leases are there now.
        lookup.lease_ids = tuple(answer.lease_id for answer in answers)
        lookup.answers = answers
        ttl_ms = min(answer.lease_ttl_ms for answer in answers) or self._config.load_timeout_ms
        lookup.good_until = lookup.sent_at + max(ttl_ms - self._config.load_timeout_ms, ttl_ms // 2) / 1000
        asked = enumerate(zip(self._geometry.groups, lookup.firsts, lookup.runs, strict=True))
        found = (
            availability(group.kind, first, len(run), [answer.hits[idx] for answer in answers])
            for idx, (group, first, run) in asked
        )
        lookup.ready, lookup.promised = zip(*found, strict=True)
        lookup.found = lookup.ready if all(lookup.lease_ids) else ()
        lookup.num_ready = sum(
            max(hits.num_leading, hits.complete.bit_count()) for each in answers for hits in each.hits
        )
        lookup.retry_s = max(answer.retry_after_ms for answer in answers) / 1000
        lookup.proven = {
            probe.group_idx
            for nth, probe in enumerate(lookup.probes, len(lookup.runs))
            if all(answer.hits[nth].num_leading for answer in answers)
        }

    def finish(self, lookup: RequestLookup) -> None:
        """Cancels a lookup that brings no hit, and is not sent again: a request waits once, and is counted once."""
        self.cancel(lookup)
        lookup.found = ()
        lookup.good_until = math.inf

    def cancel(self, lookup: RequestLookup) -> None:
        """Releases the leases of a lookup, also those that a late answer will bring."""
        self.release(lookup.lease_ids)
        lookup.lease_ids = ()
        self.abandon(lookup)

    def abandon(self, lookup: RequestLookup) -> None:
        """Waits no longer for the calls under way; their leases are released when they are answered."""
        for session, call in zip(self._stages.sessions, lookup.calls, strict=False):
            call.on_done(functools.partial(self._release_late, session))
        lookup.calls = []

    def release(self, lease_ids: Sequence[int]) -> None:
        """Releases leases, one per stage, with the next `flush`."""
        if any(lease_ids):
            self._released.append(tuple(lease_ids))

    def flush(self) -> None:
        """Tells the pool of all leases that were released: one call per stage, which is not waited for."""
        released, self._released = self._released, []  # Once, even where that fails: leases expire by themselves.
        for session, lease_ids in zip(self._stages.sessions, zip(*released, strict=True), strict=False):
            session.client.rpc.release_quietly(*lease_ids)

    def _release_late(self, session: Session, pending: PendingLookup) -> None:
        """Releases the lease of an answer that nobody waits for. Runs on the thread that has received it."""
        with self._recorder.guard.part("the release of a late answer's lease"), suppress(KVPoolError):
            found = pending.result(0)
            if found is not None:
                session.client.rpc.release_quietly(found.lease_id)
