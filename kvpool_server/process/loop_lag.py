"""Measures how late the server's event loop is: how long a request may wait because the loop does something else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram

from kvpool_server.process.event_loop import FLOW

PROBE_EVERY_S = 0.01
WINDOW_S = 60.0
MIN_PROBES = 1_000
"""Probes before their 99th percentile says something: those of 10 s."""
_BUCKETS = (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the probes of the last minute were, seconds.

    Args:
        p99: 0 until there are `MIN_PROBES`.
    """

    p50: float = 0.0
    p99: float = 0.0
    longest: float = 0.0


class LoopLag:
    """Asks the loop every `PROBE_EVERY_S` to wake a task, and observes how late it does so.

    A pause of the loop that begins between two probes counts from the next probe on, so up to `PROBE_EVERY_S` of a
    pause may go unseen.
    """

    def __init__(self, registry: CollectorRegistry):
        self._seconds = Histogram(
            "kvpool_loop_lag_seconds",
            "How late the event loop woke a task that was due, probed every 10 ms: what a request waits before it is "
            "looked at. Alert if it is often above 0.01.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._window_ends = time.monotonic() + WINDOW_S
        self._longest = self._longest_before = 0.0
        self._probes = np.full((2, int(WINDOW_S / PROBE_EVERY_S)), -np.inf)
        """When the last probes were made, and their lags: float64 [2, probes], a ring."""
        self._count = 0
        longest = Gauge(
            "kvpool_loop_lag_max_seconds",
            "The longest kvpool_loop_lag_seconds of the last one to two minutes.",
            registry=registry,
        )
        longest.set_function(lambda: max(self._longest, self._longest_before))

    def last_minute(self) -> Lag:
        """The lag of the last minute; takes a fraction of a millisecond."""
        probed_at, lags = self._probes
        lags = lags[probed_at >= time.monotonic() - WINDOW_S]
        if not len(lags):
            return Lag()
        p50, p99 = np.quantile(lags, (0.5, 0.99))
        return Lag(float(p50), float(p99) if len(lags) >= MIN_PROBES else 0.0, float(lags.max()))

    async def run(self) -> None:
        """Probes until it is cancelled, as a caller of its own."""
        FLOW.set("probe")
        while True:
            due = time.monotonic() + PROBE_EVERY_S
            await asyncio.sleep(PROBE_EVERY_S)
            now = time.monotonic()
            self._observe(max(0.0, now - due), now)

    def _observe(self, seconds: float, now: float) -> None:
        self._seconds.observe(seconds)
        self._probes[:, self._count % self._probes.shape[1]] = now, seconds
        self._count += 1
        if now >= self._window_ends:
            self._window_ends = now + WINDOW_S
            self._longest, self._longest_before = 0.0, self._longest
        self._longest = max(self._longest, seconds)
