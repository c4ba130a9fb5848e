"""What a table says after its calls; `tests/simulation/test_adoption_machine.py` has the deaths between them."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvpool.protocol.types import BlockRun, Quota, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import POLICIES
from kvpool_server.cache.eviction.evictor import Chosen
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.server_access import Columns
from kvpool_server.cache.steps import finish
from kvpool_server.keeping.adoption import TableFollower, restore
from kvpool_server.keeping.records import record_bytes
from kvpool_server.keeping.table import HEAD_BYTES, Geometry, Kind, SlotTable, geometry_of
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.values import block_hash, group_spec, namespace_spec

EXTENT_BYTES, NUM_EXTENTS = 1 << 20, 4
GEOMETRY = Geometry(EXTENT_BYTES * NUM_EXTENTS, EXTENT_BYTES, False, b"n" * 16, b"t" * 16)
CHUNK = 64
SPECS = {count: namespace_spec(group_spec(chunk_bytes=CHUNK, num_shards=count)) for count in (1, 4, 5, 8)}


@pytest.fixture
def table() -> Iterator[SlotTable]:
    with closing(SlotTable.create(GEOMETRY)) as table:
        yield table


def _pool(clock: FakeClock | None = None, policy: str = "lru") -> PoolAtOnce:
    ids = iter(range(1, 1 << 30))
    arena = Arena(EXTENT_BYTES * NUM_EXTENTS, EXTENT_BYTES)
    return PoolAtOnce(arena, clock or FakeClock(), lambda: next(ids), policy=POLICIES[policy])


def _put(pool: PoolAtOnce, names: range, num_shards: int = 1, parent: int | None = None) -> None:
    namespace, _ = pool.open_namespace(SPECS[num_shards])
    run = BlockRun(0, [block_hash(nth) for nth in names], b"" if parent is None else block_hash(parent))
    grant = pool.put_start(namespace.fingerprint, [run], ShardRange(0, num_shards))
    pool.put_end(grant.ticket_id, list(range(len(names) * num_shards)))


def _adopted(table: SlotTable, clock: FakeClock | None = None) -> Pool:
    pool = _pool(clock)
    restore(pool, table)
    return pool


def test_a_head_says_what_the_table_was_made_for(table: SlotTable) -> None:
    found = geometry_of(table.fd)
    assert found is not None and found[:-1] == GEOMETRY[:-1]
    os.pwrite(table.fd, b"x", 20)
    assert geometry_of(table.fd) is None


@pytest.mark.parametrize(("num_shards", "nbytes"), [(1, 96), (4, 120), (5, 128), (8, 152)])
def test_a_slot_takes_this_much_memory(table: SlotTable, num_shards: int, nbytes: int) -> None:
    """12 bytes of it are marks, whose pages are others'."""
    pool, count = _pool(), 1_500
    before = os.fstat(table.fd).st_blocks * 512
    TableFollower(pool, table)
    _put(pool, range(count), num_shards)
    taken = os.fstat(table.fd).st_blocks * 512 - before
    assert taken / count < nbytes + 12 + 4 * 4_096 / count
    assert len(list(_adopted(table).open_namespaces()[0].entries())) == count
    assert os.fstat(table.fd).st_blocks * 512 - before < taken + 8 * 4_096, "an adoption fills holes"


def test_a_table_of_more_extents_has_what_it_took_over(table: SlotTable) -> None:
    """A move that ends early, because it was killed, leaves whole extents."""
    pool = _pool()
    TableFollower(pool, table)
    for num_shards in (1, 4):
        _put(pool, range(10 * num_shards, 10 * num_shards + 3), num_shards)
    larger = GEOMETRY._replace(arena_bytes=2 * GEOMETRY.arena_bytes, secret=table.secret)
    with closing(SlotTable.create(larger)) as other:
        other.copy(table)
        other.copy(table, 0)
        names = {entry.block_hash for each in _adopted(other).open_namespaces() for entry in each.entries()}
    assert names == {block_hash(nth) for nth in (10, 11, 12)}


