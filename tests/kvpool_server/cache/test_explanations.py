"""Why blocks are missing, for engines and for people: each state and cause once, and random histories."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.types import MAX_MISSES, MAX_RANGES, BlockState, Miss, MissCause
from kvpool_server.cache.departures import EvictedFor
from kvpool_server.cache.explanations import PART_BLOCKS, BlockRange, Explained
from kvpool_server.cache.steps import finish
from kvpool_server.sharing import Limits
from tests.kvpool_server.cache.test_pool import CHUNK, LIMITS, Bench
from tests.support.effort import effort
from tests.support.values import block_hash, group_spec, namespace_spec, run_of
from tests.support.verification import verify

COMPLETE, IN_TIER, MISSING = BlockState
NEVER_STORED, BEING_WRITTEN, EVICTED, REMOVED, CORRUPT, PUT_FAILED, OTHER_NAMESPACE = MissCause


@pytest.fixture
def bench() -> Bench:
    return Bench()


def explained(bench: Bench, *names: object, fingerprint: bytes = b"") -> Explained:
    return finish(bench.pool.explanations.explain_in_steps(fingerprint or bench.name, [run_of(*names)]))


def ranges(bench: Bench, *names: object, fingerprint: bytes = b"") -> tuple[BlockRange, ...]:
    (run,) = explained(bench, *names, fingerprint=fingerprint).runs
    assert [part.first for part in run.ranges] == [0, *(part.stop for part in run.ranges[:-1])]
    assert run.ranges[-1].stop == len(names)
    return run.ranges


def told(bench: Bench, *names: object) -> list[tuple[int, BlockState, MissCause | None]]:
    return [(part.count, part.state, part.cause) for part in ranges(bench, *names)]


def missing(bench: Bench, *names: object, fingerprint: bytes = b"") -> list[tuple[MissCause, int]]:
    """Causes and counts of one run's missing blocks."""
    fingerprint = fingerprint or bench.name
    runs = [run_of(*names)]
    hits = bench.pool.lookup(fingerprint, runs, prefix_only=True).hits
    (hit,) = bench.pool.explanations.misses(fingerprint, runs, hits)
    assert hit.num_leading + sum(miss.count for miss in hit.missing) == len(names)
    return [(miss.cause, miss.count) for miss in hit.missing]


def test_a_block_is_missing_because_nobody_stored_it_or_a_put_writes_it_or_it_made_room(bench: Bench) -> None:
    assert missing(bench, "a", "b") == [(NEVER_STORED, 2)]
    bench.store("a")
    bench.start("a", "b", "c")
    assert missing(bench, "a", "b", "c", "d", "e") == [(BEING_WRITTEN, 2), (NEVER_STORED, 2)]
    assert told(bench, *"abde") == [(1, COMPLETE, None), (1, MISSING, BEING_WRITTEN), (2, MISSING, NEVER_STORED)]
    bench.store(*range(7))
    bench.store(*"xyz")
    assert missing(bench, *range(9)) == [(EVICTED, 3), (NEVER_STORED, 2)]


def test_a_block_is_missing_because_it_was_removed_or_cleared_or_had_changed(bench: Bench) -> None:
    bench.store("a", "b", "c")
    bench.pool.remove(bench.name, [run_of("b")])
    assert told(bench, *"abc") == [(1, COMPLETE, None), (1, MISSING, REMOVED), (1, COMPLETE, None)]
    bench.memory[:] ^= 0xFF
    verify(bench.pool, bench.name, [run_of("a")], bench.memory)
    assert missing(bench, "a", "b", "d") == [(CORRUPT, 1), (REMOVED, 1), (NEVER_STORED, 1)]
    bench.store("a", "b")
    steps = bench.pool.removals.clear(bench.name)
    next(steps, None)
    assert missing(bench, "a", "b", "c") == [(REMOVED, 3)], "while it is dropped in steps"
    finish(steps)
    runs = [run_of("a", "d"), run_of("a", group_idx=1)]
    hits = bench.pool.lookup(bench.name, runs, prefix_only=True).hits
    first, second = bench.pool.explanations.misses(bench.name, runs, hits)
    assert first.missing == (Miss(REMOVED, 1), Miss(NEVER_STORED, 1)) and second.missing == (Miss(NEVER_STORED, 1),)


