"""Namespaces that newer weights have replaced."""

from __future__ import annotations

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
