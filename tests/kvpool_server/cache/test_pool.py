"""Rules that the random histories in tests/simulation do not see: errors, limits, counters, and what is evicted."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest

from kvpool.protocol.errors import (
    IncompatibleNamespaceError,
    InvalidRequestError,
    LeaseExpiredError,
    OutOfSpaceError,
    UnknownNamespaceError,
)
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import Lookup, PutGrant, PutReceipt, PutStatus, Quota, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.steps import STEP_BLOCKS
from kvpool_server.sharing import Limits
from testbed.pool_at_once import PoolAtOnce
from tests.support.bare_pool import make_pool, put
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import group_spec, namespace_spec, payload, run_of

CHUNK = 100
WHOLE = ShardRange(0, 2)
LIMITS = Limits(
    max_batch_blocks=16,
    max_lookup_blocks=16,
    max_ttl_ms=1_000,
    default_ticket_ttl_ms=100,
    grace_ms=250,
    max_namespaces=3,
    namespace_idle_ms=5_000,
)
GRANTED, PRESENT, BUSY = PutStatus
TICK = 1 / 1024
"""Seconds; like 0.125 and 0.25 it adds up exactly."""


class Bench:
    """A pool of 10 slots of 2 shards, its memory and its clock, and one open namespace."""

    def __init__(self, limits: Limits = LIMITS, num_slots: int = 10):
        ids = itertools.count(1)
        self.clock = FakeClock()
        self.pool = PoolAtOnce(Arena(num_slots * 2 * CHUNK, 2 * CHUNK), self.clock, lambda: next(ids), limits)
        self.memory = np.zeros(num_slots * 2 * CHUNK, np.uint8)
        self.spec = namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=2), group_spec(chunk_bytes=CHUNK))
        namespace, _ = self.pool.open_namespace(self.spec)
        self.name, self.group = namespace.fingerprint, namespace.groups[0]

    def start(self, *names: object, shards: ShardRange = WHOLE, ttl_ms: int = 100, parent: object = None) -> PutGrant:
        return self.pool.put_start(self.name, [run_of(*names, parent=parent)], shards, ttl_ms)

    def end(self, grant: PutGrant, *names: object, shards: ShardRange = WHOLE) -> PutReceipt:
        sums = []
        for name, offset in zip(names, grant.offsets, strict=True):
            for nth in range(shards.count):
                content = payload((name, shards.start + nth), CHUNK)
                self.memory[offset + nth * CHUNK : offset + (nth + 1) * CHUNK] = content
                sums.append(checksum(content))
        return self.pool.put_end(grant.ticket_id, sums)

    def store(self, *names: object, parent: object = None) -> None:
        self.end(self.start(*names, parent=parent), *names)

    def look(self, *names: object, ttl_ms: int = 0) -> Lookup:
        return self.pool.lookup(self.name, [run_of(*names)], prefix_only=False, lease_ttl_ms=ttl_ms)

    def present(self, *names: object) -> list[object]:
        complete = self.look(*names).hits[0].complete
        return [name for idx, name in enumerate(names) if complete >> idx & 1]

    def seconds(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pool.expire()
        check_integrity(self.pool)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Namespaces


def test_a_namespace_is_found_again_and_another_fingerprint_is_explained_field_by_field(bench: Bench) -> None:
    again, created = bench.pool.open_namespace(bench.spec, bench.name)
    assert not created and again.fingerprint == bench.name == bench.spec.fingerprint()
    other = namespace_spec(*bench.spec.groups, model="other/model", salt=bench.spec.salt)
    with pytest.raises(IncompatibleNamespaceError, match=r"model: 'other/model' here, 'test/model' there"):
        bench.pool.open_namespace(other, bench.name)
    with pytest.raises(IncompatibleNamespaceError, match=bytes(32).hex()):
        bench.pool.open_namespace(other, bytes(32))


def test_a_block_larger_than_an_extent_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match=r"groups\[1\]: a block of 201 bytes .* more --memory"):
        bench.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK), group_spec(chunk_bytes=201)))


def _open(bench: Bench, **fields: Any) -> bytes:
    return bench.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK), **fields))[0].fingerprint


def _is_open(bench: Bench, name: bytes) -> bool:
    return any(each.fingerprint == name for each in bench.pool.open_namespaces())


def test_namespaces_are_bounded_and_the_empty_one_idle_longest_makes_way(bench: Bench) -> None:
    bench.store("a")
    used, idle = _open(bench), _open(bench)
    for _ in range(2):
        with pytest.raises(OutOfSpaceError, match=r"3 namespaces are open.* clear one"):
            _open(bench)
        bench.seconds(LIMITS.namespace_idle_ms / 2_000)
        bench.pool.lookup(used, [run_of("a")], prefix_only=True, lease_ttl_ms=1)
    _open(bench)
    with pytest.raises(OutOfSpaceError):
        _open(bench)
    assert bench.present("a") == ["a"]
    assert not _is_open(bench, idle) and _is_open(bench, used)
    check_integrity(bench.pool)


def test_a_superseded_namespace_makes_way_with_its_blocks(bench: Bench) -> None:
    _open(bench, salt="same", weights_epoch="1")
    old = bench.pool.open_namespaces()[-1]
    grant = bench.pool.put_start(old.fingerprint, [run_of("a")], ShardRange(0, 1))
    bench.pool.put_end(grant.ticket_id, [0])
    newer = _open(bench, salt="same", weights_epoch="2")
    bench.store("b")
    bench.seconds(LIMITS.namespace_idle_ms / 1000)
    bench.pool.lookup(newer, [run_of("a")], prefix_only=True, lease_ttl_ms=1)
    _open(bench)
    assert not _is_open(bench, old.fingerprint) and old.is_empty and bench.present("b") == ["b"]
    check_integrity(bench.pool)
    with pytest.raises(UnknownNamespaceError):
        bench.pool.lookup(old.fingerprint, [run_of("a")], prefix_only=True)


def test_specifications_are_bounded_in_all() -> None:
    bench = Bench(Limits(max_specs_bytes=4_000))
    with pytest.raises(OutOfSpaceError, match=r"specifications have \d+ bytes; the limits are 1024 and 4000"):
        _open(bench, salt="x" * 4_000)


# Lookup


def test_a_lookup_spans_groups_under_one_lease(bench: Bench) -> None:
    bench.store("a")
    grant = bench.pool.put_start(bench.name, [run_of("a", group_idx=1)], ShardRange(0, 1))
    bench.pool.put_end(grant.ticket_id, [1])
    runs = [run_of("a"), run_of("x", group_idx=1), run_of("a", group_idx=1)]
    found = bench.pool.lookup(bench.name, runs, prefix_only=True, lease_ttl_ms=100)
    assert [hits.num_leading for hits in found.hits] == [1, 0, 1]
    assert bench.pool.get(found.lease_id, bench.name, runs[:1], WHOLE).present == (True,)
    assert bench.pool.get(found.lease_id, bench.name, runs[2:], ShardRange(0, 1)).present == (True,)


def test_an_existence_check_renews_nothing_and_a_leased_lookup_does(bench: Bench) -> None:
    for name in range(10):
        bench.store(name)
    bench.look(0)
    bench.pool.release([bench.look(1, ttl_ms=100).lease_id])
    bench.store("new", "newer")
    assert bench.present(*range(10)) == [1, *range(3, 10)]


# Put


def test_holds_last_as_long_as_asked_or_by_default_within_the_limit(bench: Bench) -> None:
    bench.store("a")
    assert [bench.look("a", ttl_ms=ttl_ms).lease_ttl_ms for ttl_ms in (50, 10_000_000)] == [50, LIMITS.max_ttl_ms]
    assert bench.start("b", ttl_ms=0).ticket_ttl_ms == LIMITS.default_ticket_ttl_ms
    assert bench.start("c", ttl_ms=10_000_000).ticket_ttl_ms == LIMITS.max_ttl_ms


def test_holds_live_until_their_deadlines_and_no_longer(bench: Bench) -> None:
    bench.store("a")
    in_time, late = bench.start("in time", ttl_ms=125), bench.start("late", ttl_ms=125)
    lease_id = bench.look("a", ttl_ms=125).lease_id
    bench.seconds(0.125 - 2 * TICK)
    assert bench.pool.get(lease_id, bench.name, [run_of("a")], WHOLE).lease_remaining_ms == 1
    bench.seconds(TICK)
    bench.end(in_time, "in time")
    bench.seconds(TICK)
    with pytest.raises(LeaseExpiredError, match=rf"ticket {late.ticket_id:#x} is not live.*put_start again"):
        bench.end(late, "late")
    with pytest.raises(LeaseExpiredError, match=rf"lease {lease_id:#x} is not live.*look up again"):
        bench.pool.get(lease_id, bench.name, [run_of("a")], WHOLE)
    assert bench.present("in time", "late") == ["in time"]
    assert bench.pool.counters["expired_tickets"] == bench.pool.counters["expired_leases"] == 1


def test_beyond_the_bounds_a_hit_has_no_lease_and_a_put_is_refused() -> None:
    bench = Bench(Limits(max_leases=1, max_tickets=1))
    bench.store("a")
    assert bench.look("a", ttl_ms=100).lease_id
    refused = bench.look("a", ttl_ms=100)
    assert refused.hits[0].num_leading == 1 and refused.lease_id == 0
    assert bench.pool.counters["refused_leases"] == 1
    bench.start("b")
    with pytest.raises(OutOfSpaceError, match="1 puts are under way; the limit is 1"):
        bench.start("c")


def test_put_end_wants_a_checksum_for_each_chunk_and_the_ticket_survives_a_mistake(bench: Bench) -> None:
    grant = bench.start("a")
    for count in (0, 1, 3):
        with pytest.raises(InvalidRequestError, match=f"{count} checksums; the ticket covers 1 blocks x 2 shards"):
            bench.pool.put_end(grant.ticket_id, [0] * count)
    assert bench.end(grant, "a") == PutReceipt(1, 1)


def test_a_batch_that_names_blocks_again_and_again_needs_room_for_each_of_them_once() -> None:
    pool, fingerprint = make_pool(8 * STEP_BLOCKS, "lru", FakeClock())
    run = run_of(*range(3 * STEP_BLOCKS))
    grant = pool.put_start(fingerprint, [run] * 4, ShardRange(0, 1))
    assert [grant.statuses.count(each) for each in PutStatus] == [len(run), 0, 3 * len(run)]


@pytest.mark.parametrize("holds", ["the arena", "a quota", "extents of a tenant's quota"])
def test_a_batch_that_can_never_fit_evicts_nothing(holds: str) -> None:
    """Of a tenant's quota whole extents count, so that less fits than its bytes would hold."""
    slots, extents = 4 * STEP_BLOCKS, 1 if holds == "the arena" else 8
    zero = (lambda *_: None) if holds.startswith("extents") else None
    pool = PoolAtOnce(Arena(extents * slots, slots, zero=zero), FakeClock(), itertools.count(1).__next__)
    fingerprint = pool.open_namespace(namespace_spec(group_spec(chunk_bytes=1), tenant="acme"))[0].fingerprint
    if extents > 1:
        pool.set_quotas([Quota("tenant:acme", slots if zero is None else 2 * slots - 1)])
    present = run_of(*range(slots))
    put(pool, fingerprint, present)
    with pytest.raises(OutOfSpaceError, match=f"{slots + 1} blocks"):
        pool.put_start(fingerprint, [run_of(*range(10_000, 10_001 + slots))], ShardRange(0, 1))
    assert pool.lookup(fingerprint, [present], prefix_only=True).hits[0].num_leading == slots
    assert pool.counters["evicted_blocks"] == 0
    assert pool.counters["out_of_space_puts" if extents == 1 else "over_quota_puts"] == 1
    check_integrity(pool)


