"""What more memory, or less, would be worth: hit ratios by arena size, as a server has simulated them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Arena sizes that a server simulates, as multiples of the present one."""
MAX_CURVES = 64
"""Most curves in one answer."""
MAX_ESTIMATES = 16
"""Most sizes of a curve in an answer."""
USUAL_ERROR = 0.01
"""The error that estimates are taken to have at least: benchmarks/results/value.json has those of known traces."""


@dataclass(frozen=True, slots=True)
class ValueEstimate:
    """Of one arena size.

    Args:
        size: as a multiple of the present arena.
        hit_ratio: tokens hit in memory over tokens looked up.
        hit_ratio_with_tiers: tokens hit in memory or in a tier; as `hit_ratio` without tiers.
        uncertainty: how far both may be off, as a hit ratio; 0 of a server that does not say.
    """

    size: float
    hit_ratio: float
    hit_ratio_with_tiers: float
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class ValueCurve:
    """Of a tenant, or of all.

    Args:
        tenant: "" where engines give none.
        lookup_tokens, hit_tokens: what was looked up, and what the pool hit; older lookups count less.
        simulated_hit_ratio: at the present size, by simulation alone.
        estimates: by size, ascending; empty if nothing was looked up.
        is_total: of all tenants together.
        is_rest: of all tenants without a curve of their own.
    """

    tenant: str
    lookup_tokens: float = 0.0
    hit_tokens: float = 0.0
    simulated_hit_ratio: float = 0.0
    estimates: Sequence[ValueEstimate] = ()
    is_total: bool = False
    is_rest: bool = False

    @property
    def hit_ratio(self) -> float:
        """What the pool itself has counted; with tiers, blocks that came up from one are hits."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def uncertainty(self) -> float:
        """How far the worst of the estimates may be off, as a hit ratio.

        At the present size the truth is known: the simulation is taken to be as wrong at the others, at least.
        """
        off = abs(self.simulated_hit_ratio - self.hit_ratio)
        return max(USUAL_ERROR, off, *(each.uncertainty for each in self.estimates))


@dataclass(frozen=True, slots=True)
class ValueReport:
    """The curves of a server.

    Args:
        enabled: False: the server simulates nothing.
        seconds: of traffic that the counts stand for.
        left_out: lookups and puts that were not simulated, because too many came at once.
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
