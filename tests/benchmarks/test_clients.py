"""The figures of benchmarks.cases.clients: who got how much."""

from __future__ import annotations

import pytest

from benchmarks.cases.clients import WORKS, ServerCpu, Tally, measure, rows_of
from benchmarks.harness.measuring import server_process


def test_the_client_that_got_least_decides_what_is_fair() -> None:
    rows = {
        row.what: row
        for row in rows_of("work", [Tally([0.1] * 3), Tally([0.1] * 1, ["late"])], 2.0, ServerCpu(1.5, 1.0))
    }
    assert rows["2 clients, work: per second"].figure == 2
    assert rows["2 clients, work: slowest client over mean"].figure == 0.5
    assert rows["2 clients, work: slowest client over fastest"].figure == pytest.approx(1 / 3)
    assert rows["2 clients, work: errors, timeouts among them"].met is False
    assert rows["2 clients, work: server's cores in use"].figure == 0.75
    assert rows["2 clients, work: server's CPU a call"].figure == 375_000
    assert rows["2 clients, work: event loop's CPU a call"].figure == 250_000


@pytest.mark.parametrize("work", WORKS)
def test_clients_work_at_once(work: str) -> None:
    with server_process("64MiB") as server:
        tallies, cpu = measure(server, work, 2, 0.5)
    assert len(tallies) == 2
    assert all(tally.seconds for tally in tallies)
    # A busy machine may miss the deadline that users have by default.
    assert not [error for tally in tallies for error in tally.errors if not error.startswith("PoolTimeoutError")]
    assert 0 < cpu.event_loop <= cpu.process