def _refusal(bench: Bench, count: int = 3) -> str:
    with pytest.raises(OutOfSpaceError) as caught:
        bench.start(*(f"new{nth}" for nth in range(count)))
    assert type(caught.value) is OutOfSpaceError, "its status is looked up by its class"
    return str(caught.value)


def test_a_refusal_says_what_may_hold_the_space_and_what_to_do(bench: Bench) -> None:
    assert "the whole arena of 1.95 KiB has 10 slots of this size" in _refusal(bench, 11)
    bench.store(*range(10))
    bench.look(*range(10), ttl_ms=1_000)
    assert _refusal(bench) == (
        "no room for 3 blocks of 200 bytes: too few can be evicted now: others are leased, being written, moved "
        "to or from a tier, or in quarantine; "
        "put fewer at once, try again later, or start kvpool-server with more --memory"
    )
    other = Bench()
    assert other.pool.put_start(other.name, [run_of(0, 1, group_idx=1)], ShardRange(0, 1)).ticket_id
    assert "200 B of the arena belong to blocks of other sizes" in _refusal(other, 10)
    pool = PoolAtOnce(Arena(2_000, 200, backed_bytes=400), FakeClock(), itertools.count(1).__next__, LIMITS)
    name = pool.open_namespace(namespace_spec(group_spec(chunk_bytes=200)))[0].fingerprint
    with pytest.raises(OutOfSpaceError, match=r"3 blocks of 200 bytes: .*; 1.56 KiB have no memory yet"):
        pool.put_start(name, [run_of(*"abc")], ShardRange(0, 1))


