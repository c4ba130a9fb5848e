"""Server and client on two machines, with 1 ms of delay and 0.1 % of loss between them: every byte arrives."""

from typing import Any

import pytest

from benchmarks.cases import wan
from benchmarks.harness.link import DELAY_MS, LOSS, why_not
from tests.support.effort import some


@pytest.fixture(autouse=True, scope="module")
def _permitted() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.parametrize("how", some(1, [{}, {"loss": 20 * LOSS}, {"congestion": "reno", "delay_ms": 2 * DELAY_MS}]))
def test_what_is_put_over_a_slow_and_lossy_link_is_what_comes_back(how: dict[str, Any]) -> None:
    taken = wan.measure(mib=8, rounds=3, **how)  # Compares every byte of every get.
    assert {name: len(seconds) for name, seconds in taken.items()} == dict.fromkeys(
        ("put", "get", "bare put", "bare get"), 3
    )
