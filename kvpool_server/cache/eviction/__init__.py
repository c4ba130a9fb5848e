"""Which blocks to let go of. A policy is one name of `POLICIES`; what all share is in `queue`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvpool_server.cache.eviction.base import CHOSEN, TICK, Policy
from kvpool_server.cache.eviction.hit_density import HitDensity
from kvpool_server.cache.eviction.lru import PrefixLRU

POLICIES: Mapping[str, Callable[[], Policy]] = {"density": HitDensity, "lru": PrefixLRU}
"""What `--policy` may say. Each makes a policy."""

DEFAULT_POLICY = "density"

__all__ = ["CHOSEN", "DEFAULT_POLICY", "POLICIES", "TICK", "Policy"]
