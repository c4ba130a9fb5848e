"""Which blocks are evicted when the arena is full."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool_server.cache.eviction.evictor import Evictor, SearchCutError
from kvpool_server.cache.eviction.hit_density import HitDensity
from kvpool_server.cache.eviction.policy import EXPIRED, TICK, Policy, PrefixLRU

POLICIES: Mapping[str, type[Policy]] = {"density": HitDensity, "lru": PrefixLRU}
"""The values of `--policy`, and the policy that each names."""

DEFAULT_POLICY = "density"


__all__ = ["DEFAULT_POLICY", "EXPIRED", "POLICIES", "TICK", "Evictor", "Policy", "SearchCutError"]