def test_a_block_is_missing_because_its_writer_gave_up_or_was_too_slow(bench: Bench) -> None:
    bench.pool.put_revoke(bench.start("a").ticket_id)
    bench.start("b", ttl_ms=100)
    bench.seconds(0.125)
    assert missing(bench, "a") == missing(bench, "b") == [(PUT_FAILED, 1)]


def test_of_many_runs_some_are_explained_and_of_many_blocks_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.cache.explanations.MAX_RUNS", 2)
    monkeypatch.setattr("kvpool_server.cache.explanations.MAX_EXPLAINED", 8)
    bench = Bench()
    bench.store(*range(6))
    bench.pool.remove(bench.name, [run_of(*range(6))])
    runs = [run_of(*range(10)), run_of("a"), run_of("b")]
    hits = bench.pool.lookup(bench.name, runs, prefix_only=True).hits
    explained = bench.pool.explanations.misses(bench.name, runs, hits)
    assert [hit.missing for hit in explained] == [(Miss(REMOVED, 10),), (Miss(NEVER_STORED, 1),), ()]


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


def test_when_and_for_whom_blocks_were_evicted(bench: Bench) -> None:
    bench.store(*range(10))
    bench.seconds(60)
    other, _ = bench.pool.open_namespace(namespace_spec(bench.group.spec, model="big/model", tenant="b"))
    own, bench.name = bench.name, other.fingerprint
    bench.store(*"xy")
    bench.seconds(30)
    bench.store("z")
    bench.name = own
    bench.seconds(92)
    stored, evicted, never = ranges(bench, *range(12))
    assert (stored.count, stored.state, stored.unused_seconds) == (7, COMPLETE, pytest.approx(182, abs=2))
    assert (evicted.count, evicted.cause) == (3, EVICTED)
    assert (evicted.newest_left_seconds, evicted.oldest_left_seconds) == (92, 122)
    assert evicted.unused_seconds == pytest.approx(90, rel=0.1)
    assert evicted.evicted_for == EvictedFor("b", "big/model")
    assert (never.count, never.cause, never.newest_left_seconds) == (2, NEVER_STORED, None)


def test_a_prompt_that_leaves_the_stored_ones(bench: Bench) -> None:
    bench.store("a", "b", "c")
    bench.store("other", parent="b")
    found = explained(bench, "a", "b", "new")
    assert found.runs[0].other_children == 2
    assert explained(bench, "a", "b", "c", "new").runs[0].other_children == 0
    assert explained(bench, "new").runs[0].other_children == 0
    bench.start("being written", parent="b")
    assert explained(bench, "a", "b", "being written").runs[0].other_children == 2


def test_another_namespace_of_the_tenant_is_named_with_the_fields_that_differ(bench: Bench) -> None:
    bench.store("a", "b", "c")
    groups = [group_spec(chunk_bytes=CHUNK, num_shards=2), group_spec(chunk_bytes=CHUNK)]
    alike = namespace_spec(*groups, salt=bench.spec.salt, weights_epoch="new")
    opened = bench.pool.open_namespace(alike)[0].fingerprint
    assert missing(bench, "a", "b", "z", fingerprint=opened) == [(OTHER_NAMESPACE, 3)]
    (match,) = explained(bench, "a", "b", "z", fingerprint=opened).elsewhere
    assert (match.fingerprint, match.count) == (bench.name, 2)
    assert match.differences == ("weights_epoch: 'new' here, '' there",)


@pytest.mark.parametrize("field", ["tenant", "salt"])
def test_what_is_there_for_others_than_the_caller_is_not_told(bench: Bench, field: str) -> None:
    """Who does not know a salt must not learn by guesses which prompts are stored under it."""
    bench.store("a", "b")
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=2), **{"salt": bench.spec.salt, field: "other"})
    opened = bench.pool.open_namespace(spec)[0].fingerprint
    assert explained(bench, "a", "b", fingerprint=opened).elsewhere == ()
    assert missing(bench, "a", "b", fingerprint=opened) == [(NEVER_STORED, 2)]


def test_groups_that_are_not_stored_as_prefixes_are_explained_block_by_block(bench: Bench) -> None:
    window = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=2, kind="sliding_window", window_tokens=32))
    bench.name = bench.pool.open_namespace(window)[0].fingerprint
    bench.store("c", "d")
    bench.pool.remove(bench.name, [run_of("c")])
    assert told(bench, *"abcd") == [
        (2, MISSING, NEVER_STORED),
        (1, MISSING, REMOVED),
        (1, COMPLETE, None),
    ]


