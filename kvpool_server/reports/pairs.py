"""Models and tenants as labels: few of them, whatever engines name."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

MAX_PAIRS = 32
MAX_PAIRS_OF_TENANT = 8
"""Of one tenant that proves who it is: it cannot use up the names of others."""
MAX_LABEL_CHARS = 100
OTHER = "other"


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
        self._named: dict[Pair, Pair] = {}
        self._num_of_tenant: Counter[str] = Counter()

    def of(self, model: str, tenant: str) -> Pair:
        pair = Pair(label_of(model), label_of(tenant))
        if pair not in self._named:
            if len(self._named) >= MAX_PAIRS or self._num_of_tenant[pair.tenant] >= self._most_of_tenant:
                return Pair(OTHER, OTHER)
            self._named[pair] = pair
            self._num_of_tenant[pair.tenant] += 1
        return pair


def label_of(text: str) -> str:
    """A text as a label: printable, at most `MAX_LABEL_CHARS` characters; of a longer one, its start and its end."""
    if len(text) > MAX_LABEL_CHARS:
        half = (MAX_LABEL_CHARS - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
