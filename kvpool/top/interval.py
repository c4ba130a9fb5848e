"""The rates of a pool between two snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.protocol.server_stats import since
from kvpool.v1 import pool_pb2 as pb


@dataclass(frozen=True, slots=True)
class Interval:
    """Two snapshots of one pool, `seconds` apart. No rate is negative.

    After a restart of the server its counts begin anew: `of` then takes the time from the server's start instead.
    """

    before: pb.StatsResponse
    now: pb.StatsResponse
    seconds: float
    restarted: bool = False

    @classmethod
    def of(cls, before: pb.StatsResponse, now: pb.StatsResponse, seconds: float) -> Interval:
        """The interval that ends with `now`.

        Args:
            seconds: by the caller's clock.
        """
        restarted = before.boot_token != now.boot_token
        if restarted:
            before = pb.StatsResponse()
            seconds = min(seconds, now.server.uptime_seconds) if now.HasField("server") else seconds
        return cls(before, now, max(seconds, 1e-3), restarted)

    def count(self, name: str) -> int:
        """How much a counter of the pool grew."""
        return max(0, self.now.counters.get(name, 0) - self.before.counters.get(name, 0))

    def per_second(self, count: float) -> float:
        """A count of the interval as a rate."""
        return count / self.seconds

    @property
    def server(self) -> pb.ServerStats:
        """The server's RPCs, transfers and usage within the interval; all else is as now."""
        return since(self.now.server, self.before.server)
