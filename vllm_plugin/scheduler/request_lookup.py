"""One request's lookup: what was asked, which blocks the pool has, and how long the request waits for more of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.rpc import KeptRuns, PendingLookup
from kvpool.types import BlockRun, LeasedSlots, Lookup, RunHits
from vllm_plugin.model.hit_rules import Found
from vllm_plugin.model.kinds import Kind
from vllm_plugin.scheduler.load_policy import Verdict

STUCK_S = 0.25
"""A tier that has brought no block for so long, and over two more answers, may have lost them: the wait ends."""
MAX_ANSWER_S = 0.2
"""The longest that the pool may wait for a tier before it answers: from the answers the wait learns of progress."""


class PromotionWait:
    """The wait of one request, over all its lookups, for blocks on their way up from a tier.

    A request waits no longer than computing the blocks would take, and not for a tier that brings nothing. `now` is
    monotonic seconds.

    Args:
        wait_s: the longest wait; 0: the request takes the blocks that are ready at once.

    Attributes:
        began_at: when an answer first said that blocks are on their way; infinite until then.
    """

    def __init__(self, wait_s: float):
        self.began_at = math.inf
        self._ends_at = math.inf
        self._due_at = math.inf
        self._num_ready = -1
        self._progress_at = -math.inf
        self._wait_s = wait_s

    def lasts(
        self, now: float, num_ready: int, compute_s: float, retry_s: float, asked_at: float | None = None
    ) -> bool:
        """Whether to ask again, after an answer with blocks on their way.

        Args:
            num_ready: blocks that are ready, in any measure that grows with them.
            compute_s: seconds of computing the blocks on their way; infinite while unknown.
            retry_s: when more blocks are likely to be up. If that is too late, the wait ends at once.
            asked_at: when the pool was asked that could wait with its answer; None for the first answer. A pool that
                answers at once all the same is not asked again before `retry_s` have passed since.
        """
        if math.isinf(self.began_at):
            self.began_at, self._ends_at = now, now + self._wait_s
        if num_ready > self._num_ready:
            self._num_ready, self._progress_at = num_ready, now
        self._ends_at = min(self._ends_at, now + compute_s)
        self._due_at = now if asked_at is None else asked_at + retry_s
        return now + retry_s < self._ends_at and now - self._progress_at < max(STUCK_S, 2 * retry_s)

    def is_due(self, now: float) -> bool:
        """Whether it is time to ask again."""
        return now >= self._due_at

    def answer_s(self, now: float) -> float:
        """How long the pool may wait for the tier before it answers, so that its answer comes before the end."""
        return min(MAX_ANSWER_S, max(0.0, self._ends_at - now) / 2)

    def has_ended(self, now: float) -> bool:
        return now >= self._ends_at


@dataclass(frozen=True, slots=True)
class Availability:
    """Which blocks of one group the pool has, by the answers of all pipeline stages to one lookup.

    Bit i of a bitmap is the i-th block that was asked for.

    Args:
        first: index of the first block that was asked for.
        length: how many blocks were asked for.
        ready: every stage has the block.
        coming: every stage has the block, or it may be on its way up from a tier.
    """

    first: int
    length: int
    ready: int
    coming: int

    @classmethod
    def of(cls, kind: Kind, first: int, length: int, stages: Iterable[RunHits]) -> Availability:
        """By the answers of all stages.

        An answer says how many blocks are on their way up. For a group that needs its whole prefix they are taken to be
        those right behind the leading ones: with `prefix_only` they are, and others would not lengthen a hit. For any
        other kind one of them may be all that a hit lacks, whichever it is.
        """
        ready = coming = everything = (1 << length) - 1
        for hits in stages:
            here = hits.complete | (1 << hits.num_leading) - 1
            ready &= here
            if kind.needs_prefix:
                coming &= here | (1 << hits.num_leading + hits.num_pending) - 1
            elif not hits.num_pending:
                coming &= here
        return cls(first, length, ready & everything, coming & everything)

    def found(self) -> Found:
        return Found(self.first, self.ready, self.length)

    def promised(self) -> Found:
        """What will be found once all blocks are ready that are on their way."""
        return Found(self.first, self.coming, self.length)

    def missing(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """The names of blocks that are neither ready nor on their way."""
        if not self.coming:
            return names
        if self.coming == (1 << self.length) - 1:
            return ()
        bits = reversed(f"{self.coming:0{self.length}b}")
        return [name for bit, name in zip(bits, names, strict=True) if bit == "0"]


@dataclass(slots=True)
class RequestLookup:
    """What was asked and answered (written by `Lookups`), and what follows from it (written by `Admission`).

    Args:
        local: tokens that the engine had itself when the lookup was sent.
        limit: tokens that the hit may not exceed.
        runs: blocks that were asked for, one run a group.
        probes: the last block of each group that the engine had itself.
        firsts: index of each run's first block.
        question: the runs and the probes, as they are sent each time.
        sent_at, answered_at: monotonic seconds of the last sending, and of its answer; vLLM may ask long after that.
        calls: one a stage, while they are under way; empty once answered.
        answers: the newest, one a stage.
        lease_ids: one a stage, of the newest answer.
        good_until: by when a load must have begun; then the lookup is sent again.
        availability, found: one a group, of the newest answer; `found` is empty without leases.
        num_ready: blocks that the newest answer says are ready, in a measure that grows while a tier brings more.
        retry_s: after how many seconds the pool wants to be asked again; 0: no block is on its way up from a tier.
        proven: groups whose probe the pool has, by the newest answer.

        asked: tokens that the engine had itself when vLLM asked last.
        wait: for blocks on their way up from a tier, over all lookups of the request.
        is_waiting: the newest answer is not final, because such blocks are waited for.
        coming_tokens: by how many tokens such blocks would lengthen the hit.
        searched: (asked, limit) of the last search for the longest hit.
        boundary: the longest hit; `local` if there is none, or none that is worth its load.
        verdict: how much of the hit is worth loading; None until it was judged.
        most: nothing is loaded beyond this token.
        is_declined: a part of the hit is computed, or all of it.
        traceparent: of its span; empty if it has none.
    """

    local: int
    limit: int
    runs: list[BlockRun]
    probes: list[BlockRun]
    firsts: list[int]
    wait: PromotionWait
    question: KeptRuns = field(init=False)
    sent_at: float = 0.0
    answered_at: float = math.inf
    calls: list[PendingLookup] = field(default_factory=list)
    answers: Sequence[Lookup] = ()
    lease_ids: tuple[int, ...] = ()
    good_until: float = 0.0
    availability: list[Availability] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    num_ready: int = 0
    retry_s: float = 0.0
    proven: set[int] = field(default_factory=set)

    asked: int = 0
    is_waiting: bool = False
    coming_tokens: int = 0
    searched: tuple[int, int] | None = None
    boundary: int = 0
    verdict: Verdict | None = None
    most: float = math.inf
    is_declined: bool = False
    traceparent: str = ""

    def __post_init__(self) -> None:
        self.question = KeptRuns((*self.runs, *self.probes))

    def answered(self, _: PendingLookup) -> None:
        """A call has ended. Runs on another thread."""
        self.answered_at = time.monotonic()

    def leased(self, idx: int, start: int, stop: int) -> tuple[LeasedSlots | None, ...]:
        """Where blocks [start, stop) of a group lie, one a stage, as far as the answers say it."""
        first = self.firsts[idx]
        return tuple(answer.leased(idx, start - first, stop - first) for answer in self.answers)

    def must_be_sent_again(self, local: int) -> bool:
        """Whether the engine has fewer tokens than the lookup assumes, or the leases of its answer may expire."""
        return self.local > local or (not self.calls and time.monotonic() > self.good_until)
