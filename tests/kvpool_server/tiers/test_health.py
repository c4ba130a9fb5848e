"""When calls are sent to a tier, and what the log says of it."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvpool_server.tiers.health import AWAY_S, Health
from kvpool_server.tiers.tier import TierError
from tests.contracts.tier_contract import awaited
from tests.support.clock import FakeClock


@awaited
async def test_a_tier_that_fails_gets_no_calls_for_a_while() -> None:
    clock = FakeClock()
    health = Health("tier", clock)
    for _ in range(3_000):
        with pytest.raises(TierError), health.call():
            raise TierError("gone")
    assert not health.is_available
    clock.advance(AWAY_S[1] + 1)
    assert health.is_available and not health.is_working
    with health.call():
        pass
    assert health.is_working


@awaited
async def test_questions_log_nothing_and_a_missing_answer_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.tiers.health.ANSWER_S", 0.01)
    health = Health("tier")
    with capture_logs() as logs, health.call(), health.call():
        await asyncio.sleep(0.05)  # Both calls are late.
        before = len(logs)
        assert not health.is_available and not health.is_working
        assert len(logs) == before
    assert [line["event"] for line in logs] == ["a tier does not answer and gets no calls until it does"]
