"""Namespaces that newer weights have replaced, and that any use brings back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool_server.cache.eviction import Policy
from tests.support.tenants import House, Owner


@pytest.fixture
def house(policy: type[Policy]) -> House:
    return House(4, policy)


def _epoch(house: House, epoch: str, size: int = 100) -> Owner:
    return house.owner(size, epoch=epoch, salt="model")


def test_a_namespace_with_newer_weights_retires_the_older_ones(house: House) -> None:
    first, second = _epoch(house, "1"), _epoch(house, "2")
    other, third = house.owner(epoch="1"), _epoch(house, "3")
    assert [owner.superseded for owner in (first, second, other, third)] == [True, True, False, False]


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


def test_only_opening_the_newer_one_again_retires_the_old_one_again(house: House) -> None:
    old, new = _epoch(house, "1"), _epoch(house, "2")
    old.open()
    assert not old.superseded and not new.superseded
    new.open()
    assert old.superseded
