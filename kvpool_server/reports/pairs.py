"""Models and tenants as labels of what engines report: few of them, whatever engines name."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvpool_server.usage import MAX_PAIRS, MAX_PAIRS_OF_TENANT, OTHER, label_of


class Pair(NamedTuple):
    """A model and a tenant, whose figures are added up."""

    model: str
    tenant: str


class Pairs:
    """The first pairs that are seen have names of their own; all others are `OTHER`.

    Args:
        has_tenants: callers prove their tenant.
    """

    def __init__(self, has_tenants: bool = False):
        self._most_of_tenant = MAX_PAIRS_OF_TENANT if has_tenants else MAX_PAIRS
        self._named: set[Pair] = set()
        self._num_of_tenant: Counter[str] = Counter()

    def of(self, model: str, tenant: str) -> Pair:
        """The pair for which a model and a tenant count."""
        pair = Pair(label_of(model), label_of(tenant))
        if pair not in self._named:
            if len(self._named) >= MAX_PAIRS or self._num_of_tenant[pair.tenant] >= self._most_of_tenant:
                return Pair(OTHER, OTHER)
            self._named.add(pair)
            self._num_of_tenant[pair.tenant] += 1
        return pair
