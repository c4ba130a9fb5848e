"""Lookups for loads, and puts, as observers are told of them: the recorder, and the histogram of `kvpool value`."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocol.types import BlockRun, RunHits
from kvpool_server.cache.namespaces import PoolNamespace


class TrafficObserver:
    """Called inside the call of the client: must return quickly and must not call the pool. These methods do nothing.

    A lookup that waits for a tier and is repeated is told once. Lookups without a lease are no uses, and are not told.
    """

    def looked_up(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> None:
        """A lookup for a load has been answered; one of `hits` for each run."""

    def put(self, namespace: PoolNamespace, runs: Sequence[BlockRun]) -> None:
        """A put of blocks of one group has begun; it may name blocks that the pool has already."""


class Traffic:
    """Tells each observer of lookups and puts, but not of measurements."""

    def __init__(self) -> None:
        self._observers: list[TrafficObserver] = []

    def observe(self, observer: TrafficObserver) -> None:
        self._observers.append(observer)

    def looked_up(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> None:
        for observer in () if namespace.is_measurement else self._observers:
            observer.looked_up(namespace, runs, hits)

    def put(self, namespace: PoolNamespace, runs: Sequence[BlockRun]) -> None:
        for observer in () if namespace.is_measurement else self._observers:
            observer.put(namespace, runs)