def test_a_put_never_evicts_what_it_names(bench: Bench) -> None:
    for name in range(10):
        bench.store(name)
    grant = bench.start(0, "new", parent=1)
    assert grant.statuses == (PRESENT, GRANTED)
    assert bench.present(*range(10)) == [0, 1, *range(3, 10)]


def test_a_run_continues_the_chain_of_its_parent(bench: Bench) -> None:
    bench.store("head")
    bench.store(*range(4), parent="head")
    bench.store(*"abcde")
    bench.pool.release([bench.look(*range(4), *"abcde", ttl_ms=100).lease_id])  # The head is now the oldest.
    bench.store("new")
    assert bench.present("head") == ["head"], "it was evicted under its children"


# Reads, writes and numbers


def test_only_the_bytes_of_live_holds_are_readable_and_writable(bench: Bench) -> None:
    for name in ("before", "a", "b"):
        bench.store(name)
    second = ShardRange(1, 1)
    ticket = bench.start("c", shards=second)
    lease_id, other_id = (bench.look(name, ttl_ms=100).lease_id for name in "ab")
    ((mine,), (other,)) = (
        bench.pool.get(each, bench.name, [run_of(name)], WHOLE).offsets
        for each, name in ((lease_id, "a"), (other_id, "b"))
    )
    (offset,) = ticket.offsets
    for check, hold_id, at, nbytes in (
        (bench.pool.readable, lease_id, mine, 2 * CHUNK),
        (bench.pool.writable, ticket.ticket_id, offset, CHUNK),
    ):
        check(hold_id, at, nbytes)
        check(hold_id, at + nbytes - 1, 1)
        for start, count in ((at - 1, nbytes), (at + 1, nbytes), (at - CHUNK, CHUNK), (other, 1), (1 << 50, 1)):
            with pytest.raises(InvalidRequestError, match=rf"\[{start}, {start + count}\) is in no"):
                check(hold_id, start, count)
    bench.clock.advance(0.1)
    with pytest.raises(LeaseExpiredError):
        bench.pool.readable(lease_id, mine, 1)
    with pytest.raises(LeaseExpiredError):
        bench.pool.writable(ticket.ticket_id, offset, CHUNK)


