"""When calls are sent to a tier, and what the log says of it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from kvpool_server.tiers.calls import AWAY_S, Health
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
    monkeypatch.setattr("kvpool_server.tiers.calls.ANSWER_S", 0.01)
    health = Health("tier")
    with capture_logs() as logs, health.call(), health.call():
        await asyncio.sleep(0.05)  # Both calls are late.
        before = len(logs)
        assert not health.is_available and not health.is_working
        assert len(logs) == before
    assert [line["event"] for line in logs] == ["a tier does not answer and gets no calls until it does"]


@awaited
async def test_failures_in_a_row_are_one_error_and_the_end_is_told() -> None:
    clock = FakeClock()
    health = Health("tier", clock)
    with capture_logs() as logs:
        for nth in range(6):
            clock.advance(AWAY_S[1] + 1)
            with contextlib.suppress(TierError), health.call():
                if nth in (0, 1, 2, 5):
                    raise TierError("gone")
    failed = "a tier has failed and gets no calls for a while"
    told = [(line["log_level"], line["event"]) for line in logs if line["log_level"] != "debug"]
    assert told == [("error", failed), ("info", "a tier works again"), ("error", failed)]
