"""Whether a tier gets calls."""

from __future__ import annotations

import pytest

from kvpool_server.tiers.health import AWAY_S, Health
from kvpool_server.tiers.tier import TierError
from tests.support.clock import FakeClock


def test_health_survives_any_number_of_failures() -> None:
    clock = FakeClock()
    health = Health("tier", clock)
    for _ in range(3_000):
        with pytest.raises(TierError), health.call():
            raise TierError("gone")
    assert not health.up
    clock.advance(AWAY_S[1] + 1)
    assert health.up and not health.works
    with health.call():
        pass
    assert health.works
