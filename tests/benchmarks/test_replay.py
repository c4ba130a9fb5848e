"""The benchmark of replays: what it reports."""

import json

from benchmarks.cases import replay
from benchmarks.harness import measuring as harness
from benchmarks.harness import workloads
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.replay.references import REFERENCES

LINES = "".join(
    json.dumps({"timestamp": nth * 1000, "hash_ids": ids}) + "\n" for nth, ids in enumerate([[1, 2], [3, 4]] * 2)
)


def test_without_a_trace_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(replay, "TRACE", tmp_path / "none.jsonl")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    replay.main()
    assert "skipped" in (said := capsys.readouterr().out) and "--trace" in said
    assert not (tmp_path / "results").exists()


def test_the_result_has_a_line_for_every_policy_and_the_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(replay, "WORKLOADS", {"loops": lambda: workloads.loops(700)})
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES)
    replay.main(path)
    result = json.loads((tmp_path / "replay.json").read_text())
    assert [line["name"] for line in result["series"]] == [*(f"kvpool, {name}" for name in POLICIES), *REFERENCES]
    assert [line["y"][-1] for line in result["series"]] == [0.5] * (len(POLICIES) + len(REFERENCES))
    assert [line["name"] for line in result["series"] if line["limit"]] == ["clairvoyant"]
    assert any(row["what"].startswith("loops, 10 %") for row in result["rows"])


def test_made_up_traces_are_the_same_each_time_and_of_whole_prefixes():
    for make in workloads.WORKLOADS.values():
        requests = make()
        assert requests == make()
        parents: dict[int, int] = {}
        for request in requests[:1_000]:
            for parent, block in zip([-1, *request.ids], request.ids, strict=False):
                assert parents.setdefault(block, parent) == parent, "one block behind two others"
