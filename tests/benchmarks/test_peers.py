"""Many servers that read from one another, simulated around real pools."""

from __future__ import annotations

import pytest

from benchmarks.cases.peers import ROUTERS, SERVERS, measure_troubles


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_goes_on_with_few_messages(router: str) -> None:
    rows = {row.what: row for row in measure_troubles(SERVERS[0], router)}
    assert {what: row.figure for what, row in rows.items() if row.met not in (None, True)} == {}
