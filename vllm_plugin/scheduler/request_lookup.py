"""One request's lookup: what was asked, what is under way, what the pool has answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvpool.rpc import PendingLookup
from kvpool.types import BlockRun
from vllm_plugin.model.hit_rules import Found
from vllm_plugin.scheduler.availability import Availability
from vllm_plugin.scheduler.load_policy import Verdict
from vllm_plugin.scheduler.promotion_wait import PromotionWait


@dataclass(slots=True)
class RequestLookup:
    """What was asked and answered (written by `Lookups`), and what follows from it (written by `Admission`).

    Args:
        local: tokens that the engine had itself when the lookup was sent.
        limit: tokens that the hit may not exceed.
        runs: blocks that were asked for, one run a group.
        probes: the last block of each group that the engine had itself.
        firsts: index of each run's first block.
        sent_at: monotonic seconds of the last sending.
        calls: one a stage, while they are under way; empty once answered.
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
        verdict: whether the hit is worth loading; None until it was judged.
    """

    local: int
    limit: int
    runs: list[BlockRun]
    probes: list[BlockRun]
    firsts: list[int]
    wait: PromotionWait
    sent_at: float = 0.0
    calls: list[PendingLookup] = field(default_factory=list)
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

    def must_be_sent_again(self, local: int) -> bool:
        """Whether the engine has fewer tokens than the lookup assumes, or the leases of its answer may expire."""
        return self.local > local or (not self.calls and time.monotonic() > self.good_until)
