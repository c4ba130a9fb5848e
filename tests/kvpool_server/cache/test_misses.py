"""Why blocks are missing: each cause once. Random histories are in `test_explanations.py`."""

from __future__ import annotations

import pytest

from kvpool.protocol.types import MAX_MISSES, Miss, MissCause
from kvpool_server.cache.steps import finish
from tests.kvpool_server.cache.test_pool import CHUNK, LIMITS, Bench
from tests.support.values import group_spec, namespace_spec, run_of
from tests.support.verification import verify

NEVER_STORED, BEING_WRITTEN, EVICTED, REMOVED, CORRUPT, PUT_FAILED, OTHER_NAMESPACE = MissCause


@pytest.fixture
def bench() -> Bench:
    return Bench()


def missing(bench: Bench, *names: object, fingerprint: bytes = b"") -> list[tuple[MissCause, int]]:
    """Causes and counts of one run's missing blocks."""
    fingerprint = fingerprint or bench.name
    runs = [run_of(*names)]
    hits = bench.pool.lookup(fingerprint, runs, prefix_only=True).hits
    (hit,) = bench.pool.explanations.misses(fingerprint, runs, hits)
    assert hit.num_leading + sum(miss.count for miss in hit.missing) == len(names)
    return [(miss.cause, miss.count) for miss in hit.missing]


def test_what_nobody_has_stored(bench: Bench) -> None:
    assert missing(bench, "a", "b") == [(NEVER_STORED, 2)]
    bench.store("a", "b")
    assert missing(bench, "a", "b") == []
    assert missing(bench, "a", "b", "c") == [(NEVER_STORED, 1)]


def test_what_a_put_is_writing(bench: Bench) -> None:
    bench.store("a")
    bench.start("a", "b", "c")
    assert missing(bench, "a", "b", "c", "d", "e") == [(BEING_WRITTEN, 2), (NEVER_STORED, 2)]


def test_what_made_room(bench: Bench) -> None:
    bench.store(*range(10))
    bench.store(*"xyz")
    assert missing(bench, *range(12)) == [(EVICTED, 3), (NEVER_STORED, 2)]


@pytest.mark.parametrize("clears", [False, True])
def test_what_was_removed_or_cleared(bench: Bench, clears: bool) -> None:
    bench.store("a", "b", "c")
    if clears:
        steps = bench.pool.removals.clear(bench.name)
        next(steps, None)
        assert missing(bench, "a", "b", "c") == [(REMOVED, 3)], "while it is dropped in steps"
        finish(steps)
        assert missing(bench, "a", "b", "c", "d") == [(REMOVED, 3), (NEVER_STORED, 1)]
    else:
        bench.pool.remove(bench.name, [run_of("a")])
        assert missing(bench, "a", "b", "c", "d") == [(REMOVED, 3), (NEVER_STORED, 1)]


def test_what_had_changed(bench: Bench) -> None:
    bench.store("a", "b", "c")
    bench.memory[:] ^= 0xFF
    verify(bench.pool, bench.name, [run_of("b")], bench.memory)
    assert missing(bench, "a", "b", "c", "d") == [(CORRUPT, 2), (NEVER_STORED, 1)]


def test_what_its_writer_gave_up_or_was_too_slow_for(bench: Bench) -> None:
    bench.pool.put_revoke(bench.start("a").ticket_id)
    bench.start("b", ttl_ms=100)
    bench.seconds(0.125)
    assert missing(bench, "a") == missing(bench, "b") == [(PUT_FAILED, 1)]


def test_what_another_namespace_of_the_tenant_has(bench: Bench) -> None:
    groups = [group_spec(chunk_bytes=CHUNK, num_shards=2)]
    bench.store("a", "b")
    same = namespace_spec(*groups, model="other/model", salt=bench.spec.salt)
    opened = bench.pool.open_namespace(same)[0].fingerprint
    assert missing(bench, "a", "b", fingerprint=opened) == [(OTHER_NAMESPACE, 2)]


@pytest.mark.parametrize("field", ["tenant", "salt"])
def test_what_is_there_for_others_than_the_caller_is_not_told(bench: Bench, field: str) -> None:
    """Who does not know a salt must not learn by guesses which prompts are stored under it."""
    bench.store("a", "b")
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=2), **{"salt": bench.spec.salt, field: "other"})
    opened = bench.pool.open_namespace(spec)[0].fingerprint
    assert missing(bench, "a", "b", fingerprint=opened) == [(NEVER_STORED, 2)]


def test_of_many_runs_some_are_explained(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.cache.explanations.MAX_RUNS", 2)
    runs = [run_of(name) for name in "abc"]
    hits = bench.pool.lookup(bench.name, runs, prefix_only=True).hits
    explained = bench.pool.explanations.misses(bench.name, runs, hits)
    assert [len(hit.missing) for hit in explained] == [1, 1, 0]


def test_causes_that_change_too_often_are_cut_short() -> None:
    bench = Bench(num_slots=40)
    names = list(range(LIMITS.max_lookup_blocks))
    bench.store(*names)
    bench.pool.remove(bench.name, [run_of(*names[::2])])
    bench.memory[:] = 0
    verify(bench.pool, bench.name, [run_of(*names[1::2])], bench.memory)
    found = missing(bench, *names)
    assert len(found) == MAX_MISSES
    assert found[:2] == [(REMOVED, 1), (CORRUPT, 1)] and found[-1][1] == len(names) - MAX_MISSES + 1


def test_groups_are_told_apart(bench: Bench) -> None:
    bench.store("a")
    bench.pool.remove(bench.name, [run_of("a")])
    runs = [run_of("a", group_idx=0), run_of("a", group_idx=1)]
    hits = bench.pool.lookup(bench.name, runs, prefix_only=True).hits
    first, second = bench.pool.explanations.misses(bench.name, runs, hits)
    assert (first.missing, second.missing) == ((Miss(REMOVED, 1),), (Miss(NEVER_STORED, 1),))


def test_many_blocks_are_explained_in_bounded_time_with_the_last_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.cache.explanations.MAX_EXPLAINED", 4)
    bench = Bench()
    bench.store(*range(6))
    bench.pool.remove(bench.name, [run_of(*range(6))])
    assert missing(bench, *range(10)) == [(REMOVED, 10)]
