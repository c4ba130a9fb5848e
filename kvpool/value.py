"""What more memory, or less, would be worth: hit ratios by arena size, as a server estimates them from its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Arena sizes that a server estimates hits for, as multiples of the present one."""
MAX_CURVES = 64
"""Most curves in one answer."""
MAX_ESTIMATES = 16
"""Most sizes of a curve in an answer."""


@dataclass(frozen=True, slots=True)
class ValueEstimate:
    """The hits of one arena size.

    Args:
        size: as a multiple of the present arena.
        hit_ratio: tokens hit in memory over tokens looked up, under LRU.
        hit_ratio_with_tiers: tokens hit in memory or in a tier; as `hit_ratio` without tiers.
    """

    size: float
    hit_ratio: float
    hit_ratio_with_tiers: float


@dataclass(frozen=True, slots=True)
class ValueCurve:
    """The hits of a tenant, or of all tenants together, by arena size.

    Args:
        tenant: "" where engines give none.
        lookup_tokens, hit_tokens: tokens looked up, and those that the pool hit; older lookups count less.
        estimates: by size, ascending; empty if nothing was looked up.
        is_total: of all tenants together.
    """

    tenant: str
    lookup_tokens: float = 0.0
    hit_tokens: float = 0.0
    estimates: Sequence[ValueEstimate] = ()
    is_total: bool = False

    @property
    def hit_ratio(self) -> float:
        """The ratio that the pool itself has counted; with tiers, blocks that came up from one are hits."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ValueReport:
    """The curves of a server.

    Args:
        enabled: False if the server estimates nothing.
        policy: eviction policy in use; the estimates are of LRU.
        seconds: of traffic that the counts stand for.
        left_out: lookups and puts that were not counted, because too many came at once.
        sampled_blocks: blocks in the sample.
        cpu_seconds: CPU time that the estimates took, since the start.
        curves: that of all tenants first, if the caller may see it.
    """

    enabled: bool
    arena_bytes: int
    policy: str
    seconds: float = 0.0
    left_out: int = 0
    sampled_blocks: int = 0
    cpu_seconds: float = 0.0
    has_tiers: bool = False
    curves: Sequence[ValueCurve] = ()
