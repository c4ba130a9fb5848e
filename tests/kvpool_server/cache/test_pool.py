"""Rules that the random histories in tests/simulation do not see: errors, limits, counters, and what is evicted."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
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
from kvpool.protocol.types import BlockRun, Lookup, PutGrant, PutReceipt, PutStatus, Quota, ShardRange
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.steps import STEP_BLOCKS
from testbed.pool_at_once import PoolAtOnce
from tests.support.bare_pool import SLOT_BYTES, make_pool, put
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of
from tests.support.verification import verify

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


def test_opening_a_namespace_again_finds_it(bench: Bench) -> None:
    again, created = bench.pool.open_namespace(bench.spec, bench.name)
    assert not created and again.fingerprint == bench.name == bench.spec.fingerprint()


def test_another_fingerprint_than_expected_is_explained_field_by_field(bench: Bench) -> None:
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
    older, newer = _open(bench), _open(bench)
    with pytest.raises(OutOfSpaceError, match=r"3 namespaces are open.* clear one"):
        _open(bench)
    bench.seconds(LIMITS.namespace_idle_ms / 1000)
    _open(bench)
    assert bench.present("a") == ["a"]
    assert not _is_open(bench, older) and _is_open(bench, newer)
    check_integrity(bench.pool)


def test_a_stranger_who_opens_namespaces_closes_none_that_is_in_use(bench: Bench) -> None:
    bench.store("a")
    used = _open(bench)
    for _ in range(10 * LIMITS.max_namespaces):
        bench.seconds(LIMITS.namespace_idle_ms / 1000 / 2)
        bench.pool.lookup(used, [run_of("a")], prefix_only=True, lease_ttl_ms=1)
        with contextlib.suppress(OutOfSpaceError):
            _open(bench)
    assert bench.present("a") == ["a"] and _is_open(bench, used)


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


def test_namespaces_are_listed_with_what_they_hold(bench: Bench) -> None:
    bench.store("a", "b")
    bench.start("c")
    assert [(each.spec, each.held_blocks, each.complete_bytes) for each in bench.pool.open_namespaces()] == [
        (bench.spec, 2, 2 * 2 * CHUNK)
    ]


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


def test_a_lease_is_no_longer_than_the_limit(bench: Bench) -> None:
    bench.store("a")
    assert bench.look("a", ttl_ms=10_000_000).lease_ttl_ms == LIMITS.max_ttl_ms
    assert bench.look("a", ttl_ms=50).lease_ttl_ms == 50


def test_an_existence_check_renews_nothing_and_a_leased_lookup_does(bench: Bench) -> None:
    for name in range(10):
        bench.store(name)
    bench.look(0)
    bench.pool.release([bench.look(1, ttl_ms=100).lease_id])
    bench.store("new", "newer")
    assert bench.present(*range(10)) == [1, *range(3, 10)]


def test_too_many_leases_mean_hits_without_a_lease() -> None:
    bench = Bench(Limits(max_leases=1))
    bench.store("a")
    assert bench.look("a", ttl_ms=100).lease_id
    refused = bench.look("a", ttl_ms=100)
    assert refused.hits[0].num_leading == 1 and refused.lease_id == 0
    assert bench.pool.counters["refused_leases"] == 1


# Put


def test_a_shard_that_is_there_is_not_written_again_but_the_others_are(bench: Bench) -> None:
    first = ShardRange(0, 1)
    bench.end(bench.start("a", shards=first), "a", shards=first)
    assert bench.start("a", shards=first).statuses == (PRESENT,)
    both = bench.start("a")
    assert both.statuses == (GRANTED,)
    assert bench.end(both, "a") == PutReceipt(1, 1)


def test_a_ticket_that_expires_takes_the_other_shards_of_its_blocks_along(bench: Bench) -> None:
    first, second = ShardRange(0, 1), ShardRange(1, 1)
    bench.end(bench.start("a", shards=first), "a", shards=first)
    bench.start("a", shards=second, ttl_ms=100)
    bench.seconds(0.1)
    assert bench.start("a", shards=first).statuses == (GRANTED,)


def test_a_block_named_twice_in_one_put_is_written_once(bench: Bench) -> None:
    grant = bench.start("a", "a")
    assert grant.statuses == (GRANTED, BUSY) and len(grant.offsets) == 1


def test_put_end_wants_a_checksum_for_each_chunk_and_the_ticket_survives_a_mistake(bench: Bench) -> None:
    grant = bench.start("a")
    for count in (0, 1, 3):
        with pytest.raises(InvalidRequestError, match=f"{count} checksums; the ticket covers 1 blocks x 2 shards"):
            bench.pool.put_end(grant.ticket_id, [0] * count)
    assert bench.end(grant, "a") == PutReceipt(1, 1)


def test_a_ticket_lives_until_its_deadline_and_no_longer(bench: Bench) -> None:
    in_time, late = bench.start("in time", ttl_ms=125), bench.start("late", ttl_ms=125)
    bench.seconds(0.125 - TICK)
    bench.end(in_time, "in time")
    bench.seconds(TICK)
    with pytest.raises(LeaseExpiredError, match=rf"ticket {late.ticket_id:#x} is not live.*put_start again"):
        bench.end(late, "late")
    assert bench.present("in time", "late") == ["in time"]
    assert bench.pool.counters["expired_tickets"] == 1


def test_a_ticket_without_a_wish_gets_the_default_and_none_exceeds_the_limit(bench: Bench) -> None:
    assert bench.start("a", ttl_ms=0).ticket_ttl_ms == LIMITS.default_ticket_ttl_ms
    assert bench.start("b", ttl_ms=10_000_000).ticket_ttl_ms == LIMITS.max_ttl_ms


def test_the_slot_of_an_expired_ticket_waits_for_the_grace_and_the_next_writer_does_not(bench: Bench) -> None:
    lost = bench.start("a", ttl_ms=125)
    bench.seconds(0.125)
    assert bench.pool.stats().num_quarantined == 1
    again = bench.start("a", ttl_ms=125)
    assert again.statuses == (GRANTED,) and again.offsets != lost.offsets
    bench.end(again, "a")
    bench.seconds(0.25 - TICK)
    assert bench.pool.stats().num_quarantined == 1
    bench.seconds(TICK)
    assert bench.pool.stats().num_quarantined == 0
    assert bench.pool.stats().free_bytes == 9 * 2 * CHUNK


def test_two_tickets_of_one_block_that_expire_unnoticed_free_its_slot_once(bench: Bench) -> None:
    for shard in (0, 1):
        bench.start("a", shards=ShardRange(shard, 1), ttl_ms=100)
    bench.seconds(10.0)  # Beyond the grace, too: no call came in between.
    stats = bench.pool.stats()
    assert (stats.free_bytes, stats.num_quarantined, stats.num_tickets) == (stats.arena_bytes, 0, 0)


@pytest.mark.parametrize("ends", ["revoked", "ended"])
def test_a_writer_that_ends_in_time_does_not_free_the_slot_of_a_late_one(bench: Bench, ends: str) -> None:
    first, second = ShardRange(0, 1), ShardRange(1, 1)
    bench.start("a", shards=first, ttl_ms=125)
    in_time = bench.start("a", shards=second, ttl_ms=250)
    bench.seconds(0.125)  # The first one's ticket has expired, and its writer may be late.
    if ends == "revoked":
        bench.pool.put_revoke(in_time.ticket_id)
    else:
        bench.end(in_time, "a", shards=second)
    bench.seconds(0.25 - TICK)
    assert bench.pool.stats().num_quarantined == 1
    bench.seconds(0.25)
    assert bench.pool.stats().num_quarantined == 0


def test_revoking_one_shard_keeps_the_other(bench: Bench) -> None:
    first, second = ShardRange(0, 1), ShardRange(1, 1)
    bench.end(bench.start("a", shards=first), "a", shards=first)
    bench.pool.put_revoke(bench.start("a", shards=second).ticket_id)
    assert bench.start("a", shards=first).statuses == (PRESENT,)
    bench.end(bench.start("a", shards=second), "a", shards=second)
    assert bench.present("a") == ["a"]


def test_a_batch_that_names_blocks_again_and_again_needs_room_for_each_of_them_once() -> None:
    pool, fingerprint = make_pool(8 * STEP_BLOCKS, "lru", FakeClock())
    run = run_of(*range(3 * STEP_BLOCKS))
    grant = pool.put_start(fingerprint, [run] * 4, ShardRange(0, 1))
    assert [grant.statuses.count(each) for each in PutStatus] == [len(run), 0, 3 * len(run)]


def test_a_batch_beyond_the_extents_of_a_tenants_quota_evicts_nothing() -> None:
    """A tenant's quota counts whole extents, so that less fits than its bytes would hold."""
    slots = 4 * STEP_BLOCKS
    arena = Arena(8 * slots * CHUNK, slots * CHUNK, zero=lambda *_: None)
    pool = PoolAtOnce(arena, FakeClock(), itertools.count(1).__next__)
    spec = namespace_spec(group_spec(chunk_bytes=CHUNK), tenant="acme")
    name = pool.open_namespace(spec)[0].fingerprint
    pool.set_quotas([Quota("tenant:acme", 2 * slots * CHUNK - 1)])
    put(pool, name, run_of(*range(slots)))
    with pytest.raises(OutOfSpaceError, match=f"tenant:acme.*: {slots + 1} blocks"):
        pool.put_start(name, [run_of(*range(10_000, 10_001 + slots))], ShardRange(0, 1))
    assert pool.counters["evicted_blocks"] == 0 and pool.stats().num_entries == slots
    check_integrity(pool)