def test_explaining_counts_as_no_use_and_ranges_are_bounded() -> None:
    count = 4 * PART_BLOCKS
    bench = Bench(Limits(), num_slots=count)
    names = list(range(count))
    for start in range(0, count, 128):
        bench.store(*names[start : start + 128], parent=names[start - 1] if start else None)
    before = bench.pool.counters.copy()
    assert told(bench, *names) == [(count, COMPLETE, None)]
    assert bench.pool.counters == before
    bench.pool.remove(bench.name, [run_of(*names[::2])])
    steps = bench.pool.explanations.explain_in_steps(bench.name, [run_of(*names)])
    num_steps = 1
    try:
        while True:
            next(steps)
            num_steps += 1
    except StopIteration as end:
        (run,) = end.value.runs
    assert len(run.ranges) == MAX_RANGES and num_steps > 2


def test_where_ranges_are_cut_does_not_show_that_others_took_turns() -> None:
    count = 2 * MAX_RANGES
    bench = Bench(Limits(), num_slots=count)
    names = list(range(count))
    for start in range(0, count, 128):
        bench.store(*names[start : start + 128], parent=names[start - 1] if start else None)
    own, group = bench.name, bench.group.spec
    bench.seconds(60)
    others = [bench.pool.open_namespace(namespace_spec(group, tenant=each))[0].fingerprint for each in "bc"]
    for nth in range(count):
        bench.name = others[nth % 2]
        bench.start(f"{nth}", ttl_ms=10_000)

    def found(told: Callable[[EvictedFor], EvictedFor] | None) -> list[BlockRange]:
        (run,) = finish(bench.pool.explanations.explain_in_steps(own, [run_of(*names)], told)).runs
        return list(run.ranges)

    assert len(found(None)) == MAX_RANGES and {part.evicted_for.tenant for part in found(None)} == {"b", "c"}  # type: ignore[union-attr]
    (hidden,) = found(lambda whose: EvictedFor(is_hidden=True))
    assert (hidden.count, hidden.evicted_for) == (count, EvictedFor(is_hidden=True))


@pytest.mark.parametrize("seed", range(effort(20)))
def test_random_histories_agree_with_a_model(seed: int) -> None:
    """Chains of blocks are stored, evicted and removed; the model keeps the last departure of every block."""
    rng = random.Random(seed)
    bench = Bench()
    left: dict[bytes, tuple[float, MissCause]] = {}
    chains = [[(which, depth) for depth in range(6)] for which in range(4)]
    for _ in range(60):
        names = rng.choice(chains)[: rng.randint(1, 6)]
        before = {name for each in chains for name in bench.present(*each)}
        bench.seconds(rng.choice([0, 1, 50]))
        cause = REMOVED if rng.random() < 0.3 else EVICTED
        if cause is EVICTED:
            bench.look(*names, ttl_ms=1)
            with contextlib.suppress(OutOfSpaceError):  # Where no time passes, leases of before hold nearly all slots.
                grant = bench.start(*names)
                granted = [name for name, status in zip(names, grant.statuses, strict=True) if not status]
                if granted:
                    bench.end(grant, *granted)
        else:
            bench.pool.remove(bench.name, [run_of(*names)])
        present = {name for each in chains for name in bench.present(*each)}
        for name in before - present:  # type: ignore[assignment]
            left[block_hash(name)] = bench.clock.now, cause
        asked = rng.choice(chains)
        for part in ranges(bench, *asked):
            for name in asked[part.first : part.stop]:
                assert (part.state is COMPLETE) == (name in present)
                ago = bench.clock.now - left.get(block_hash(name), (-1e9, None))[0]
                if part.state is MISSING and part.newest_left_seconds is not None and name in before - present:
                    assert part.oldest_left_seconds is not None
                    assert part.newest_left_seconds - 1 <= ago <= part.oldest_left_seconds + 1
        run = run_of(*asked)
        hits = bench.pool.lookup(bench.name, [run], prefix_only=True).hits
        (hit,) = bench.pool.explanations.misses(bench.name, [run], hits)
        if hit.missing:
            _, expected = left.get(run.block_hashes[hit.num_leading], (0.0, NEVER_STORED))
            assert hit.missing[0].cause is expected
