"""The rates of a pool between two snapshots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvpool.server_stats import ServerStats, UsageStats
from kvpool.types import PoolStats


@dataclass(frozen=True, slots=True)
class Interval:
    """Two snapshots of one pool, `seconds` apart. No rate is negative.

    After a restart of the server its counts begin anew: `of` then takes the time from the server's start instead.
    """

    before: PoolStats
    now: PoolStats
    seconds: float
    restarted: bool = False

    @classmethod
    def of(cls, before: PoolStats, now: PoolStats, seconds: float) -> Interval:
        """The interval that ends with `now`.

        Args:
            seconds: by the caller's clock.
        """
        uptime_s = now.server.uptime_seconds if now.server is not None else seconds
        if before.boot_token == now.boot_token:
            return cls(before, now, max(seconds, 1e-3))
        start = PoolStats(boot_token=now.boot_token, server=ServerStats("") if now.server is not None else None)
        return cls(start, now, max(min(seconds, uptime_s), 1e-3), restarted=True)

    def count(self, name: str) -> int:
        """How much a counter of the pool grew."""
        return max(0, self.now.counters.get(name, 0) - self.before.counters.get(name, 0))

    def per_second(self, count: float) -> float:
        """A count of the interval as a rate."""
        return count / self.seconds

    @property
    def server(self) -> ServerStats | None:
        """The server's RPCs and transfers within the interval; None if the server tells none."""
        if self.now.server is None or self.before.server is None:
            return None
        return self.now.server.since(self.before.server)

    @property
    def usage(self) -> tuple[UsageStats, ...]:
        """What each tenant and model used within the interval; what they hold is as now."""
        if self.now.server is None:
            return ()
        before = {(each.tenant, each.model): each for each in self.before.server.usage} if self.before.server else {}
        return tuple(_minus(each, before.get((each.tenant, each.model))) for each in self.now.server.usage)


_COUNTS = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes")


def _minus(now: UsageStats, before: UsageStats | None) -> UsageStats:
    if before is None:
        return now
    counts = {name: max(0, getattr(now, name) - getattr(before, name)) for name in _COUNTS}
    return dataclasses.replace(now, **counts)
