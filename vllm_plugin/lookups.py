"""Lookups of the scheduler's side: sent once a request, answered while other requests are scheduled.

A request's first answer is "ask again" while its lookup is under way. An answer may be thrown away or cut by the
scheduler, so asking again costs nothing and changes nothing. Every pipeline stage has a namespace of its own; a block
is there if every stage has it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.client import PendingLookup
from kvpool.errors import KVPoolError, UnavailableError
from kvpool.types import BlockRun, Lookup
from vllm_plugin.boundary import Found, Reach, Rule, longest
from vllm_plugin.config import MAX_LOOKUP_WAIT_MS, ConnectorConfig
from vllm_plugin.economy import Verdict
from vllm_plugin.metrics import Recorder
from vllm_plugin.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Sought:
    """A request's lookup.

    Args:
        local: tokens that the engine had itself when it was sent.
        asked: the same when the engine last asked.
        runs: what was asked for, one a group.
        firsts: index of each run's first block.
        pending: the calls; empty once answered.
        found: one a group, once answered.
        boundary: the longest hit; `local` if there is none, or none that is worth its load.
        searched: between which tokens it was searched for last.
        verdict: what was said of it; None until then.
        lease_ids: one a stage.
        good_until: by when a load must have begun.
    """

    local: int
    asked: int
    limit: int
    sent_at: float
    runs: list[BlockRun]
    firsts: list[int]
    pending: list[PendingLookup]
    found: list[Found] = field(default_factory=list)
    boundary: int = 0
    searched: tuple[int, int] | None = None
    verdict: Verdict | None = None
    lease_ids: tuple[int, ...] = ()
    good_until: float = 0.0


class Lookups:
    """Those of one engine.

    Args:
        rules: one a group.
        alignment, hash_tokens: of boundaries and of block hashes, in tokens.
        sessions: one a stage; empty until the stages are known.
        missing: told which blocks of a group a lookup has not found.
        verdict: of a hit between two boundaries.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        alignment: int,
        hash_tokens: int,
        sessions: Sequence[Session],
        config: ConnectorConfig,
        recorder: Recorder,
        missing: Callable[[int, Sequence[bytes]], None],
        verdict: Callable[[int, int], Verdict],
    ):
        self._rules = rules
        self._alignment = alignment
        self._hash_tokens = hash_tokens
        self._sessions = sessions
        self._config = config
        self._recorder = recorder
        self._missing = missing
        self._verdict = verdict
        self._prefix_only = all(rule.reach is Reach.ALL for rule in rules)
        self._sought: dict[str, Sought] = {}
        self._waited_s = 0.0

    def __len__(self) -> int:
        return len(self._sought)

    def new_step(self) -> None:
        """Lookups may wait a little again."""
        self._waited_s = 0.0

    def boundary(self, request: Request, local: int) -> int | None:
        """The longest hit beyond `local` tokens that the engine has itself; `local` for none; None: ask again."""
        # The last token is always computed: its logits are what the request is waiting for.
        limit = (request.num_tokens - 1) // self._alignment * self._alignment
        if limit <= local or not self._sessions:
            return local
        sought = self._sought.get(request.request_id)
        if sought is None or sought.local > local or (not sought.pending and time.monotonic() > sought.good_until):
            verdict = None if sought is None else sought.verdict  # A hit is judged once.
            self.forget(request.request_id)
            sought = self._send(request, local, limit)
            if sought is None:
                return local
            sought.verdict = verdict
        if sought.pending and not self._receive(sought):
            return None
        sought.asked = local
        if sought.found and sought.searched != (local, limit):
            sought.searched = (local, limit)
            sought.boundary = longest(self._rules, sought.found, local, min(limit, sought.limit), self._alignment)
            self._judge(sought)
        return max(local, sought.boundary)

    def _judge(self, sought: Sought) -> None:
        """Once a hit: whether loading it is worth while."""
        if sought.verdict is None and sought.boundary > sought.asked:
            sought.verdict = self._verdict(sought.asked, sought.boundary)
        if sought.verdict is not None and not sought.verdict.take:
            self.let_go(sought)
            sought.found, sought.boundary = [], sought.local
            sought.good_until = math.inf  # Asking again would count again.

    def take(self, request_id: str) -> Sought | None:
        """Hands over a lookup with its leases, if there is one."""
        return self._sought.pop(request_id, None)

    def let_go(self, sought: Sought) -> None:
        """Ends the leases of a lookup, also of one that is not answered yet."""
        self.release(sought.lease_ids)
        sought.lease_ids = ()
        for session, pending in zip(self._sessions, sought.pending, strict=False):
            # The answer may bring a lease that nobody wants any more.
            pending.on_done(functools.partial(_release_late, session))

    def forget(self, request_id: str) -> None:
        """Ends a lookup, if there is one."""
        sought = self.take(request_id)
        if sought is not None:
            self.let_go(sought)

    def forget_all(self) -> None:
        for request_id in list(self._sought):
            self.forget(request_id)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Ends leases without waiting, one a stage."""
        for session, lease_id in zip(self._sessions, lease_ids, strict=False):
            session.client.release_quietly(lease_id)

    def junction(self, sought: Sought) -> int:
        """Where a request parts from what the pool knows, if a hit falls short of it for want of windows; else 0."""
        leading = [
            blocks.leading * rule.block_tokens
            for rule, blocks in zip(self._rules, sought.found, strict=False)
            if rule.reach is Reach.ALL
        ]
        known = min(leading, default=0) // self._alignment * self._alignment
        return known if known > sought.boundary else 0

    def _send(self, request: Request, local: int, limit: int) -> Sought | None:
        namespaces = [session.namespace for session in self._sessions]
        runs, firsts = [], []
        for idx, rule in enumerate(self._rules):
            first = local // rule.block_tokens
            stop = min(len(request.block_hashes) * self._hash_tokens // rule.block_tokens, rule.end(limit))
            runs.append(block_run(request, idx, rule, self._hash_tokens, first, max(first, stop)))
            firsts.append(first)
        pending: list[PendingLookup] = []
        sought = Sought(local, local, limit, time.monotonic(), runs, firsts, pending, boundary=local)
        for session, namespace in zip(self._sessions, namespaces, strict=True):
            try:
                if namespace is None:
                    raise UnavailableError("kvpool is away")
                pending.append(session.client.lookup_async(namespace, runs, prefix_only=self._prefix_only))
            except UnavailableError:
                self.let_go(sought)
                return None
        self._sought[request.request_id] = sought
        return sought

    def _receive(self, sought: Sought) -> bool:
        """Takes the answers if they are there, or come within what this step may still wait."""
        answers: list[Lookup] = []
        for session, pending in zip(self._sessions, sought.pending, strict=True):
            budget_s = max(0.0, MAX_LOOKUP_WAIT_MS / 1000 - self._waited_s)
            asked_at = time.monotonic()
            try:
                answer = pending.result(budget_s)
            except KVPoolError as error:
                session.report(error, "lookup")
                self._recorder.add("lookup_failures")
                self.let_go(sought)
                sought.pending = []
                sought.good_until = math.inf  # One budget of waiting a request, not one a try.
                return True
            finally:
                self._waited_s += time.monotonic() - asked_at
            if answer is None:
                return False
            answers.append(answer)
            session.report(None, "lookup")
        sought.pending = []
        sought.lease_ids = tuple(answer.lease_id for answer in answers)
        found = [self._found(sought, idx, answers) for idx in range(len(self._rules))]
        if all(sought.lease_ids):  # Without a lease nothing keeps the blocks there. A lookup of nothing has none.
            sought.found = found
        ttl_ms = min(answer.lease_ttl_ms for answer in answers) or self._config.load_timeout_ms
        sought.good_until = sought.sent_at + max(ttl_ms - self._config.load_timeout_ms, ttl_ms // 2) / 1000
        self._recorder.add("lookups")
        self._recorder.observe("lookup_seconds", time.monotonic() - sought.sent_at)
        return True

    def _found(self, sought: Sought, idx: int, answers: Sequence[Lookup]) -> Found:
        run = sought.runs[idx]
        length = len(run)
        complete = (1 << length) - 1
        for answer in answers:
            hits = answer.hits[idx]
            complete &= (1 << hits.num_leading) - 1 if self._prefix_only else hits.complete
        if not complete:
            self._missing(idx, run.block_hashes)
        elif complete != (1 << length) - 1:
            bits = reversed(f"{complete:0{length}b}")
            self._missing(idx, [name for bit, name in zip(bits, run.block_hashes, strict=True) if bit == "0"])
        return Found(sought.firsts[idx], complete, length)


def block_run(request: Request, group_idx: int, rule: Rule, hash_tokens: int, first: int, stop: int) -> BlockRun:
    """Blocks [first, stop) of a request. A block of several hash units is named by the last of them."""
    ratio = rule.block_tokens // hash_tokens
    hashes = request.block_hashes
    named = hashes[first:stop] if ratio == 1 else [hashes[(idx + 1) * ratio - 1] for idx in range(first, stop)]
    return BlockRun(group_idx, named, hashes[first * ratio - 1] if first else b"")


def _release_late(session: Session, pending: PendingLookup) -> None:
    try:
        found = pending.result(0)
    except KVPoolError:
        return
    if found is not None:
        session.client.release_quietly(found.lease_id)
