"""The benchmark over a link: every byte arrives, its figures, and what it says where there can be no link."""

from typing import Any

import pytest

from benchmarks.cases import wan
from benchmarks.harness import measuring as harness
from testbed.link import DELAY_MS, LOSS, why_not


@pytest.mark.parametrize("how", [{}, {"loss": 20 * LOSS}, {"congestion": "reno", "delay_ms": 2 * DELAY_MS}])
def test_what_is_put_over_a_slow_and_lossy_link_is_what_comes_back(how: dict[str, Any]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    taken = wan.measure(mib=8, rounds=3, **how)  # Compares every byte of every get.
    assert {name: len(seconds) for name, seconds in taken.items()} == dict.fromkeys(
        ("put", "get", "bare put", "bare get"), 3
    )


def test_figures_are_rates_and_ratios_of_the_same_round():
    taken = {"put": [0.002, 0.004], "bare put": [0.001, 0.001], "get": [0.001, 0.001], "bare get": [0.002, 0.002]}
    rows = {row.what: row.figure.figure for row in wan.rows_of("link", taken, 1)}
    assert rows["link: tcp put"] == pytest.approx((1 << 20) / 0.003 / 1e9)
    assert rows["link: tcp / bare, put"] == pytest.approx((0.5 + 0.25) / 2)
    assert rows["link: tcp / bare, get"] == 2


def test_where_there_can_be_no_link_it_is_skipped_and_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(wan, "why_not", lambda: "not here")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    wan.main()
    assert "skipped" in (said := capsys.readouterr().out) and "not here" in said
    assert not (tmp_path / "results").exists()
