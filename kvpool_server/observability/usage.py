"""What each model and tenant have used of the pool since the server's start, and their pairs as labels.

Labels come from engines, and an engine may open any number of namespaces. So at most `MAX_PAIRS` pairs of model and
tenant are told apart, and the others are one: `OTHER`. A pair that has been told apart stays so until the server ends:
no count ever goes back, as Prometheus demands of a counter.

The pool counts by namespace, with plain integers. This module adds the namespaces up by `Pair`, those in use first.
Measurements (`kvpool ping --bandwidth`) are no use.

Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, cast

from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool

MAX_PAIRS = 32
"""Pairs of model and tenant that are told apart."""
MAX_PAIRS_OF_TENANT = 8
"""Of them, those of one tenant, where callers prove their tenant: no tenant can use up the others' labels."""
OTHER = "other"
"""Model and tenant of what is not told apart."""
MAX_LABEL_CHARS = 100
_NAMES = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "held_bytes", "held_blocks")
"""Fields of `UsageStats` that this module counts."""
_Sums = tuple[int, ...]
"""Numbers in the order of `_NAMES`: a message would take twice the time for thousands of namespaces."""
_NOTHING: _Sums = (0,) * len(_NAMES)


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

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._named)

    @property
    def is_full(self) -> bool:
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


class Usage:
    """The usage of one pool, by model and tenant. Make it before the pool's first namespace is closed.

    Args:
        pairs: those of all numbers of the server, so that each of them names the same pairs.
    """

    def __init__(self, pool: Pool, pairs: Pairs):
        self._pool, self._pairs = pool, pairs
        self._ended: dict[Pair, _Sums] = {}
        """What closed namespaces have used."""
        pool.on_closed.append(self._closed)

    def by_model_and_tenant(self) -> list[pb.UsageStats]:
        """The usage of each pair, that with most tokens asked for first, and `OTHERS` last if there is any.

        Costs a microsecond a namespace, however many blocks the pool holds. The counts of a pair never go back.
        Contains all tenants: show a tenant the pairs with its own name as `tenant`, and never `OTHERS`.
        """
        by_pair: defaultdict[Pair, list[_Sums]] = defaultdict(list)
        for namespace in (*self._pool.namespaces.values(), *self._pool.namespaces.closing.values()):
            if not namespace.is_measurement:
                by_pair[_pair(namespace)].append(_used(namespace))
        in_use = {pair: _total(each) for pair, each in by_pair.items()}
        self._tell_apart(in_use)
        told = {pair: [_NOTHING] for pair in (*self._pairs, OTHERS)}
        for pair, sums in (*self._ended.items(), *in_use.items()):
            told.get(pair, told[OTHERS]).append(sums)
        others = _total(told.pop(OTHERS))
        usage = [_stats(pair, _total(each)) for pair, each in told.items()]
        usage.sort(key=lambda each: (-each.lookup_tokens, -each.stored_bytes, each.model, each.tenant))
        return [*usage, _stats(OTHERS, others)] if any(others) else usage

    def _tell_apart(self, in_use: dict[Pair, _Sums]) -> None:
        """Tells more pairs apart while there is room: the ones with most use first."""
        if self._pairs.is_full:
            return
        # A token and a byte are not alike, but more of either is more.
        sizes = {pair: lookup + stored + held for pair, (lookup, _, stored, _, held, _) in in_use.items()}
        for pair in sorted(sizes, key=lambda pair: -sizes[pair]):
            if sizes[pair] and pair != OTHERS:
                self._pairs.admit(pair)

    def _closed(self, namespace: PoolNamespace) -> None:
        if namespace.is_measurement:
            return
        pair, sums = _pair(namespace), (*_used(namespace)[:4], 0, 0)
        self._tell_apart({pair: sums})
        kept = pair if pair in self._pairs else OTHERS
        self._ended[kept] = _total([self._ended.get(kept, _NOTHING), sums])


_used: Callable[[PoolNamespace], _Sums] = attrgetter(*_NAMES)
"""What a namespace has used, and what it holds."""


def _total(found: list[_Sums]) -> _Sums:
    return tuple(map(sum, zip(*found, strict=True)))


def _stats(pair: Pair, sums: _Sums) -> pb.UsageStats:
    counted: dict[str, Any] = dict(zip(_NAMES, sums, strict=True))
    return pb.UsageStats(tenant=pair.tenant, model=pair.model, **counted)


def _pair(namespace: PoolNamespace) -> Pair:
    """Made once a namespace: to escape the names of 1,024 namespaces takes tens of milliseconds."""
    if namespace.labels is None:
        namespace.labels = pair_of(namespace.spec.model, namespace.spec.tenant)
    return cast(Pair, namespace.labels)  # To make a pair again costs a third of all that is done here.