def test_blocks_come_back_in_the_order_of_their_last_uses_with_their_pins(table: SlotTable) -> None:
    clock = FakeClock()
    pool = _pool(clock)
    follower = TableFollower(pool, table)
    for first in (0, 10, 20):
        _put(pool, range(first, first + 10))
    fingerprint = pool.open_namespaces()[0].fingerprint
    pool.lookup(fingerprint, [BlockRun(0, [block_hash(nth) for nth in range(10)])], prefix_only=True, lease_ttl_ms=1)
    finish(pool.hints.pin_in_steps(fingerprint, [BlockRun(0, [block_hash(0), block_hash(1)])], 600))
    finish(follower.mark())
    after = _adopted(table, clock)
    assert after.pins.pinned_bytes() == pool.pins.pinned_bytes() == 2 * CHUNK
    group = after.open_namespaces()[0].groups[0]
    used = {nth: entry.used for nth in (0, 10, 20) if (entry := group.index.get(block_hash(nth))) is not None}
    assert used[10] < used[20] < used[0]
    assert after.placement.next_stamp([group]) > used[0]
    (victim, *_) = after.placement.evictor(group).choose(1, Chosen())
    assert victim.block_hash == block_hash(19)


def test_children_find_their_parents_wherever_they_lie(table: SlotTable) -> None:
    pool = _pool()
    TableFollower(pool, table)
    _put(pool, range(4))
    pool.remove(pool.open_namespaces()[0].fingerprint, [BlockRun(0, [block_hash(2)])])
    _put(pool, range(10, 11), parent=3)
    _put(pool, range(2, 3), parent=1)  # In the slot that is free again: behind its child, or before it.
    (namespace,) = _adopted(table).open_namespaces()
    entries = {entry.block_hash: entry for entry in namespace.entries()}
    assert entries[block_hash(10)].parent is entries[block_hash(3)]
    assert entries[block_hash(3)].parent is entries[block_hash(2)]
    assert entries[block_hash(2)].parent is entries[block_hash(1)]
    assert [entries[block_hash(nth)].children for nth in (0, 1, 2, 3, 10)] == [1, 1, 1, 1, 0]


def test_quotas_come_back_but_for_those_of_the_settings(table: SlotTable) -> None:
    pool = _pool()
    TableFollower(pool, table)
    pool.set_quotas([Quota("tenant:acme", 1 << 20), Quota("tenant:initech", 2 << 20)])
    after = _pool()
    after.set_quotas([Quota("tenant:acme", 3 << 20)])
    restore(after, table, {"tenant:acme"})
    assert {each.subject: each.limit_bytes for each in after.quotas()} == {
        "tenant:acme": 3 << 20,
        "tenant:initech": 2 << 20,
    }


@pytest.mark.parametrize(("name_bytes", "come_back"), [(300, True), (30_000, False)])
def test_no_quota_comes_back_that_was_removed_however_long_the_others_are(
    table: SlotTable, name_bytes: int, come_back: bool
) -> None:
    pool = _pool()
    TableFollower(pool, table)
    pool.set_quotas([Quota("tenant:acme", 1 << 20)])
    for nth in range(250):
        pool.set_quotas([Quota(f"tenant:{nth:0{name_bytes}}", 1 << 20)])
    pool.set_quotas([Quota("tenant:acme", 0)])
    assert [each.subject for each in _adopted(table).quotas()] == [each.subject for each in pool.quotas() if come_back]


def test_a_removal_beside_a_clear_ends_when_its_blocks_cannot_come_back(table: SlotTable) -> None:
    """No lookup finds them from the clear's first step on, but their records go one after the other."""
    pool = _pool()
    TableFollower(pool, table)
    _put(pool, range(3_000))
    (namespace,) = pool.open_namespaces()
    next(pool.removals.clear(namespace.fingerprint))
    assert pool.remove(namespace.fingerprint, [BlockRun(0, [block_hash(2_999)])]) == 0
    found = {entry.block_hash for each in _adopted(table).open_namespaces() for entry in each.entries()}
    assert block_hash(2_999) not in found


