"""What each model and tenant have used of the pool since the server's start.

The pool counts by namespace, with plain integers. This module adds the namespaces up by `Pair`, those in use first.
Measurements (`kvpool ping --bandwidth`) are no use.

Not thread-safe: the pool's event loop owns it.
"""

from __future__ import annotations

from collections import Counter

from kvpool.server_stats import UsageStats
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.pairs import OTHERS, Pair, Pairs, pair_of

_COUNTS = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes")


class Usage:
    """The usage of one pool, by model and tenant. Make it before the pool's first namespace is closed."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._pairs = Pairs(pool.arena.has_tenants)
        self._ended: Counter[tuple[Pair, str]] = Counter()
        """What closed namespaces have used, by pair and name of the count."""
        pool.when_closed(self._closed)

    def by_model_and_tenant(self) -> tuple[UsageStats, ...]:
        """The usage of each pair, that with most tokens asked for first, and `OTHERS` last if there is any.

        Costs microseconds a namespace, however many blocks the pool holds. The counts of a pair never go back.
        Contains all tenants: show a tenant the pairs with its own name as `tenant`, and never `OTHERS`.
        """
        namespaces = [each for each in self._pool.all_namespaces() if not each.is_measurement]
        pairs = [_pair(namespace) for namespace in namespaces]
        self._tell_apart(list(zip(pairs, namespaces, strict=True)))
        sums = Counter(self._ended)
        for pair, namespace in zip(pairs, namespaces, strict=True):
            pair = pair if pair in self._pairs else OTHERS
            _add(sums, pair, namespace)
            sums[pair, "held_bytes"] += namespace.held_bytes
            sums[pair, "held_blocks"] += namespace.held_blocks
        usage = [_usage(pair, sums) for pair in self._pairs]
        usage.sort(key=lambda each: (-each.lookup_tokens, -each.stored_bytes, each.model, each.tenant))
        if any(count for (pair, _), count in sums.items() if pair == OTHERS):
            usage.append(_usage(OTHERS, sums))
        return tuple(usage)

    def _tell_apart(self, namespaces: list[tuple[Pair, PoolNamespace]]) -> None:
        """Tells more pairs apart while there is room: those in use, the ones with most use first."""
        if self._pairs.is_full:
            return
        use: Counter[Pair] = Counter()
        for pair, namespace in namespaces:
            if pair not in self._pairs and pair != OTHERS:
                # A token and a byte are not alike. Both say that there is use, and more of it is more.
                use[pair] += namespace.lookup_tokens + namespace.stored_bytes + namespace.held_bytes
        for pair, count in use.most_common():
            if count:
                self._pairs.admit(pair)

    def _closed(self, namespace: PoolNamespace) -> None:
        if namespace.is_measurement:
            return
        pair = _pair(namespace)
        self._tell_apart([(pair, namespace)])
        _add(self._ended, pair if pair in self._pairs else OTHERS, namespace)


def _pair(namespace: PoolNamespace) -> Pair:
    """Made once a namespace: to escape the names of 1,024 namespaces takes tens of milliseconds."""
    if namespace.labels is None:
        namespace.labels = pair_of(namespace.spec.model, namespace.spec.tenant)
    return Pair(*namespace.labels)


def _add(sums: Counter[tuple[Pair, str]], pair: Pair, namespace: PoolNamespace) -> None:
    is_first_stage = namespace.spec.pipeline_stage == 0  # Each stage is asked for the same tokens.
    for name in _COUNTS if is_first_stage else _COUNTS[2:]:
        sums[pair, name] += getattr(namespace, name)


def _usage(pair: Pair, sums: Counter[tuple[Pair, str]]) -> UsageStats:
    model, tenant = pair
    counts = {name: sums[pair, name] for name in (*_COUNTS, "held_bytes", "held_blocks")}
    return UsageStats(tenant, model, **counts)
