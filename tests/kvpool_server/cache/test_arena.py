from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_server.cache.arena import (
    ALIGNMENT,
    EXTENTS_PER_ARENA,
    FEW_SLOTS,
    MAX_SLOTS_PER_EXTENT,
    MIN_EXTENTS,
    MIN_SLOT_BYTES,
    Arena,
)
from kvpool_server.cache.entry import Entry, Group
from tests.support.values import group_spec


def _entry(offset: int) -> Entry:
    return Entry(Group(group_spec()), bytes(32), None, offset, 0)


def _arena() -> Arena:
    """Four extents of 100 bytes."""
    return Arena(400, extent_bytes=100)


def test_more_than_there_is_changes_nothing() -> None:
    arena = _arena()
    assert arena.allocate(30, 2) == [0, 30]
    before = arena.available(30), arena.available(50), arena.used_bytes, arena.sizes()
    assert arena.allocate(30, 11) is None
    assert arena.allocate(50, 7) is None
    assert (arena.available(30), arena.available(50), arena.used_bytes, arena.sizes()) == before
    assert len(arena.allocate(30, 10) or ()) == 10


def test_owner_finds_the_entry_by_any_offset_in_its_slot() -> None:
    arena = _arena()
    (offset,) = arena.allocate(30, 1) or ()
    entry = _entry(offset)
    assert arena.owner(offset) is None
    arena.assign(offset, entry)
    assert arena.owner(offset) is arena.owner(offset + 29) is entry
    assert arena.owner(offset + 30) is None
    assert arena.owner(99) is None, "the rest behind an extent's last slot is nobody's"
    assert arena.owner(399) is None and arena.owner(400) is None and arena.owner(1 << 62) is None
    arena.free(offset)
    assert arena.owner(offset) is None


@pytest.mark.parametrize("offset", [1, 31, 250])
def test_freeing_what_is_no_taken_slot_is_a_broken_invariant(offset: int) -> None:
    arena = _arena()
    arena.allocate(30, 2)
    with pytest.raises(AssertionError):
        arena.free(offset)


@pytest.mark.parametrize("mib", [1, 4, 8, 100, 128, 1 << 10, 3 << 10, 64 << 10, 1_000 << 10, 1 << 20])
def test_extents_are_some_and_their_slots_are_bounded_whatever_the_size_of_the_arena(mib: int) -> None:
    arena = Arena(mib << 20)
    assert MIN_EXTENTS <= arena.num_extents <= EXTENTS_PER_ARENA + 1
    assert (mib << 20) - arena.extent_bytes < arena.arena_bytes <= mib << 20
    if mib >= 1 << 10:
        assert arena.extent_bytes % ALIGNMENT == 0 and arena.num_extents >= 32
    most = max(FEW_SLOTS, arena.arena_bytes // MIN_SLOT_BYTES)
    assert arena.num_extents * arena.slots_per_extent(1) <= most
    assert arena.slots_per_extent(MIN_SLOT_BYTES) == min(arena.extent_bytes // MIN_SLOT_BYTES, MAX_SLOTS_PER_EXTENT)
    assert arena.allocate(1, 2) == [0, 1]
    assert len(arena.extents(1)[0].owners) == arena.slots_per_extent(1) <= MAX_SLOTS_PER_EXTENT


def test_a_small_arena_has_room_for_many_small_slots_and_one_of_small_extents_for_few() -> None:
    arena = Arena(8 << 20)
    assert arena.num_extents * arena.slots_per_extent(1) == FEW_SLOTS
    assert arena.slots_per_extent(256) == arena.extent_bytes // 256
    arena = Arena(2 << 30, 4 << 20)
    assert arena.slots_per_extent(1) == arena.slots_per_extent(MIN_SLOT_BYTES) == arena.extent_bytes // MIN_SLOT_BYTES


def test_an_arena_without_an_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="an arena of 99 bytes holds no extent of 100"):
        Arena(99, extent_bytes=100)


@given(st.lists(st.tuples(st.sampled_from([7, 20, 33, 100]), st.integers(1, 5), st.booleans()), max_size=30))
def test_no_byte_has_two_owners_and_none_is_lost(steps: list[tuple[int, int, bool]]) -> None:
    arena = _arena()
    taken: list[tuple[int, int]] = []
    for size, count, give_back in steps:
        if give_back and taken:
            arena.free(taken.pop(0)[0])
            continue
        free_before = arena.available(size)
        offsets = arena.allocate(size, count)
        assert (offsets is None) == (count > free_before)
        taken += [(offset, size) for offset in offsets or ()]
        spans = sorted((offset, offset + size) for offset, size in taken)
        assert all(start // 100 == (end - 1) // 100 for start, end in spans), "a slot straddles extents"
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert arena.used_bytes == sum(size for _, size in taken)
    for offset, _ in taken:
        arena.free(offset)
    assert arena.used_bytes == 0 and arena.available(100) == arena.num_extents


def test_only_what_has_memory_behind_it_is_given_out() -> None:
    arena = Arena(4 * 100, 100, backed_bytes=0)
    assert arena.available(10) == 0 and arena.allocate(10, 1) is None
    arena.back(250)
    assert arena.available(10) == 20
    assert max(arena.allocate(10, 20) or []) < 200
    arena.back(400)
    assert arena.allocate(10, 20) is not None and arena.available(10) == 0