@pytest.mark.parametrize("quota", ["", "tenant:acme"])
def test_a_batch_that_can_never_fit_evicts_nothing(quota: str) -> None:
    slots = 4 * STEP_BLOCKS
    pool, fingerprint = make_pool(slots if not quota else 2 * slots, "lru", FakeClock(), tenant="acme")
    if quota:
        pool.set_quotas([Quota(quota, slots * SLOT_BYTES)])
    present, large = (run_of(*((name, nth) for nth in range(slots + more))) for name, more in (("a", 0), ("b", 1)))
    put(pool, fingerprint, present)
    with pytest.raises(OutOfSpaceError, match=f"{slots + 1} blocks"):
        pool.put_start(fingerprint, [large], ShardRange(0, 1))
    found = pool.lookup(fingerprint, [present], prefix_only=True, lease_ttl_ms=1_000)
    assert found.hits[0].num_leading == slots
    assert pool.counters["evicted_blocks"] == 0
    assert pool.counters["over_quota_puts" if quota else "out_of_space_puts"] == 1
    check_integrity(pool)


def _refusal(bench: Bench, count: int = 3) -> str:
    with pytest.raises(OutOfSpaceError) as caught:
        bench.start(*(f"new{nth}" for nth in range(count)))
    assert type(caught.value) is OutOfSpaceError, "its status is looked up by its class"
    return str(caught.value)


