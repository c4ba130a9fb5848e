"""Blocks of a process before this one, in a pool that is empty."""

from __future__ import annotations

import itertools
import sys
from array import array

from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Group
from kvpool_server.cache.server_access import Adoption, Columns
from testbed.pool_at_once import PoolAtOnce
from tests.support.bare_pool import put
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec, run_of

CHUNK = 64


def _adoption(arena: Arena, count: int) -> tuple[PoolAtOnce, Group, Columns]:
    """An empty pool, a group of it, and records of blocks that lie side by side."""
    pool = PoolAtOnce(arena, FakeClock(), itertools.count(1).__next__)
    namespace, _ = pool.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    names, nothing = [block_hash(nth) for nth in range(count)], [0] * count
    sums = [array("Q", [0]) for _ in names]
    columns = Columns(range(0, count * CHUNK, CHUNK), names, [b"", *names[:-1]], sums, nothing, nothing)
    return pool, namespace.groups[0], columns


def test_blocks_in_slots_that_extents_have_no_more_are_left_out() -> None:
    arena = Arena(8 * CHUNK, 4 * CHUNK)
    arena.max_slots = 3
    pool, group, columns = _adoption(arena, 8)
    adoption = Adoption(pool)
    added = adoption.add(group, columns)
    adoption.finish({})
    names = columns.block_hashes
    assert [entry.block_hash for entry in added] == [*names[:3], *names[4:7]]
    check_integrity(pool)


def test_extents_without_blocks_are_zeroed_for_the_next_tenant_because_others_bytes_may_lie_there() -> None:
    zeroed: list[tuple[int, int]] = []
    arena = Arena(8 * CHUNK, 4 * CHUNK, zero=lambda start, nbytes: zeroed.append((start, nbytes)))
    pool, group, columns = _adoption(arena, 4)
    adoption = Adoption(pool)
    adoption.add(group, columns)
    adoption.finish({})
    put(pool, group.fingerprint, run_of("new"))
    assert zeroed == [(4 * CHUNK, 4 * CHUNK)] and pool.stats().num_entries == 5


def test_a_block_costs_one_call_of_a_function() -> None:
    """A million of them are adopted while clients wait."""
    pool, group, columns = _adoption(Arena(256 * CHUNK, 64 * CHUNK), 256)
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        added = Adoption(pool).add(group, columns)
    finally:
        sys.setprofile(None)
    assert len(added) == 256 and events.count("call") < 1.2 * 256
