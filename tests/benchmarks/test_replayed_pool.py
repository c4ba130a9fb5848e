"""Replays of traces small enough to be counted by hand, and the hits of published policies."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.harness import workloads
from benchmarks.peers import libcachesim
from benchmarks.replay.pool import replay
from benchmarks.replay.references import REFERENCES, clairvoyant, lru
from benchmarks.replay.request import Request, num_blocks, num_distinct
from benchmarks.replay.trace import MAX_LINE_BYTES, load
from kvpool_server.cache.eviction import POLICIES

Count = Callable[[Sequence[Request], int], int]

TURNS = [Request(second, ids) for second, ids in enumerate([[1, 2], [3, 4], [1, 2], [3, 4]])]
COUNTS: dict[str, Count] = {**REFERENCES, **{name: functools.partial(replay, policy=name) for name in POLICIES}}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_only_first_uses_miss_and_only_the_prefix_counts(count: Count) -> None:
    assert count(TURNS, 4) == 4
    assert count([Request(0, [1, 2, 3]), Request(1, [1, 9, 3])], 9) == 1


def test_in_half_the_room_lru_has_lost_what_comes_next_and_the_clairvoyant_keeps_one_prefix() -> None:
    assert lru(TURNS, 2) == replay(TURNS, 2, "lru") == 0
    assert clairvoyant(TURNS, 2) == 2


def test_the_pool_evicts_the_end_of_a_prefix_and_plain_lru_its_start() -> None:
    requests = [Request(second, ids) for second, ids in enumerate([[1, 2], [3], [4], [1, 2]])]
    assert lru(requests, 3) == 0
    assert replay(requests, 3, "lru") == 1
    assert clairvoyant(requests, 3) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_has_more_hits_than_the_clairvoyant(policy: str) -> None:
    requests = [Request(nth, [nth % 7, 100 + nth % 7, 1000 + nth % 35]) for nth in range(300)]
    for capacity in (3, 9, 20):
        assert replay(requests, capacity, policy) <= clairvoyant(requests, capacity)
    assert replay([Request(0, [1, 2, 3]), Request(1, [1, 2, 3])], 2, policy) == 0, "no request fits"


LONG = '{"timestamp": 0, "hash_ids": ' + "[" * 100_000
WRONG_IDS = ('["a"]', '"ab"', "[-1]", "[true]", "null")
WRONG_TIMES = ("1e310", "NaN", '"now"')


def test_a_trace_is_read_and_refused_by_its_line_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, wrong = tmp_path / "trace.jsonl", tmp_path / "wrong.jsonl"
    trace.write_text("".join(f'{{"timestamp": {each.at_s * 1000}, "hash_ids": {each.ids}}}\n' for each in TURNS))
    assert load(trace) == TURNS and (num_blocks(TURNS), num_distinct(TURNS)) == (8, 4)
    lines = [f'{{"timestamp": 0, "hash_ids": {ids}}}' for ids in WRONG_IDS]
    lines += [f'{{"timestamp": {time}, "hash_ids": [1]}}' for time in WRONG_TIMES]
    for line in (*lines, "[]", "no JSON", LONG, '{"timestamp": 1}'):
        wrong.write_text(line + "\n")
        with pytest.raises(ValueError, match="line 1"):
            load(wrong)
    wrong.write_bytes(b" " * (MAX_LINE_BYTES + 1))
    with pytest.raises(ValueError, match="a line of more than 8 MiB"):
        load(wrong)
    monkeypatch.setattr("benchmarks.replay.request.MAX_IDS", 7)
    with pytest.raises(ValueError, match=r"line 4 .*more than 7 ids"):
        load(trace)
    monkeypatch.setattr("benchmarks.replay.request.MAX_REQUESTS", 2)
    with pytest.raises(ValueError, match=r"line 3 .*more than 2 requests"):
        load(trace)


@pytest.mark.more
@pytest.mark.skipif(bool(libcachesim.missing()), reason=libcachesim.missing())
def test_hits_of_published_policies_are_counted_as_ours_are():
    requests = workloads.conversations(2_000)
    for share in (2, 10):
        capacity = num_distinct(requests) * share // 100
        assert libcachesim.replay(requests, capacity, "LRU") == lru(requests, capacity) > 0
    for policy in libcachesim.POLICIES:
        assert libcachesim.replay(requests, num_distinct(requests), policy) > 0
