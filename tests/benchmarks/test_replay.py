"""Replays of traces small enough to be counted by hand."""

import json

import pytest

from benchmarks import harness, replay
from benchmarks.replay import POLICIES, REFERENCES, Request, clairvoyant, distinct, load, lru

TURNS = [Request(second, ids) for second, ids in enumerate([[1, 2], [3, 4], [1, 2], [3, 4]])]
EVERYONE = {
    **REFERENCES,
    **{name: lambda r, c, p=pool_of: replay.replay(r, c, p) for name, pool_of in POLICIES.items()},
}


@pytest.mark.parametrize("count", EVERYONE.values(), ids=EVERYONE)
def test_where_everything_fits_only_first_uses_miss(count):
    assert count(TURNS, 4) == 4


def test_in_half_the_room_lru_has_lost_what_comes_next_and_the_clairvoyant_keeps_one_prefix():
    assert lru(TURNS, 2) == replay.replay(TURNS, 2) == 0
    assert clairvoyant(TURNS, 2) == 2


def test_the_pool_lets_go_of_the_end_of_a_prefix_and_plain_lru_of_its_start():
    requests = [Request(second, ids) for second, ids in enumerate([[1, 2], [3], [4], [1, 2]])]
    assert lru(requests, 3) == 0
    assert replay.replay(requests, 3) == 1
    assert clairvoyant(requests, 3) == 2


def test_only_the_prefix_counts():
    requests = [Request(0, [1, 2, 3]), Request(1, [1, 9, 3])]
    assert [count(requests, 9) for count in EVERYONE.values()] == [1, 1, 1]


def test_a_request_that_cannot_fit_stores_nothing():
    assert replay.replay([Request(0, [1, 2, 3]), Request(1, [1, 2, 3])], 2) == 0


def test_a_policy_is_passed_in():
    made = []

    def pool_of(arena, clock):
        made.append(arena.arena_bytes // replay.SLOT_BYTES)
        return replay.leaf_first_lru(arena, clock)

    assert replay.replay(TURNS, 4, pool_of) == 4
    assert made == [4]


def test_a_trace_is_read_and_what_is_none_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(_lines(TURNS))
    assert load(path) == TURNS
    assert distinct(TURNS) == 4
    path.write_text(_lines(TURNS) + '{"timestamp": 1}\n')
    with pytest.raises(ValueError, match="line 5"):
        load(path)


def test_without_a_trace_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(replay, "TRACE", tmp_path / "none.jsonl")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    replay.main()
    assert "skipped" in (said := capsys.readouterr().out) and "--trace" in said
    assert not (tmp_path / "results").exists()


def test_the_result_has_a_line_for_every_policy_and_the_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    path = tmp_path / "trace.jsonl"
    path.write_text(_lines(TURNS))
    replay.main(path)
    result = json.loads((tmp_path / "replay.json").read_text())
    assert [line["name"] for line in result["series"]] == [*POLICIES, *REFERENCES]
    assert [line["y"][-1] for line in result["series"]] == [0.5] * (len(POLICIES) + len(REFERENCES))
    assert [line["name"] for line in result["series"] if line["limit"]] == ["clairvoyant"]


def _lines(requests):
    return "".join(json.dumps({"timestamp": each.at_s * 1000, "hash_ids": each.ids}) + "\n" for each in requests)
