"""Namespaces that newer weights have replaced go first, and come back with any use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvpool.protocol.errors import OutOfSpaceError
from kvpool_server.cache.allocator import donations, placement
from kvpool_server.cache.allocator.donations import MAX_SKIPPED
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import Policy, SearchCutError
from kvpool_server.cache.tier_access import pin_next_victims
from tests.support.integrity import check_integrity
from tests.support.tenants import WHOLE, House, Owner
from tests.support.values import run_of


@pytest.fixture
def house(policy: type[Policy]) -> House:
    return House(4, policy)


def _epoch(house: House, epoch: str, size: int = 100) -> Owner:
    return house.owner(size, epoch=epoch, salt="model")


def test_a_namespace_with_newer_weights_retires_the_older_ones(house: House) -> None:
    first, second = _epoch(house, "1"), _epoch(house, "2")
    other, third = house.owner(epoch="1"), _epoch(house, "3")
    assert [owner.superseded for owner in (first, second, other, third)] == [True, True, False, False]


def test_superseded_entries_go_before_any_other_however_recent_they_are(house: House) -> None:
    live = house.owner()
    kept = live.store(20)
    old = _epoch(house, "1")
    old.put(*range(20))
    new = _epoch(house, "2")
    new.store(15)
    assert old.present(*range(20)) == list(range(5)), "the deepest first"
    assert live.present(*kept) == kept
    new.store(10)
    assert old.present(*range(20)) == []
    assert live.nbytes == 1_500 or new.nbytes < 2_500, "then the others, by the policy"


@pytest.mark.parametrize("use", ["lookup", "put", "open"])
def test_any_use_brings_it_back(house: House, use: str) -> None:
    old = _epoch(house, "1")
    old.put(*range(10))
    new = _epoch(house, "2")
    uses: dict[str, Callable[[], object]] = {
        "lookup": lambda: old.use(99),
        "put": lambda: old.put(0),
        "open": old.open,
    }
    old.present(0)
    assert old.superseded, "an existence check is no use"
    uses[use]()
    assert not old.superseded and not new.superseded
    new.store(30)
    assert old.present(*range(10)) == list(range(10))


def test_only_opening_the_newer_one_again_retires_the_old_one_again(house: House) -> None:
    old, new = _epoch(house, "1"), _epoch(house, "2")
    old.open()
    assert not old.superseded and not new.superseded
    new.open()
    assert old.superseded


def test_what_is_leased_stays_and_so_do_its_ancestors(house: House) -> None:
    old = _epoch(house, "1")
    old.put(*range(20))
    old.store(20)
    lease_id = old.lease(4)
    new = _epoch(house, "2")
    new.store(35)
    assert old.present(*range(20)) == [0, 1, 2, 3, 4]
    house.pool.release([lease_id])
    new.store(5)
    assert old.nbytes == 0


def test_a_put_that_needs_more_than_the_superseded_have_takes_the_rest_elsewhere(house: House) -> None:
    old, live = _epoch(house, "1"), house.owner()
    old.put(*range(5))
    live.store(35)
    new = _epoch(house, "2")
    new.put(*range(10))
    assert old.nbytes == 0 and live.nbytes == 3_000 and new.nbytes == 1_000


def test_other_slot_sizes_take_extents_that_hold_nothing_else(house: House) -> None:
    old, live = _epoch(house, "1"), house.owner(100)
    kept = live.store(10)
    old.store(10)
    mixed = live.store(5)
    old.store(5)
    old.store(10)
    _epoch(house, "2")
    large = house.owner(200)
    large.store(10)
    assert large.nbytes == 2_000 and old.nbytes == 500
    assert live.present(*kept, *mixed) == kept + mixed


def test_a_refused_put_retires_nothing_and_evicts_nothing(house: House) -> None:
    old, live = _epoch(house, "1"), house.owner()
    old.put(*range(20))
    names = live.store(20)
    lease_id = live.lease(*names)
    new = _epoch(house, "2")
    with pytest.raises(Exception, match="no room for 21 blocks"):
        new.put(*range(21))
    check_integrity(house.pool)
    assert old.present(*range(20)) == list(range(20)) and old.superseded
    new.put(*range(20))
    assert old.nbytes == 0
    house.pool.release([lease_id])


def test_within_a_quota_the_superseded_go_first_too(house: House) -> None:
    house.quota("tenant:acme", 2_000)
    old = house.owner(tenant="acme", epoch="1", salt="model")
    other = house.owner(tenant="acme")
    kept = other.store(10)
    old.store(10)
    new = house.owner(tenant="acme", epoch="2", salt="model")
    new.store(10)
    assert other.present(*kept) == kept and old.nbytes == 0


@pytest.mark.parametrize(("num_leased", "looked_at"), [(0, 0), (100, 100), (2_000, MAX_SKIPPED)])
def test_a_put_looks_at_no_more_than_it_takes_and_some_that_are_in_use(
    monkeypatch: pytest.MonkeyPatch, num_leased: int, looked_at: int
) -> None:
    house = House(400)
    old = _epoch(house, "1")
    for start in range(0, 4_000, 100):
        house.pool.put_start(old.fingerprint, [run_of(*range(start, start + 100))], WHOLE)
    for ticket_id in range(1, 41):
        house.pool.put_end(ticket_id, [0] * 100)
    if num_leased:
        old.lease(*range(4_000 - num_leased, 4_000))
    search, seen = donations._search, 0

    def counted(group: Group) -> Iterator[Entry]:
        nonlocal seen
        for entry in search(group):
            seen += 1
            yield entry

    monkeypatch.setattr(donations, "_search", counted)
    new = _epoch(house, "2")
    for start in range(0, 500, 10):
        seen = 0
        house.pool.put_start(new.fingerprint, [run_of(*range(10_000 + start, 10_010 + start))], WHOLE)
        assert seen <= 10 + looked_at + 1


def test_a_put_skips_a_bounded_number_of_held_entries_of_all_that_are_superseded(
    policy: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donations, "MAX_SKIPPED", 4)
    house = House(4, policy)
    for epoch in "12345":
        old = _epoch(house, epoch)
        names = old.store(8)
        if epoch < "5":
            old.lease(*names)
    is_victim, seen = donations._is_victim, 0

    def counted(*arguments: object) -> bool:
        nonlocal seen
        seen += 1
        return is_victim(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(donations, "_is_victim", counted)
    new = _epoch(house, "6")
    for _ in range(10):
        seen = 0
        with suppress(OutOfSpaceError):
            new.store()
        assert seen <= 4 + 2
    assert old.nbytes < 800, "the held ones of the oldest hide those behind them"


def test_they_are_evicted_before_victims_are_written_to_a_tier_some_at_a_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MAX_VICTIMS", 10)
    live = house.owner()
    live.store(15)
    old = _epoch(house, "1")
    old.put(*range(25))
    _epoch(house, "2")
    needs = {("", 100): 30}
    for num_left in (15, 5):
        with pytest.raises(SearchCutError):
            pin_next_victims(house.pool, 0.0, needs, 1 << 20)
        assert (old.nbytes, live.nbytes) == (num_left * 100, 1_500)
    victims = pin_next_victims(house.pool, 0.0, needs, 1 << 20)
    assert old.nbytes == 0 and len(victims.entries) == 5
    check_integrity(house.pool)
