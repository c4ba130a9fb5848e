"""What is known of one request's lookup: what was asked, what is under way, what was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.rpc import PendingLookup
from kvpool.types import BlockRun
from vllm_plugin.model.hit_rules import Found
from vllm_plugin.scheduler.availability import Availability
from vllm_plugin.scheduler.load_policy import Verdict
from vllm_plugin.scheduler.promotion_wait import PromotionWait


@dataclass(slots=True)
class RequestLookup:
    """A request's lookup.

    Args:
        local: tokens that the engine had itself when it was sent.
        asked: the same when the engine last asked.
        runs: what was asked for, one a group.
        probes: the last block of each group that the engine had itself.
        proven: groups of whose probe the newest answer says that the pool has it.
        sent_at: when it was sent last.
        firsts: index of each run's first block.
        wait: with what is on its way up from a tier.
        calls: those under way; empty once answered.
        is_waiting: the newest answer is not final.
        availability, found: one a group, once answered.
        coming_tokens: by how much what is on its way would lengthen the hit.
        boundary: the longest hit; `local` if there is none, or none that is worth its load.
        searched: between which tokens it was searched for last.
        verdict: what was said of it; None until then.
        lease_ids: one a stage, of the newest answer.
        good_until: by when a load must have begun.
    """

    local: int
    asked: int
    limit: int
    runs: list[BlockRun]
    probes: list[BlockRun]
    firsts: list[int]
    wait: PromotionWait
    sent_at: float = 0.0
    calls: list[PendingLookup] = field(default_factory=list)
    is_waiting: bool = False
    availability: list[Availability] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    coming_tokens: int = 0
    boundary: int = 0
    proven: set[int] = field(default_factory=set)
    searched: tuple[int, int] | None = None
    verdict: Verdict | None = None
    lease_ids: tuple[int, ...] = ()
    good_until: float = 0.0
