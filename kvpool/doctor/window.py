"""How the counters of a pool have grown lately: what is over is no problem any more.

The dashboard has samples of the last `RECENT_S`. A command has one snapshot, or two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.protocol.text import duration_text
from kvpool.v1 import pool_pb2 as pb

RECENT_S = 600.0
"""What was counted within this time is recent."""
LOOK_S = 1.0
"""Between the two snapshots of a command."""
SINCE_START = "since the server's start"

Key = tuple[str, ...]
"""A counter: ("expired_leases",) of the pool, ("tier", its name, "corrupt_blocks") of a tier."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that ends now.

    Args:
        grown: by how much a counter grew.
        when: the time, for texts: "in the last 10 minutes".
    """

    grown: Callable[[Key], int]
    when: str


def total(stats: pb.StatsResponse, key: Key) -> int:
    """A counter since the server's start."""
    if len(key) == 1:
        return stats.counters.get(key[0], 0)
    return sum(tier.counters.get(key[2], 0) for tier in stats.tiers if tier.name == key[1])


def window_of(now: pb.StatsResponse, before: pb.StatsResponse | None = None, seconds: float = 0.0) -> Window | None:
    """The time since the server's start, if it is recent, or else since an earlier snapshot; None without one.

    Args:
        seconds: since `before`.
    """
    if now.HasField("server") and now.server.uptime_seconds <= RECENT_S:
        return Window(lambda key: total(now, key), SINCE_START)
    if before is None or before.boot_token != now.boot_token:
        return None
    when = f"in the last {duration_text(max(seconds, 1.0))}"
    return Window(lambda key: max(0, total(now, key) - total(before, key)), when)
