"""Pairs of model and tenant as labels: few of them, whatever engines name.

Labels come from engines, and an engine may open any number of namespaces. So at most `MAX_PAIRS` pairs are told apart,
and the others are one: `OTHER`. A pair that has been told apart stays so until the server ends: no count ever goes
back, as Prometheus demands of a counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

MAX_PAIRS = 32
"""Pairs of model and tenant that are told apart."""
MAX_PAIRS_OF_TENANT = 8
"""Of them, those of one tenant, where callers prove their tenant: no tenant can use up the others' labels."""
OTHER = "other"
"""Model and tenant of what is not told apart."""
MAX_LABEL_CHARS = 100


class Pair(NamedTuple):
    """The labels of a model and a tenant, see `label_of`."""

    model: str
    tenant: str


OTHERS = Pair(OTHER, OTHER)


class Pairs:
    """The pairs that are told apart, in the order in which they came.

    Args:
        has_tenants: callers prove their tenant.
    """

    def __init__(self, has_tenants: bool = False):
        self._most_of_tenant = MAX_PAIRS_OF_TENANT if has_tenants else MAX_PAIRS
        self._named: dict[Pair, None] = {}
        self._num_of_tenant: Counter[str] = Counter()

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._named

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._named)

    @property
    def is_full(self) -> bool:
        """Whether no further pair is told apart."""
        return len(self._named) >= MAX_PAIRS

    def admit(self, pair: Pair) -> Pair:
        """Tells a pair apart from now on, if there is room. Returns the pair for which it counts."""
        if pair not in self._named:
            if self.is_full or self._num_of_tenant[pair.tenant] >= self._most_of_tenant:
                return OTHERS
            self._named[pair] = None
            self._num_of_tenant[pair.tenant] += 1
        return pair

    def of(self, model: str, tenant: str) -> Pair:
        """As `admit`, of names that are no labels yet."""
        return self.admit(pair_of(model, tenant))


def pair_of(model: str, tenant: str) -> Pair:
    """The labels of a model and a tenant."""
    return Pair(label_of(model), label_of(tenant))


def label_of(text: str) -> str:
    """A text as a label: printable, at most `MAX_LABEL_CHARS` characters; of a longer one, its start and its end."""
    if len(text) > MAX_LABEL_CHARS:
        half = (MAX_LABEL_CHARS - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
