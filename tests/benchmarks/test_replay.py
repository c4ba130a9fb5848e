"""The replay benchmark: what it reports, and how it counts the hits of published policies."""

import json

import pytest

from benchmarks.cases import replay
from benchmarks.harness import measuring as harness
from benchmarks.harness import workloads
from benchmarks.peers import libcachesim
from benchmarks.replay.references import REFERENCES, lru
from benchmarks.replay.request import num_distinct
from kvpool_server.cache.eviction import POLICIES

LINES = "".join(
    json.dumps({"timestamp": nth * 1000, "hash_ids": ids}) + "\n" for nth, ids in enumerate([[1, 2], [3, 4]] * 2)
)


def test_without_a_trace_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(replay, "TRACE", tmp_path / "none.jsonl")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    replay.main()
    assert "skipped" in (said := capsys.readouterr().out) and "--trace" in said
    assert not (tmp_path / "results").exists()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the benchmark on a short trace, and returns its result."""

    def run():
        monkeypatch.setattr(harness, "RESULTS", tmp_path)
        monkeypatch.setattr(replay, "WORKLOADS", {"loops": lambda: workloads.loops(700)})
        path = tmp_path / "trace.jsonl"
        path.write_text(LINES)
        replay.main(path)
        return json.loads((tmp_path / "replay.json").read_text())

    return run


def test_the_result_has_a_line_for_every_policy_and_the_limit(monkeypatch, run):
    monkeypatch.setattr(libcachesim, "missing", lambda: "libcachesim is not installed")
    result = run()
    assert [line["name"] for line in result["series"]] == [*(f"kvpool, {name}" for name in POLICIES), *REFERENCES]
    assert [line["y"][-1] for line in result["series"]] == [0.5] * (len(POLICIES) + len(REFERENCES))
    assert [line["name"] for line in result["series"] if line["limit"]] == ["clairvoyant"]
    assert any(row["what"].startswith("loops, 10 %") for row in result["rows"])


def test_without_libcachesim_the_result_says_so(monkeypatch, run, capsys):
    monkeypatch.setattr(libcachesim, "missing", lambda: "libcachesim is not installed")
    assert run()["facts"]["published"] == "libcachesim is not installed"
    assert "Published policies are left out: libcachesim is not installed" in capsys.readouterr().out


def test_published_policies_have_a_line_each_and_a_row_for_the_best(monkeypatch, run):
    monkeypatch.setattr(libcachesim, "missing", lambda: "")
    monkeypatch.setattr(libcachesim, "version", lambda: "libcachesim 1")
    monkeypatch.setattr(libcachesim, "POLICIES", {"good": "Good", "bad": "Bad"})
    monkeypatch.setattr(libcachesim, "replay", lambda requests, capacity, policy: 4 if policy == "good" else 2)
    result = run()
    lines = {line["name"]: line["y"] for line in result["series"] if line["plot"] == "hit ratio of published policies"}
    assert lines == {"good": [0.5] * 4, "bad": [0.25] * 4}
    assert [row["figure"] for row in result["rows"] if row["what"].startswith("best published policy, ")] == [0.5] * 4
    assert any(row["what"] == "loops, 10 %: best published policy" for row in result["rows"])


@pytest.mark.skipif(bool(libcachesim.missing()), reason=libcachesim.missing())
def test_hits_of_published_policies_are_counted_as_ours_are():
    requests = workloads.conversations(2_000)
    for share in (2, 10):
        capacity = num_distinct(requests) * share // 100
        assert libcachesim.replay(requests, capacity, "LRU") == lru(requests, capacity) > 0
    for policy in libcachesim.POLICIES:
        assert libcachesim.replay(requests, num_distinct(requests), policy) > 0


def test_made_up_traces_are_the_same_each_time_and_of_whole_prefixes():
    for make in workloads.WORKLOADS.values():
        requests = make()
        assert requests == make()
        parents: dict[int, int] = {}
        for request in requests[:1_000]:
            for parent, block in zip([-1, *request.ids], request.ids, strict=False):
                assert parents.setdefault(block, parent) == parent, "one block behind two others"
