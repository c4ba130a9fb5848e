"""A result keeps the one before it, so that nobody has to look for it."""

import json

import pytest

from benchmarks import harness
from benchmarks.harness import Row, Series


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
