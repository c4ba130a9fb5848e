"""What tests of the cache are given: each eviction policy, and a clock that stands still."""

from __future__ import annotations

import pytest

from kvpool_server.cache.eviction import POLICIES, Policy
from tests.support.clock import FakeClock


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> type[Policy]:
    return POLICIES[request.param]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
