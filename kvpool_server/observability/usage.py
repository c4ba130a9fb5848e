"""What each model and tenant have used of the pool since the server's start.

The pool counts by namespace, with plain integers. This module adds the namespaces up by `Pair`, those in use first.
Measurements (`kvpool ping --bandwidth`) are no use.

Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.observability.pairs import OTHERS, Pair, Pairs, pair_of


@dataclass(slots=True)
class _Sums:
    """What the namespaces of a pair have used, and what they hold; see `UsageStats` in the proto."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    held_bytes: int = 0
    held_blocks: int = 0

    def add_use(self, namespace: PoolNamespace) -> None:
        if namespace.spec.pipeline_stage == 0:  # Each stage is asked for the same tokens.
            self.lookup_tokens += namespace.lookup_tokens
            self.hit_tokens += namespace.hit_tokens
        self.stored_bytes += namespace.stored_bytes
        self.loaded_bytes += namespace.loaded_bytes

    def add_held(self, namespace: PoolNamespace) -> None:
        self.held_bytes += namespace.held_bytes
        self.held_blocks += namespace.held_blocks

    def add(self, other: _Sums) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def size(self) -> int:
        """Whether there is use, and how much. A token and a byte are not alike, but more of either is more."""
        return self.lookup_tokens + self.stored_bytes + self.held_bytes

    def stats(self, pair: Pair) -> pb.UsageStats:
        return pb.UsageStats(tenant=pair.tenant, model=pair.model, **dataclasses.asdict(self))


class Usage:
    """The usage of one pool, by model and tenant. Make it before the pool's first namespace is closed."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._pairs = Pairs(pool.arena.has_tenants)
        self._ended: dict[Pair, _Sums] = {}
        """What closed namespaces have used."""
        pool.on_closed = self._closed

    def by_model_and_tenant(self) -> list[pb.UsageStats]:
        """The usage of each pair, that with most tokens asked for first, and `OTHERS` last if there is any.

        Costs a microsecond a namespace, however many blocks the pool holds. The counts of a pair never go back.
        Contains all tenants: show a tenant the pairs with its own name as `tenant`, and never `OTHERS`.
        """
        in_use: defaultdict[Pair, _Sums] = defaultdict(_Sums)
        for namespace in (*self._pool.namespaces.values(), *self._pool.namespaces.closing.values()):
            if not namespace.is_measurement:
                sums = in_use[_pair(namespace)]
                sums.add_use(namespace)
                sums.add_held(namespace)
        self._tell_apart(in_use)
        told = {pair: _Sums() for pair in (*self._pairs, OTHERS)}
        for found in (self._ended, in_use):
            for pair, sums in found.items():
                told.get(pair, told[OTHERS]).add(sums)
        others = told.pop(OTHERS)
        usage = [sums.stats(pair) for pair, sums in told.items()]
        usage.sort(key=lambda each: (-each.lookup_tokens, -each.stored_bytes, each.model, each.tenant))
        return [*usage, others.stats(OTHERS)] if others != _Sums() else usage

    def _tell_apart(self, in_use: dict[Pair, _Sums]) -> None:
        """Tells more pairs apart while there is room: the ones with most use first."""
        if self._pairs.is_full:
            return
        for pair, sums in sorted(in_use.items(), key=lambda item: -item[1].size):
            if sums.size and pair != OTHERS:
                self._pairs.admit(pair)

    def _closed(self, namespace: PoolNamespace) -> None:
        if namespace.is_measurement:
            return
        pair, sums = _pair(namespace), _Sums()
        sums.add_use(namespace)
        self._tell_apart({pair: sums})
        self._ended.setdefault(pair if pair in self._pairs else OTHERS, _Sums()).add(sums)


def _pair(namespace: PoolNamespace) -> Pair:
    """Made once a namespace: to escape the names of 1,024 namespaces takes tens of milliseconds."""
    if namespace.labels is None:
        namespace.labels = pair_of(namespace.spec.model, namespace.spec.tenant)
    return cast(Pair, namespace.labels)  # To make a pair again costs a third of all that is done here.
