"""Why a lookup's blocks are missing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kvpool.types import MAX_MISSES, BlockRun, Miss, MissCause, RunHits
from kvpool_server.cache.departures import Departures
from kvpool_server.cache.entry import Group
from kvpool_server.cache.namespaces import Namespaces

MAX_EXPLAINED = 16_384
"""Blocks of one run that are looked at, within half a millisecond; the last cause counts for those behind them."""
MAX_NAMESPACES = 16
"""Other namespaces in which a block is searched."""
_STAY_BEHIND = (MissCause.REMOVED, MissCause.CORRUPT)
"""Departures that leave the blocks behind them in the pool: eviction goes from the back."""


class Misses:
    """Those of one pool."""

    def __init__(self, namespaces: Namespaces, departures: Departures):
        self._namespaces = namespaces
        self._departures = departures

    def explain(self, fingerprint: bytes, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> tuple[RunHits, ...]:
        """The hits of some runs, with the causes of what is missing."""
        found = self._namespaces.find(fingerprint)
        if found is None:
            return tuple(hits)
        explained = []
        for run, hit in zip(runs, hits, strict=True):
            if hit.num_leading < len(run):
                missing = self._missing(found.groups[run.group_idx], run.block_hashes[hit.num_leading :])
                hit = dataclasses.replace(hit, missing=missing)
            explained.append(hit)
        return tuple(explained)

    def _missing(self, group: Group, names: Sequence[bytes]) -> tuple[Miss, ...]:
        """The causes of blocks, of which the first one is missing.

        What is behind a missing block cannot be loaded, whether it is there or not.
        """
        looked_at = names[:MAX_EXPLAINED]
        entries = list(itertools.takewhile(lambda entry: entry is not None, group.index.get_all(looked_at)))
        if entries:
            being_written = [Miss(MissCause.BEING_WRITTEN, len(entries))]
            rest = looked_at[len(entries) :]
            return _joined([*being_written, *(self._departed(group, rest) if rest else ())], len(names))
        if looked_at[0] in group.leaving:
            return (Miss(MissCause.REMOVED, len(names)),)
        return _joined(self._departed(group, looked_at), len(names))

    def _departed(self, group: Group, names: Sequence[bytes]) -> Iterator[Miss]:
        """The causes of blocks, of which the first one has no entry."""
        first = self._departures.cause(group, names[0])
        if first is None:
            # Nobody stores a block without those before it.
            elsewhere = self._is_elsewhere(group, names[0])
            yield Miss(MissCause.OTHER_NAMESPACE if elsewhere else MissCause.NEVER_STORED, len(names))
            return
        causes = self._departures.causes(group, names)
        if first in _STAY_BEHIND:
            there = np.fromiter((entry is not None for entry in group.index.get_all(names)), bool, len(names))
            causes[there] = first
        ends = np.append(np.flatnonzero(np.diff(causes)) + 1, len(names)).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            yield Miss(MissCause(int(causes[start])), stop - start)

    def _is_elsewhere(self, group: Group, name: bytes) -> bool:
        """Whether another namespace of the tenant has a block of this name: the same tokens, and not the same KV."""
        others = (
            other
            for other in self._namespaces.values()
            if other.fingerprint != group.fingerprint and other.spec.tenant == group.declared_tenant
        )
        return any(
            name in other_group.index
            for other in itertools.islice(others, MAX_NAMESPACES)
            for other_group in other.groups
        )


def _joined(misses: Iterator[Miss] | Sequence[Miss], count: int) -> tuple[Miss, ...]:
    """Causes of `count` blocks, MAX_MISSES at most: the last one counts for what follows."""
    first = list(itertools.islice(misses, MAX_MISSES))
    told = sum(miss.count for miss in first[:-1])
    return (*first[:-1], Miss(first[-1].cause, count - told))
