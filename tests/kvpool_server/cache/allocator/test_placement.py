"""Which entries are evicted for which slot size. Driven through the pool: `Placement` decides, the pool acts."""

import itertools

import pytest

from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import ShardRange
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.eviction.lru import PrefixLRU
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import group_spec, namespace_spec, payload, run_of

EXTENT = 1_000
WHOLE = ShardRange(0, 1)


class Tenants:
    """One pool, and a namespace for each slot size."""

    def __init__(self, num_extents: int):
        ids = itertools.count(1)
        self.pool = PoolAtOnce(Arena(num_extents * EXTENT, EXTENT), FakeClock(), lambda: next(ids), policy=PrefixLRU)
        self._names = itertools.count()
        self._fingerprints: dict[int, bytes] = {}

    def fingerprint(self, size: int) -> bytes:
        if size not in self._fingerprints:
            spec = namespace_spec(group_spec(chunk_bytes=size))
            self._fingerprints[size] = self.pool.open_namespace(spec)[0].fingerprint
        return self._fingerprints[size]

    def store(self, size: int, count: int = 1) -> list[int]:
        """Stores `count` unrelated blocks of `size` bytes; returns their names."""
        names = [next(self._names) for _ in range(count)]
        for name in names:
            grant = self.pool.put_start(self.fingerprint(size), [run_of(name)], WHOLE)
            self.pool.put_end(grant.ticket_id, [checksum(payload(name, size))])
        check_integrity(self.pool)
        return names

    def fill_extents(self, size: int, count: int) -> list[int]:
        return self.store(size, count * (EXTENT // size))

    def present(self, size: int, names: list[int]) -> list[int]:
        hits = self.pool.lookup(self.fingerprint(size), [run_of(*names)], prefix_only=False).hits[0]
        return [name for idx, name in enumerate(names) if hits.complete >> idx & 1]

    def lease(self, size: int, names: list[int]) -> int:
        found = self.pool.lookup(self.fingerprint(size), [run_of(*names)], prefix_only=False, lease_ttl_ms=60_000)
        return found.lease_id

    def extents(self) -> dict[int, int]:
        return {size: len(self.pool.arena.extents(size)) for size in self.pool.arena.sizes()}


def test_free_space_is_taken_first() -> None:
    tenants = Tenants(4)
    old = tenants.fill_extents(100, 2)
    new = tenants.fill_extents(200, 2)
    assert tenants.present(100, old) == old and tenants.present(200, new) == new
    assert tenants.pool.counters["evicted_blocks"] == 0


def test_a_size_alone_may_have_everything_and_then_evicts_its_own_oldest() -> None:
    tenants = Tenants(4)
    names = tenants.fill_extents(100, 4)
    assert tenants.extents() == {100: 4}
    tenants.store(100, 3)
    assert tenants.present(100, names) == names[3:]


def test_a_newcomer_gets_its_fair_share_and_no_more() -> None:
    tenants = Tenants(4)
    tenants.fill_extents(100, 4)
    new: list[int] = []
    for _ in range(20):  # Both are in use all the time.
        new += tenants.store(200)
        tenants.store(100)
    assert tenants.extents() == {100: 2, 200: 2}
    assert tenants.present(200, new) == new[-2 * EXTENT // 200 :]


def test_the_share_is_taken_from_whoever_has_most() -> None:
    tenants = Tenants(8)
    few, many = tenants.fill_extents(125, 2), tenants.fill_extents(100, 6)
    tenants.store(200)
    assert tenants.extents() == {100: 5, 125: 2, 200: 1}
    assert tenants.present(125, few) == few, "the coldest, but it has no more than its share"
    assert tenants.present(100, many) == many[EXTENT // 100 :]


def test_the_coldest_extent_is_the_one_given_up() -> None:
    tenants = Tenants(4)
    first, second, third, fourth = (tenants.fill_extents(100, 1) for _ in range(4))
    tenants.pool.release([tenants.lease(100, first), tenants.lease(100, second), tenants.lease(100, fourth)])
    tenants.store(200)
    assert tenants.present(100, third) == []
    for names in (first, second, fourth):
        assert tenants.present(100, names) == names


def test_a_size_nobody_uses_any_more_gives_way_entirely() -> None:
    tenants = Tenants(4)
    dead = tenants.fill_extents(100, 2)
    living = tenants.fill_extents(200, 2)
    for _ in range(4 * EXTENT // 200):
        living += tenants.store(200)
    assert tenants.extents() == {200: 4}
    assert tenants.present(100, dead) == []
    assert tenants.present(200, living) == living[-4 * EXTENT // 200 :]


def test_the_dead_size_gives_way_before_the_living_one_evicts_its_own() -> None:
    tenants = Tenants(4)
    tenants.fill_extents(100, 2)
    living = tenants.fill_extents(200, 2)
    tenants.store(200)
    assert tenants.present(200, living) == living


def test_more_sizes_than_extents_take_turns() -> None:
    tenants = Tenants(2)
    for size in (100, 125, 200, 250, 100, 500):
        (name,) = tenants.store(size)
        assert tenants.present(size, [name]) == [name]
    assert len(tenants.extents()) == 2


def test_extents_in_which_someone_reads_or_writes_stay() -> None:
    tenants = Tenants(2)
    names = tenants.fill_extents(100, 2)
    lease_id = tenants.lease(100, [names[0], names[-1]])
    with pytest.raises(OutOfSpaceError, match="no room for 1 blocks of 200 bytes"):
        tenants.store(200)
    assert tenants.present(100, names) == names, "a refused put changed something"
    tenants.pool.release([lease_id])
    tenants.store(200)

    tenants = Tenants(1)
    tenants.pool.put_start(tenants.fingerprint(100), [run_of("being written")], WHOLE)
    with pytest.raises(OutOfSpaceError):
        tenants.store(200)


def test_a_put_larger_than_what_can_be_had_evicts_nothing() -> None:
    tenants = Tenants(2)
    names = tenants.fill_extents(100, 2)
    with pytest.raises(OutOfSpaceError, match="no room for 21 blocks"):
        tenants.pool.put_start(tenants.fingerprint(100), [run_of(*(f"new{idx}" for idx in range(21)))], WHOLE)
    assert tenants.present(100, names) == names
    assert tenants.pool.counters["out_of_space_puts"] == 1
