"""Replays of traces small enough to be counted by hand."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.replay.pool import replay
from benchmarks.replay.references import REFERENCES, clairvoyant, lru
from benchmarks.replay.request import Request, num_blocks, num_distinct
from benchmarks.replay.trace import MAX_LINE_BYTES, load
from kvpool_server.cache.eviction import POLICIES

Count = Callable[[Sequence[Request], int], int]

TURNS = [Request(second, ids) for second, ids in enumerate([[1, 2], [3, 4], [1, 2], [3, 4]])]
COUNTS: dict[str, Count] = {**REFERENCES, **{name: functools.partial(replay, policy=name) for name in POLICIES}}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_where_everything_fits_only_first_uses_miss(count: Count) -> None:
    assert count(TURNS, 4) == 4


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_only_the_prefix_counts(count: Count) -> None:
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
def test_a_request_that_cannot_fit_stores_nothing(policy: str) -> None:
    assert replay([Request(0, [1, 2, 3]), Request(1, [1, 2, 3])], 2, policy) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_has_more_hits_than_the_clairvoyant(policy: str) -> None:
    requests = [Request(nth, [nth % 7, 100 + nth % 7, 1000 + nth % 35]) for nth in range(300)]
    for capacity in (3, 9, 20):
        assert replay(requests, capacity, policy) <= clairvoyant(requests, capacity)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": each.at_s * 1000, "hash_ids": each.ids}) + "\n" for each in TURNS))
    return path


def test_a_trace_is_read_and_a_line_that_is_no_request_is_an_error(trace: Path) -> None:
    assert load(trace) == TURNS
    assert (num_blocks(TURNS), num_distinct(TURNS)) == (8, 4)
    with trace.open("a") as lines:
        lines.write('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match="line 5"):
        load(trace)


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0, "hash_ids": ["a"]}',
        '{"timestamp": 0, "hash_ids": "ab"}',
        '{"timestamp": 0, "hash_ids": [-1]}',
        '{"timestamp": 0, "hash_ids": [true]}',
        '{"timestamp": 0, "hash_ids": null}',
        '{"timestamp": 1e310, "hash_ids": [1]}',
        '{"timestamp": NaN, "hash_ids": [1]}',
        '{"timestamp": "now", "hash_ids": [1]}',
        "[]",
        "no JSON",
        '{"timestamp": 0, "hash_ids": ' + "[" * 100_000,
    ],
)
def test_a_line_that_is_no_request_is_an_error_that_names_it(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1"):
        load(path)


def test_a_trace_that_would_take_all_memory_is_refused(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / "long"
    long.write_bytes(b" " * (MAX_LINE_BYTES + 1))
    with pytest.raises(ValueError, match="a line of more than 8 MiB"):
        load(long)
    monkeypatch.setattr("benchmarks.replay.request.MAX_IDS", 7)
    with pytest.raises(ValueError, match=r"line 4 .*more than 7 ids"):
        load(trace)
    monkeypatch.setattr("benchmarks.replay.request.MAX_REQUESTS", 2)
    with pytest.raises(ValueError, match=r"line 3 .*more than 2 requests"):
        load(trace)
