"""Many servers that read from one another, simulated around real pools: what befalls them costs hits, and no more."""

import pytest

from benchmarks.cases.peers import MANY_SERVERS, ROUTERS, SERVERS, measure_troubles


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "num_servers",
    [
        SERVERS[0],
        *(
            pytest.param(each, marks=[pytest.mark.more, pytest.mark.timeout(900)])
            for each in (SERVERS[1], MANY_SERVERS)
        ),
    ],
)
def test_a_fleet_of_any_size_goes_on_with_as_few_messages(num_servers: int, router: str) -> None:
    rows = {row.what: row for row in measure_troubles(num_servers, router)}
    missed = {what: row.figure for what, row in rows.items() if row.met not in (None, True)}
    assert not missed
