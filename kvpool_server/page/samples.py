"""The last hour of the numbers that the page's charts draw: a sample every 10 s. Belongs to the event loop."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpool.v1 import pool_pb2 as pb

INTERVAL_S = 10
"""Between two samples."""
KEPT_S = 3_600
"""Age of the oldest sample."""
OF_POOL = ("arena_bytes", "free_bytes")
COUNTERS = ("lookups", "lookup_hits", "evicted_blocks", "quota_evicted_blocks")
OF_USAGE = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "saved_seconds", "lost_seconds")
"""Summed over models and tenants."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of one time.

    Args:
        at: monotonic seconds.
        counters: a snapshot of the pool's and the tiers' counters alone.
        drawn: what `drawn` returns, as JSON.
    """

    at: float
    counters: pb.StatsResponse
    drawn: bytes


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON, which has no NaN."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def drawn(stats: pb.StatsResponse, unix_seconds: float) -> dict[str, Any]:
    """The numbers of a snapshot that the charts draw: gauges, and counters since the server's start."""
    server = stats.server
    lookups = (each.buckets for each in server.rpcs if (each.method, each.status) == ("Lookup", "OK"))
    return {
        "boot": f"{stats.boot_token:016x}",  # A text: JavaScript's numbers have too few digits.
        "time": round(unix_seconds, 3),
        **{name: getattr(stats, name) for name in OF_POOL},
        **{name: stats.counters.get(name, 0) for name in COUNTERS},
        **{name: sum(getattr(used, name) for used in server.usage) for name in OF_USAGE},
        "promoted_blocks": [tier.counters.get("promoted_blocks", 0) for tier in stats.tiers],
        "lookup_buckets": list(next(lookups, ())),
        "loop_lag_p50_seconds": server.loop_lag_p50_seconds,
        "loop_lag_p99_seconds": server.loop_lag_p99_seconds,
    }


class Samples:
    """The samples of the last `KEPT_S`.

    Args:
        clock: monotonic seconds.
        unix_time: seconds since 1970, read once, so that a step of the host's clock does not disorder the samples.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time):
        self._clock = clock
        self._offset = unix_time() - clock()
        self._kept: deque[Sample] = deque(maxlen=KEPT_S // INTERVAL_S + 1)

    def make(self, stats: pb.StatsResponse) -> Sample:
        """A sample of a snapshot that was taken now."""
        at = self._clock()
        counters = pb.StatsResponse(boot_token=stats.boot_token, counters=stats.counters, tiers=stats.tiers)
        return Sample(at, counters, encoded(drawn(stats, at + self._offset)))

    def add(self, stats: pb.StatsResponse) -> None:
        """Keeps a sample of a snapshot, in place of the oldest sample if there are too many."""
        self._kept.append(self.make(stats))

    def kept(self) -> list[Sample]:
        """The samples, the oldest first."""
        return list(self._kept)

    def before(self, seconds: float) -> pb.StatsResponse | None:
        """The counters of the newest sample that is at least this old, or of the oldest one; None without samples."""
        latest = self._clock() - seconds
        old = [sample for sample in self._kept if sample.at <= latest]
        return (old[-1] if old else self._kept[0]).counters if self._kept else None
