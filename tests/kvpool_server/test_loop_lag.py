"""How late the event loop was, over the last minute and no longer."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvpool_server.process import loop_lag
from kvpool_server.process.loop_lag import MIN_PROBES, WINDOW_S, Lag, LoopLag


def test_quantiles_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(loop_lag.time, "monotonic", lambda: now)
    lag = LoopLag(CollectorRegistry())
    assert lag.last_minute() == Lag()
    for nth in range(MIN_PROBES - 1):
        lag._observe(0.5 if nth < 20 else 0.001, now)
    assert lag.last_minute() == Lag(0.001, 0.0, 0.5), "too few probes for a 99th percentile"
    lag._observe(0.001, now)
    assert lag.last_minute() == Lag(0.001, 0.5, 0.5)
    now += WINDOW_S + 1
    lag._observe(0.002, now)
    assert lag.last_minute() == Lag(0.002, 0.0, 0.002)
    for _ in range(10_000):
        lag._observe(0.003, now)
    assert lag.last_minute() == Lag(0.003, 0.003, 0.003)