def test_a_clear_of_all_namespaces_clears_those_that_are_being_closed(table: SlotTable) -> None:
    pool = _pool()
    TableFollower(pool, table)
    pool.namespaces._limits = replace(pool.limits, max_namespaces=4, namespace_idle_ms=0)
    group = group_spec(chunk_bytes=CHUNK)
    run = BlockRun(0, [block_hash(nth) for nth in range(2_000)])
    for epoch in range(5):
        namespace, _ = pool.open_namespace(namespace_spec(group, salt="one model", weights_epoch=str(epoch)))
        if pool.namespaces.closing:
            break
        pool.put_end(pool.put_start(namespace.fingerprint, [run], ShardRange(0, 1)).ticket_id, [0] * 2_000)
    assert pool.namespaces.closing
    pool.clear()
    assert not any(each.entries() for each in _adopted(table).open_namespaces())


def test_a_namespace_that_is_closed_gives_its_place_to_another(table: SlotTable) -> None:
    pool = _pool()
    follower = TableFollower(pool, table)
    _put(pool, range(4))
    namespace = pool.open_namespaces()[0]
    assert [spec for *_, spec in table.namespaces()] == [namespace.spec]
    pool.clear()
    follower._closed(namespace)
    assert table.namespaces() == []


def test_times_and_sizes_that_cannot_be_have_bounds(table: SlotTable) -> None:
    clock = FakeClock()
    pool = _pool(clock)
    TableFollower(pool, table)
    spec = namespace_spec(group_spec(chunk_bytes=EXTENT_BYTES // 2))
    run = BlockRun(0, [block_hash(0)])
    pool.put_end(pool.put_start(pool.open_namespace(spec)[0].fingerprint, [run], ShardRange(0, 1)).ticket_id, [0])
    for idx in range(NUM_EXTENTS):
        table.put_late(idx, 1e12)
    table.backed_bytes = 1 << 62
    assert table.backed_bytes == NUM_EXTENTS * EXTENT_BYTES
    pool = _pool(clock)
    restore(pool, table)
    assert pool.stats().num_quarantined
    clock.advance((pool.limits.max_ttl_ms + pool.limits.grace_ms) / 1000 + 1)
    pool.settle()
    assert not pool.stats().num_quarantined


def test_older_weights_are_superseded_after_each_restart_whichever_were_stored_first(table: SlotTable) -> None:
    clock = FakeClock()
    pool = _pool(clock)
    TableFollower(pool, table)
    specs = [
        namespace_spec(group_spec(chunk_bytes=CHUNK), salt="one model", weights_epoch=str(nth)) for nth in range(3)
    ]
    for opened in ((0, 1), (2,)):
        for nth in opened:
            pool.open_namespace(specs[nth])
            clock.advance(1)
        for nth in reversed(opened):
            run = BlockRun(0, [block_hash(nth)])
            grant = pool.put_start(specs[nth].fingerprint(), [run], ShardRange(0, 1))
            pool.put_end(grant.ticket_id, [0])
        pool = _pool(clock)
        restore(pool, table)
        found = [(each.spec.weights_epoch, each.superseded) for each in pool.open_namespaces()]
        assert found == [(str(nth), nth < opened[-1]) for nth in range(opened[-1] + 1)]


def test_policies_go_on_from_what_they_had_learned(table: SlotTable) -> None:
    pool = _pool(policy="density")
    follower = TableFollower(pool, table)
    for num_shards in (1, 4):
        _put(pool, range(num_shards * 100, num_shards * 110), num_shards)
    finish(follower.mark())
    after = _pool(policy="density")
    restore(after, table)
    policies, had_learned = dict(after.placement.policies()), dict(pool.placement.policies())
    assert policies.keys() == had_learned.keys() and len(policies) == 2
    for slot_class, policy in policies.items():
        expected = POLICIES["density"]()
        expected.relearn(had_learned[slot_class].learned())
        assert policy.learned() == expected.learned()
    table.put_learned(0, 64, ("", CHUNK), b"learned by another policy")
    unlearned = _pool(policy="density")
    restore(unlearned, table)
    assert unlearned.counters["adopted_blocks"] == 50


@pytest.mark.parametrize("num_shards", [1, 4, 5, 8])
def test_a_record_is_absent_unless_each_byte_is_there_whatever_it_overwrites(table: SlotTable, num_shards: int) -> None:
    """A death cuts the write of two records, side by side, or their removal, after each of its bytes."""
    pool, count = _pool(), 2
    TableFollower(pool, table)
    spec = namespace_spec(group_spec(chunk_bytes=EXTENT_BYTES // 4 // num_shards, num_shards=num_shards))
    fingerprint = pool.open_namespace(spec)[0].fingerprint
    nbytes, whole = record_bytes(num_shards), dict[bytes, bytes]()
    contents = [bytes(count * nbytes)]
    for first in (0, count):
        run = BlockRun(0, [block_hash(nth) for nth in range(first, first + count)])
        grant = pool.put_start(fingerprint, [run], ShardRange(0, num_shards))
        pool.put_end(grant.ticket_id, [secrets.randbits(64) for _ in range(count * num_shards)])
        (at, _) = table._records_at(pool.open_namespaces()[0].entries())
        stored = os.pread(table.fd, count * nbytes, at)
        whole |= {stored[nth * nbytes :][:nbytes]: name for nth, name in enumerate(run.block_hashes)}
        pool.remove(fingerprint, [run])
        contents += [stored, os.pread(table.fd, count * nbytes, at)]
    for before, after in itertools.permutations(contents, 2):
        for cut in range(len(after) + 1):
            left = after[:cut] + before[cut:]
            os.pwrite(table.fd, left, at)
            there = [left[nth * nbytes :][:nbytes] for nth in range(count)]
            assert _kept(table) == [whole[each] for each in there if each in whole]


def test_no_byte_at_which_a_later_time_is_cut_leaves_an_earlier_one(table: SlotTable) -> None:
    for before, after in itertools.pairwise((254.5, 255, 256, 65_535.5, 65_537, 1 << 32)):
        table.put_late(1, before)
        old = os.pread(table.fd, HEAD_BYTES, 0)
        table.put_late(1, after)
        new = os.pread(table.fd, HEAD_BYTES, 0)
        for cut in [nth for nth in range(1, HEAD_BYTES) if new[nth - 1 : nth + 1] != old[nth - 1 : nth + 1]]:
            os.pwrite(table.fd, new[:cut] + old[cut:], 0)
            with closing(SlotTable.reopen(os.dup(table.fd))) as left:
                assert before <= left.late_until[1] and not any(left.late_until[:1] + left.late_until[2:])
        os.pwrite(table.fd, new, 0)


@pytest.mark.parametrize("can_punch", [True, False])
def test_records_of_another_layout_are_erased_to_the_last_byte(
    table: SlotTable, can_punch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system cannot punch holes."""

    class Pages:
        def madvise(self, *_: int) -> None:
            raise OSError("not here")

    pages = table._pages
    if not can_punch:
        monkeypatch.setattr(table, "_pages", Pages())
    pool = _pool()
    TableFollower(pool, table)
    _put(pool, range(4))
    pool.clear()
    first, nbytes = table._start(0) + 8, 1 << 20
    assert any(os.pread(table.fd, nbytes, first)), "what a removed record said is there until it is erased"
    _put(pool, range(4), num_shards=4)
    pool.clear()
    _put(pool, range(4))
    monkeypatch.setattr(table, "_pages", pages)
    there = np.frombuffer(os.pread(table.fd, nbytes, first), np.uint8)
    assert np.count_nonzero(there) <= 8 + 4 * record_bytes(1)
    assert len(_kept(table)) == 4


def _kept(table: SlotTable) -> list[bytes]:
    """The blocks whose records in the first extent are there whole."""
    names: list[bytes] = []

    def keep(kind: Kind, columns: Columns) -> list[int]:
        names.extend(columns.block_hashes)
        return list(columns.offsets)

    table.sift(0, keep)
    return names
