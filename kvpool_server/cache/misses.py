"""Why a lookup's blocks are missing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kvpool.protocol.types import MAX_MISSES, BlockRun, Miss, MissCause, RunHits
from kvpool_server.cache.departures import Departures
from kvpool_server.cache.entry import Group
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace

MAX_EXPLAINED = 16_384
"""Blocks of one lookup that are looked at, equally many a run; the last cause counts for those behind them."""
MAX_RUNS = 64
"""Runs of one lookup that are explained: as many as a model has groups, and few enough for one turn of the loop."""
MAX_GROUPS = 64
"""Groups of other namespaces in which a block is searched."""
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
        if found is None or all(hit.num_leading == len(run) for run, hit in zip(runs, hits, strict=True)):
            return tuple(hits)
        explained, others = list(hits), self.others(found)
        most = MAX_EXPLAINED // max(1, min(len(runs), MAX_RUNS))
        for nth, (run, hit) in enumerate(itertools.islice(zip(runs, hits, strict=True), MAX_RUNS)):
            if hit.num_leading < len(run):
                group, names = found.groups[run.group_idx], run.block_hashes[hit.num_leading :]
                misses = self._missing(group, names[:most], others)
                explained[nth] = dataclasses.replace(hit, missing=_joined(misses, len(names)))
        return tuple(explained)

    def others(self, namespace: PoolNamespace) -> list[Group]:
        """Groups of other namespaces that a caller may know of: of the same tenant, and with the same salt."""
        ours = namespace.spec.tenant, namespace.spec.salt
        groups = (
            group
            for other in self._namespaces.values()
            if other is not namespace and (other.spec.tenant, other.spec.salt) == ours
            for group in other.groups
        )
        return list(itertools.islice(groups, MAX_GROUPS))

    def _missing(self, group: Group, names: Sequence[bytes], others: Sequence[Group]) -> Iterator[Miss]:
        """The causes of blocks, of which the first one is missing.

        What is behind a missing block cannot be loaded, whether it is there or not.
        """
        entries = itertools.takewhile(lambda entry: entry is not None, group.index.get_all(names))
        if num_there := sum(1 for _ in entries):
            yield Miss(MissCause.BEING_WRITTEN, num_there)
            names = names[num_there:]
        elif names[0] in group.leaving:
            yield Miss(MissCause.REMOVED, len(names))
            return
        if names:
            yield from self._departed(group, names, others)

    def _departed(self, group: Group, names: Sequence[bytes], others: Sequence[Group]) -> Iterator[Miss]:
        """The causes of blocks, of which the first one has no entry."""
        departure = self._departures.departure(group, names[0])
        if departure is None:
            # Nobody stores a block without those before it. A block of this name has the same tokens, and other KV.
            elsewhere = any(names[0] in other.index for other in others)
            yield Miss(MissCause.OTHER_NAMESPACE if elsewhere else MissCause.NEVER_STORED, len(names))
            return
        causes = self._departures.causes(group, names)
        if departure.cause in _STAY_BEHIND:
            there = np.fromiter((entry is not None for entry in group.index.get_all(names)), bool, len(names))
            causes[there] = departure.cause
        ends = np.append(np.flatnonzero(np.diff(causes)) + 1, len(names)).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            yield Miss(MissCause(int(causes[start])), stop - start)


def _joined(misses: Iterator[Miss], count: int) -> tuple[Miss, ...]:
    """Causes of `count` blocks, MAX_MISSES at most: the last one counts for what follows."""
    first = list(itertools.islice(misses, MAX_MISSES))
    told = sum(miss.count for miss in first[:-1])
    return (*first[:-1], Miss(first[-1].cause, count - told))