def test_a_refusal_says_what_may_hold_the_space_and_what_to_do(bench: Bench) -> None:
    bench.store(*range(10))
    bench.look(*range(10), ttl_ms=1_000)
    assert _refusal(bench) == (
        "no room for 3 blocks of 200 bytes: too few can be evicted now: others are leased, being written, moved "
        "to or from a tier, or in quarantine; "
        "put fewer at once, try again later, or start kvpool-server with more --memory"
    )


def test_a_refusal_says_what_belongs_to_other_sizes_and_what_the_arena_has_room_for(bench: Bench) -> None:
    assert "the whole arena of 1.95 KiB has 10 slots of this size" in _refusal(bench, 11)
    grant = bench.pool.put_start(bench.name, [BlockRun(1, [block_hash(nth) for nth in range(2)])], ShardRange(0, 1))
    assert grant.ticket_id
    assert "200 B of the arena belong to blocks of other sizes" in _refusal(bench, 10)


def test_a_refusal_says_that_memory_is_not_there_yet() -> None:
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


def test_tickets_are_bounded() -> None:
    bench = Bench(Limits(max_tickets=1))
    bench.start("a")
    with pytest.raises(OutOfSpaceError, match="1 puts are under way; the limit is 1"):
        bench.start("b")


def test_only_the_regions_of_a_live_ticket_are_writable(bench: Bench) -> None:
    second = ShardRange(1, 1)
    grant = bench.start("a", shards=second)
    (offset,) = grant.offsets
    bench.pool.writable(grant.ticket_id, offset, CHUNK)
    bench.pool.writable(grant.ticket_id, offset + CHUNK - 1, 1)
    for at, nbytes in ((offset - 1, CHUNK), (offset + 1, CHUNK), (offset - CHUNK, CHUNK), (1 << 50, 1)):
        with pytest.raises(InvalidRequestError, match=rf"\[{at}, {at + nbytes}\) is in no region of ticket"):
            bench.pool.writable(grant.ticket_id, at, nbytes)
    bench.clock.advance(0.1)
    with pytest.raises(LeaseExpiredError):
        bench.pool.writable(grant.ticket_id, offset, CHUNK)