def test_stats_tell_what_the_pool_holds(bench: Bench) -> None:
    bench.store("a", "b")
    bench.start("c")
    bench.look("a", ttl_ms=1_000)
    bench.pool.remove(bench.name, [run_of("a")])
    stats = bench.pool.stats()
    assert (stats.arena_bytes, stats.free_bytes) == (2_000, 2_000 - 3 * 2 * CHUNK)
    assert (stats.num_entries, stats.num_incomplete, stats.num_quarantined) == (1, 1, 1)
    assert (stats.num_leases, stats.num_tickets) == (1, 1)
    assert stats.counters["put_granted_blocks"] == 3 and stats.counters["put_completed_blocks"] == 2
    assert stats.counters["removed_blocks"] == 1
    assert [(each.spec, each.held_blocks, each.complete_bytes) for each in bench.pool.open_namespaces()] == [
        (bench.spec, 1, 2 * CHUNK)
    ]


def test_check_integrity_sees_a_lost_slot(bench: Bench) -> None:
    bench.store("a")
    check_integrity(bench.pool)
    bench.pool.arena.allocate(2 * CHUNK, 1)
    with pytest.raises(AssertionError):
        check_integrity(bench.pool)


def test_a_group_that_has_become_empty_keeps_no_table(bench: Bench) -> None:
    bench.store("a", "b", "c")
    bench.pool.clear(bench.name)
    (table,) = bench.group.index._shards
    assert sys.getsizeof(table) == sys.getsizeof(type(table)(0, 0))
    bench.store("a")
    assert bench.present("a", "b") == ["a"]
