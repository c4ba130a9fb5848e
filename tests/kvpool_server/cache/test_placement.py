"""Which entries are evicted for which slot size. Driven through the pool: `Placement` decides, the pool acts."""

import pytest

from kvpool.protocol.errors import OutOfSpaceError
from tests.support.tenants import EXTENT, WHOLE, House, Owner
from tests.support.values import run_of


class Sizes(House):
    """An owner for each slot size."""

    def __init__(self, num_extents: int):
        super().__init__(num_extents)
        self._owners: dict[int, Owner] = {}

    def of(self, size: int) -> Owner:
        if size not in self._owners:
            self._owners[size] = self.owner(size)
        return self._owners[size]

    def extents(self) -> dict[int, int]:
        return {size: len(self.pool.arena.extents(size)) for size in self.pool.arena.sizes()}


def test_free_space_is_taken_first_and_then_a_size_evicts_its_own_oldest() -> None:
    sizes = Sizes(4)
    old, new = sizes.of(100).fill_extents(2), sizes.of(200).fill_extents(2)
    assert sizes.pool.counters["evicted_blocks"] == 0
    sizes.of(100).store(3)
    assert sizes.of(100).present(*old) == old[3:] and sizes.of(200).present(*new) == new


def test_a_newcomer_gets_its_fair_share_and_no_more() -> None:
    sizes = Sizes(4)
    sizes.of(100).fill_extents(4)
    new: list[int] = []
    for _ in range(20):  # Both are in use all the time.
        new += sizes.of(200).store()
        sizes.of(100).store()
    assert sizes.extents() == {100: 2, 200: 2}
    assert sizes.of(200).present(*new) == new[-2 * EXTENT // 200 :]


def test_the_share_is_taken_from_whoever_has_most() -> None:
    sizes = Sizes(8)
    few, many = sizes.of(125).fill_extents(2), sizes.of(100).fill_extents(6)
    sizes.of(200).store()
    assert sizes.extents() == {100: 5, 125: 2, 200: 1}
    assert sizes.of(125).present(*few) == few, "the coldest, but it has no more than its share"
    assert sizes.of(100).present(*many) == many[EXTENT // 100 :]


def test_the_coldest_extent_is_the_one_given_up() -> None:
    sizes = Sizes(4)
    first, second, third, fourth = (sizes.of(100).fill_extents(1) for _ in range(4))
    sizes.pool.release([sizes.of(100).lease(*first), sizes.of(100).lease(*second), sizes.of(100).lease(*fourth)])
    sizes.of(200).store()
    assert sizes.of(100).present(*third) == []
    for names in (first, second, fourth):
        assert sizes.of(100).present(*names) == names


def test_a_size_nobody_uses_any_more_gives_way_entirely() -> None:
    sizes = Sizes(4)
    dead = sizes.of(100).fill_extents(2)
    living = sizes.of(200).fill_extents(2)
    for _ in range(4 * EXTENT // 200):
        living += sizes.of(200).store()
    assert sizes.extents() == {200: 4}
    assert sizes.of(100).present(*dead) == []
    assert sizes.of(200).present(*living) == living[-4 * EXTENT // 200 :]


def test_more_sizes_than_extents_take_turns() -> None:
    sizes = Sizes(2)
    for size in (100, 125, 200, 250, 100, 500):
        (name,) = sizes.of(size).store()
        assert sizes.of(size).present(name) == [name]
    assert len(sizes.extents()) == 2


def test_extents_in_which_someone_reads_or_writes_stay() -> None:
    sizes = Sizes(2)
    names = sizes.of(100).fill_extents(2)
    lease_id = sizes.of(100).lease(names[0], names[-1])
    with pytest.raises(OutOfSpaceError, match="no room for 1 blocks of 200 bytes"):
        sizes.of(200).store()
    assert sizes.of(100).present(*names) == names, "a refused put changed something"
    sizes.pool.release([lease_id])
    sizes.of(200).store()

    sizes = Sizes(1)
    sizes.pool.put_start(sizes.of(100).fingerprint, [run_of("being written")], WHOLE)
    with pytest.raises(OutOfSpaceError):
        sizes.of(200).store()