# Get


def test_a_lease_lives_until_its_deadline_and_no_longer(bench: Bench) -> None:
    bench.store("a")
    lease_id = bench.look("a", ttl_ms=125).lease_id
    bench.seconds(0.125 - 2 * TICK)
    assert bench.pool.get(lease_id, bench.name, [run_of("a")], WHOLE).lease_remaining_ms == 1
    bench.seconds(2 * TICK)
    with pytest.raises(LeaseExpiredError, match=rf"lease {lease_id:#x} is not live.*look up again"):
        bench.pool.get(lease_id, bench.name, [run_of("a")], WHOLE)
    assert bench.pool.counters["expired_leases"] == 1


def test_only_leased_blocks_are_readable(bench: Bench) -> None:
    bench.store("a")
    bench.store("b")
    lease_id = bench.look("a", ttl_ms=100).lease_id
    (offset,) = bench.pool.get(lease_id, bench.name, [run_of("a")], WHOLE).offsets
    other = bench.pool.get(bench.look("b", ttl_ms=100).lease_id, bench.name, [run_of("b")], WHOLE).offsets[0]
    bench.pool.readable(lease_id, offset, 2 * CHUNK)
    for at, nbytes in ((offset + 1, 2 * CHUNK), (other, 1), (1 << 50, 1)):
        with pytest.raises(InvalidRequestError, match=rf"\[{at}, {at + nbytes}\) is in no block of lease"):
            bench.pool.readable(lease_id, at, nbytes)
    bench.clock.advance(0.1)
    with pytest.raises(LeaseExpiredError):
        bench.pool.readable(lease_id, offset, 1)


