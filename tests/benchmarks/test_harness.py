"""A result keeps the one before it, so that nobody has to look for it."""

import contextlib
import json
import subprocess

import pytest

from benchmarks.cases import gpu_questions
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Row, Series
from benchmarks.peers import mooncake_store
from testbed.mooncake import BEST_SETTINGS


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return tmp_path


def _written(results):
    return json.loads((results / "some.json").read_text())


def test_a_first_result_has_none_before_it(results):
    harness.report("some", [Row("speed", 2.0, "GB/s")], [Series("put", "shm", "KiB", [16], "GB/s", [2.0])], rounds=3)
    written = _written(results)
    assert written["before"] is None and written["rows"][0]["before"] is None
    assert written["facts"] == {"rounds": 3}
    assert written["series"][0]["y"] == [2.0]


def test_a_result_says_what_each_figure_was(results, capsys):
    harness.report("some", [Row("speed", 2.0, "GB/s"), Row("gone", 1.0, "ms")])
    first = _written(results)
    harness.report("some", [Row("speed", 3.0, "GB/s"), Row("new", 1.0, "ms")])
    second = _written(results)
    assert [row["before"] for row in second["rows"]] == [2.0, None]
    assert second["before"] == {fact: first[fact] for fact in ("date", "commit", "machine")}
    assert "+50 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("figure", "before", "said"), [(3.0, 2.0, "+50 %"), (1.0, 2.0, "-50 %"), (1.0, None, ""), (1.0, 0.0, "")]
)
def test_change_in_words(figure, before, said):
    assert harness.change(figure, before) == said


def test_alternate_drops_the_warm_ups():
    calls = {"a": 0, "b": 0}

    def count(name):
        calls[name] += 1
        return float(calls[name])

    taken = harness.alternate({name: lambda name=name: count(name) for name in calls}, 3, what="counting", warmups=2)
    assert taken == {"a": [3.0, 4.0, 5.0], "b": [3.0, 4.0, 5.0]}


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


def test_what_was_counted_has_no_noise():
    assert harness.at_most("errors", 0, "", 0).met is True
    assert harness.at_least("speed", 0.9, "GB/s", 1.0).met is False


def test_a_ratio_is_of_the_rounds_and_not_of_the_medians():
    ours, theirs = [1.0, 10.0, 3.0], [2.0, 1.0, 3.0]
    assert harness.time_ratio(ours, theirs).figure == 1.0
    assert harness.speed_ratio(ours, theirs).figure == 1.0
    assert harness.gb_per_s(10**9, ours) == harness.Estimate(1 / 3, 1 / 10, 1.0)


def test_a_percentile_is_a_sample_that_so_many_do_not_exceed():
    assert harness.percentile(list(range(1, 101)), 99) == 100
    assert harness.estimate(list(range(1, 101)), 99).figure == 100


def test_a_result_keeps_the_spread(results, capsys):
    harness.report("some", [harness.at_most("time", harness.estimate(ROUNDS), "ms", 1.03), Row("count", 3, "")])
    first, second = _written(results)["rows"]
    assert first["figure"] == 1.0 and first["spread"][0] < 1.0 < first["spread"][1]
    assert first["met"] == "within noise" and "within noise" in capsys.readouterr().out
    assert second["figure"] == 3 and second["spread"] is None


def test_a_result_names_the_code_that_ran_though_another_commit_was_made_meanwhile(results, monkeypatch):
    monkeypatch.setattr(harness, "git", lambda *command: subprocess.CompletedProcess(command, 0, "made-meanwhile\n"))
    harness.report("some", [Row("speed", 2.0, "GB/s")])
    assert "made-meanwhile" not in _written(results)["commit"]


def test_questions_that_are_all_answered_are_reported(results, monkeypatch, tmp_path):
    for name in ("kvpool_server", "master"):
        owner = harness if name == "kvpool_server" else mooncake_store
        monkeypatch.setattr(owner, name, lambda *_: contextlib.nullcontext("127.0.0.1:1"))
    monkeypatch.setattr(gpu_questions, "write_model", lambda logs: logs / "model")
    monkeypatch.setattr(gpu_questions, "_measure_pair", lambda name, *_: [Row(name, 1.0, "questions/s")])
    monkeypatch.setattr(gpu_questions.signal, "signal", lambda *_: None)
    gpu_questions.main(tmp_path, tokens=10, questions=1)
    written = json.loads((results / "gpu_questions.json").read_text())
    assert [row["what"] for row in written["rows"]] == ["alone", "kvpool", "vLLM offloading", "Mooncake"]


def test_mooncakes_connector_keeps_its_connections_as_mooncakes_own_client_does(tmp_path):
    environment = mooncake_store.engine(tmp_path, "127.0.0.1:1", tmp_path, 1 << 20, {}).environment
    name = "MC_TCP_ENABLE_CONNECTION_POOL"
    assert environment[name] == BEST_SETTINGS[name] == "1"
