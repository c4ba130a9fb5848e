"""Figures: medians with the noise of their rounds, reaches, and what a result was before."""

import json

import pytest

from benchmarks.cases.clients import ServerCpu, Tally, rows_of
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Row, Series

ROUNDS = [0.9, 0.95, 1.0, 1.05, 1.1]


def test_an_estimate_is_a_median_with_the_noise_of_its_rounds():
    found = harness.estimate(ROUNDS)
    assert found.figure == 1.0 and 0.9 <= found.low < 1.0 < found.high <= 1.1
    assert harness.estimate(ROUNDS) == found
    many = harness.estimate(ROUNDS * 100)
    assert many.figure == 1.0 and many.high - many.low < found.high - found.low


@pytest.mark.parametrize(
    ("bound", "met"), [(0.5, True), (1.2, False), (0.97, harness.WITHIN_NOISE), (1.03, harness.WITHIN_NOISE)]
)
def test_a_reach_is_met_or_missed_only_beyond_the_noise(bound, met):
    found = harness.estimate(ROUNDS)
    assert harness.at_least("speed", found, "GB/s", bound).met == met
    opposite = {True: False, False: True}.get(met, met)
    assert harness.at_most("time", found, "ms", bound).met == opposite


def test_a_ratio_is_of_the_rounds_and_not_of_the_medians():
    ours, theirs = [1.0, 10.0, 3.0], [2.0, 1.0, 3.0]
    assert harness.time_ratio(ours, theirs).figure == 1.0
    assert harness.speed_ratio(ours, theirs).figure == 1.0
    assert harness.gb_per_s(10**9, ours) == harness.Estimate(1 / 3, 1 / 10, 1.0)


def test_a_result_keeps_the_spread_and_says_what_each_figure_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    series = [Series("put", "shm", "KiB", [16], "GB/s", [2.0])]
    harness.report("some", [Row("speed", 2.0, "GB/s"), Row("gone", 1.0, "ms")], series, rounds=3)
    first = json.loads((tmp_path / "some.json").read_text())
    assert first["before"] is None and first["rows"][0]["before"] is None and first["facts"] == {"rounds": 3}
    assert first["series"][0]["y"] == [2.0]
    time = harness.at_most("time", harness.estimate(ROUNDS), "ms", 1.03)
    harness.report("some", [Row("speed", 3.0, "GB/s"), time])
    second = json.loads((tmp_path / "some.json").read_text())
    assert second["before"] == {fact: first[fact] for fact in ("date", "commit", "machine")}
    assert [(row["before"], row["met"]) for row in second["rows"]] == [(2.0, None), (None, "within noise")]
    (no_spread, (low, high)) = [row["spread"] for row in second["rows"]]
    assert no_spread is None and low < second["rows"][1]["figure"] == 1.0 < high
    printed = capsys.readouterr().out
    assert "+50 %" in printed and "within noise" in printed


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


def test_alternate_drops_the_warm_ups():
    calls = {"a": 0, "b": 0}

    def count(name):
        calls[name] += 1
        return float(calls[name])

    taken = harness.alternate({name: lambda name=name: count(name) for name in calls}, 3, what="counting", warmups=2)
    assert taken == {"a": [3.0, 4.0, 5.0], "b": [3.0, 4.0, 5.0]}


def test_a_percentile_is_a_sample_that_so_many_do_not_exceed():
    assert harness.percentile(list(range(1, 101)), 99) == 100
    assert harness.estimate(list(range(1, 101)), 99).figure == 100
