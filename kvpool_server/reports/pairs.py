"""Models and tenants as labels: few of them, whatever engines name."""

from __future__ import annotations

from typing import NamedTuple

MAX_PAIRS = 32
OTHER = "other"


class Pair(NamedTuple):
    """A model and a tenant, whose figures are added up."""

    model: str
    tenant: str


class Pairs:
    """The first `MAX_PAIRS` that are seen have names of their own; all others are `OTHER`."""

    def __init__(self) -> None:
        self._named: set[Pair] = set()

    def of(self, model: str, tenant: str) -> Pair:
        pair = Pair(model, tenant)
        if pair in self._named:
            return pair
        if len(self._named) < MAX_PAIRS:
            self._named.add(pair)
            return pair
        return Pair(OTHER, OTHER)