# Bad requests


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda b: b.pool.put_start(b.name, [run_of("a"), run_of("b", group_idx=1)], WHOLE),
            "blocks of several groups",
        ),
        (lambda b: b.start("a", shards=ShardRange(1, 2)), r"shards \[1, 3\) are not within the group's 2 shards"),
        (lambda b: b.start("a", shards=ShardRange(0, 0)), r"shards \[0, 0\) are not within"),
        (lambda b: b.start("a", shards=ShardRange(2**32 - 1, 2**32 - 1)), r"2 shards"),
        (lambda b: b.pool.remove(b.name, [BlockRun(0, [])]), "a batch of 0 blocks"),
    ],
)
def test_bad_requests_name_what_is_wrong(bench: Bench, call: Callable[[Bench], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call(bench)


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


def test_check_integrity_sees_a_lost_slot(bench: Bench) -> None:
    bench.store("a")
    check_integrity(bench.pool)
    bench.pool.arena.allocate(2 * CHUNK, 1)
    with pytest.raises(AssertionError):
        check_integrity(bench.pool)


# What an observer is told


class Told(Observer):
    """What is readable, by what it was told."""

    def __init__(self) -> None:
        self.readable: dict[tuple[str, int, bytes], bytes] = {}

    def stored(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.complete
            self.readable[self._key(entry)] = entry.parent_hash

    def removed(self, entry: Entry) -> None:
        del self.readable[self._key(entry)]

    def names(self, *candidates: str, group_idx: int = 0) -> list[str]:
        named = {(idx, name) for _, idx, name in self.readable}
        return [name for name in candidates if (group_idx, block_hash(name)) in named]

    @staticmethod
    def _key(entry: Entry) -> tuple[str, int, bytes]:
        return entry.group.namespace, entry.group.idx, entry.block_hash


@pytest.fixture
def told(bench: Bench) -> Told:
    bench.pool.observe(told := Told())
    return told


def test_an_observer_hears_of_a_block_with_its_last_shard(bench: Bench, told: Told) -> None:
    for shard in (ShardRange(0, 1), ShardRange(1, 1)):
        assert not told.readable
        bench.end(bench.start("a", shards=shard), "a", shards=shard)
    assert told.names("a") == ["a"]


def test_an_observer_hears_of_each_way_to_go(bench: Bench, told: Told) -> None:
    bench.store(*"abc")
    bench.pool.remove(bench.name, [run_of("c")])
    assert told.names(*"abc") == ["a", "b"]
    bench.memory[bench.group.index.get(block_hash("a")).offset] ^= 1
    verify(bench.pool, bench.name, [run_of("a")], bench.memory)
    assert told.names(*"ab") == ["b"]
    bench.store(*range(10))
    assert told.names("b") == []
    bench.pool.clear()
    assert not told.readable


def test_an_observer_does_not_hear_of_blocks_that_never_were_complete(bench: Bench, told: Told) -> None:
    grant = bench.start("a")
    bench.pool.put_revoke(grant.ticket_id)
    bench.start("b")
    bench.seconds(1)
    bench.end(bench.start("c", shards=ShardRange(0, 1)), "c", shards=ShardRange(0, 1))
    bench.pool.clear()
    assert not told.readable


def test_an_observer_hears_of_a_namespace_that_makes_way(bench: Bench, told: Told) -> None:
    _open(bench, salt="same", weights_epoch="1")
    name = bench.pool.open_namespaces()[-1].fingerprint
    grant = bench.pool.put_start(name, [run_of("a")], ShardRange(0, 1))
    bench.pool.put_end(grant.ticket_id, [0])
    _open(bench, salt="same", weights_epoch="2")
    assert len(told.readable) == 1
    bench.store("b")
    bench.seconds(LIMITS.namespace_idle_ms / 1000)
    bench.pool.lookup(bench.name, [run_of("b")], prefix_only=True, lease_ttl_ms=1)
    bench.pool.lookup(bench.pool.open_namespaces()[-1].fingerprint, [run_of("b")], prefix_only=True, lease_ttl_ms=1)
    _open(bench)
    assert told.names("b") == ["b"] and len(told.readable) == 1


def test_an_observer_learns_the_block_before_each_one_though_it_is_not_there(bench: Bench, told: Told) -> None:
    bench.store("b", "c", parent="a")
    label = f"{bench.name.hex()}@{bench.spec.model}"
    assert told.readable == {
        (label, 0, block_hash("b")): block_hash("a"),
        (label, 0, block_hash("c")): block_hash("b"),
    }


def test_a_group_that_has_become_empty_keeps_no_table(bench: Bench) -> None:
    bench.store("a", "b", "c")
    bench.pool.clear(bench.name)
    (table,) = bench.group.index._shards
    assert sys.getsizeof(table) == sys.getsizeof(type(table)(0, 0))
    bench.store("a")
    assert bench.present("a", "b") == ["a"]
