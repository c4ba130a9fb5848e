"""Why blocks are missing: briefly for engines, and for people when, why and for whom each block of a prompt left."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvpool.protocol.namespace import differences
from kvpool.protocol.types import MAX_MISSES, MAX_RANGES, BlockRun, BlockState, Miss, MissCause, RunHits
from kvpool_server.cache.departures import Departure, Departures, EvictedFor, Memory
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.namespaces import Namespaces, PoolNamespace
from kvpool_server.cache.steps import Steps

MAX_EXPLAINED = 16_384
"""Missing blocks of one lookup that are looked at, equally many a run; the last cause counts for those behind them."""
MAX_RUNS = 64
"""Runs of one lookup that are explained: as many as a model has groups, and few enough for one turn of the loop."""
MAX_GROUPS = 64
"""Groups of other namespaces in which a block is searched."""
_STAY_BEHIND = (MissCause.REMOVED, MissCause.CORRUPT)
"""Departures that leave the blocks behind them in the pool: eviction goes from the back."""
PART_BLOCKS = 128
"""Blocks of one step, which takes 2 ms at most: if each has a range of its own."""
MAX_ALL_RANGES = 4_096
"""Of all runs together: each may have an equal share, and at most `MAX_RANGES`."""
MAX_MATCHES, MAX_COUNTED = 4, 4_096
"""Other namespaces that have a block, and blocks that are counted in each."""
MAX_DIFFERENCES, MAX_DIFFERENCE_CHARS = 16, 2_000
"""Fields of another namespace that are named."""
_PREFIX_KIND = "full_attention"
"""Of groups whose blocks nobody stores without those before them."""
_KNOWN = operator.attrgetter("state", "cause", "tier", "server", "evicted_for")
"""What is known of a range but for times."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Successive blocks of a run, from block `first` on, of which the same is known.

    Args:
        cause: why they are not in the arena; None for complete ones.
        tier: the one that has them; empty if none has.
        server: of a tier of other servers, the one that has them.
        newest_left_seconds, oldest_left_seconds: since the block that left last, or first, has left the arena; None:
            none is known to have left.
        unused_seconds: of complete blocks, since the last use of the one used longest ago; of others, from the last use
            of the first one until it left. None: unknown.
        evicted_for: None: unknown, or for no single put.
    """

    first: int
    count: int
    state: BlockState
    cause: MissCause | None = None
    tier: str = ""
    newest_left_seconds: float | None = None
    oldest_left_seconds: float | None = None
    unused_seconds: float | None = None
    evicted_for: EvictedFor | None = None
    server: str = ""

    @property
    def stop(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """What is known of one run.

    Args:
        ranges: in order, without a gap; the blocks behind them are not explained.
        other_children: stored blocks of other prompts that follow the block before the first missing one, as far as
            the server knows.
    """

    group_idx: int
    ranges: tuple[BlockRange, ...]
    other_children: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceMatch:
    """Another namespace of the tenant, with the same model and salt, that has `count` blocks from the first missing on.

    `differences` are sentences, one for each field that differs.
    """

    fingerprint: bytes
    count: int
    differences: tuple[str, ...]


class Explained(NamedTuple):
    """What the pool knows of some runs without its tiers."""

    namespace: PoolNamespace
    runs: tuple[RunExplanation, ...]
    elsewhere: tuple[NamespaceMatch, ...]
    memory: Memory


@dataclass(eq=False)
class Explanations:
    """What one pool knows of missing blocks."""

    _namespaces: Namespaces
    _departures: Departures
    _clock: Callable[[], float]

    def misses(self, fingerprint: bytes, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> tuple[RunHits, ...]:
        """The hits of some runs, with the causes of what is missing: what engines ask with each lookup."""
        found = self._namespaces.find(fingerprint)
        if found is None or all(hit.num_leading == len(run) for run, hit in zip(runs, hits, strict=True)):
            return tuple(hits)
        explained, others = list(hits), self._others(found)
        most = MAX_EXPLAINED // max(1, min(len(runs), MAX_RUNS))
        for nth, (run, hit) in enumerate(itertools.islice(zip(runs, hits, strict=True), MAX_RUNS)):
            if hit.num_leading < len(run):
                group, names = found.groups[run.group_idx], run.block_hashes[hit.num_leading :]
                misses = self._missing(group, names[:most], others)
                explained[nth] = replace(hit, missing=_cut_off(misses, len(names)))
        return tuple(explained)

    def _others(self, namespace: PoolNamespace) -> list[Group]:
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
        """The causes of blocks, of which the first one is missing: what is behind it cannot be loaded, there or not."""
        entries = itertools.takewhile(lambda entry: entry is not None, group.index.get_all(names))
        if num_there := sum(1 for _ in entries):
            yield Miss(MissCause.BEING_WRITTEN, num_there)
            names = names[num_there:]
        elif names[0] in group.leaving:
            yield Miss(MissCause.REMOVED, len(names))
            return
        if not names:
            return
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

    def explain_in_steps(
        self, fingerprint: bytes, runs: Sequence[BlockRun], told: Callable[[EvictedFor], EvictedFor] | None = None
    ) -> Steps[Explained]:
        """What is known of each block of a prompt. Raises as a lookup.

        Args:
            told: what the caller may know of whom a block was evicted for; None: all. Ranges are joined and counted by
                that: where they are cut must not show that other tenants took turns.
        """
        namespace, groups = self._namespaces.groups(fingerprint, runs)
        yield
        explained, first_missing = [], []
        most = most_ranges(len(runs))
        for group, run in zip(groups, runs, strict=True):
            ranges = yield from self._ranges(group, run, most, told)
            first = ranges[0].stop if ranges[0].state is BlockState.COMPLETE else 0
            first_missing.append(first)
            explained.append(RunExplanation(run.group_idx, tuple(ranges), _other_children(group, run, first)))
        elsewhere = yield from self._elsewhere(namespace, runs, first_missing)
        memory = yield from self._departures.memory_in_steps()
        return Explained(namespace, tuple(explained), elsewhere, memory)

    def _ranges(
        self, group: Group, run: BlockRun, most: int, told: Callable[[EvictedFor], EvictedFor] | None
    ) -> Steps[list[BlockRange]]:
        """The first ranges of a run, at most `most`. It yields before it returns, so that runs never share a step."""
        ranges: list[BlockRange] = []
        for at in range(0, len(run), PART_BLOCKS):
            for each in self._part_ranges(group, run.block_hashes[at : at + PART_BLOCKS], at):
                if told is not None and each.evicted_for is not None:
                    each = replace(each, evicted_for=told(each.evicted_for))
                add_range(ranges, each)
            yield
            if len(ranges) > most:
                break
        return ranges[:most]

    def _part_ranges(self, group: Group, names: Sequence[bytes], at: int) -> Iterator[BlockRange]:
        """The ranges of some blocks, of which the first is the run's block `at`."""
        entries = list(group.index.get_all(names))
        used = [0 if entry is None else entry.used for entry in entries]
        ages = self._departures.use_times.ages(used, self._clock()).tolist()
        start = 0
        for state, members in itertools.groupby(entries, _state_of):
            found = list(members)
            stop = start + len(found)
            if state is BlockState.COMPLETE:
                oldest = max(ages[start:stop])
                yield BlockRange(at + start, len(found), state, unused_seconds=oldest if oldest >= 0 else None)
            elif found[0] is not None:
                yield BlockRange(at + start, len(found), BlockState.MISSING, MissCause.BEING_WRITTEN)
            else:
                yield from self._departed(group, names[start:stop], at + start)
            start = stop

    def _departed(self, group: Group, names: Sequence[bytes], at: int) -> Iterator[BlockRange]:
        """The ranges of blocks that have no entry."""
        if group.leaving:
            runs = itertools.groupby(names, group.leaving.__contains__)
            removed = Departure(MissCause.REMOVED, 0)
            departed = [(removed if is_leaving else None, len(list(members))) for is_leaving, members in runs]
        else:
            departed = self._departures.departures(group, names, group.spec.kind == _PREFIX_KIND)
        for left, count in departed:
            cause, ago, unused, evicted_for = left or (MissCause.NEVER_STORED, None, None, None)
            yield BlockRange(at, count, BlockState.MISSING, cause, "", ago, ago, unused, evicted_for)
            at += count

    def _elsewhere(
        self, namespace: PoolNamespace, runs: Sequence[BlockRun], first_missing: Sequence[int]
    ) -> Steps[tuple[NamespaceMatch, ...]]:
        """Other namespaces of the same model, tenant and salt that have the first missing block of a run.

        `first_missing` is of each run the first block that is not complete; the run's length if all are.
        """
        found: dict[bytes, int] = {}
        model = namespace.spec.model
        others = [each for each in self._others(namespace) if each.namespace.partition("@")[2] == model]
        for run, first in zip(runs, first_missing, strict=True):
            names = run.block_hashes[first : first + MAX_COUNTED]
            for other in others if names else ():
                if len(found) < MAX_MATCHES and other.fingerprint not in found and names[0] in other.index:
                    entries = other.index.get_all(names)
                    found[other.fingerprint] = sum(
                        1 for _ in itertools.takewhile(lambda entry: entry is not None and entry.complete, entries)
                    )
                    yield
            yield
        matches = []
        for fingerprint, count in found.items():
            if count and (match := self._namespaces.find(fingerprint)) is not None:
                differing = differences(namespace.spec, match.spec)[:MAX_DIFFERENCES]
                fields = tuple(str(each)[:MAX_DIFFERENCE_CHARS] for each in differing)
                matches.append(NamespaceMatch(fingerprint, count, fields))
                yield
        return tuple(matches)


def _cut_off(misses: Iterator[Miss], count: int) -> tuple[Miss, ...]:
    """Causes of `count` blocks, MAX_MISSES at most: the last one counts for what follows."""
    first = list(itertools.islice(misses, MAX_MISSES))
    told = sum(miss.count for miss in first[:-1])
    return (*first[:-1], Miss(first[-1].cause, count - told))


def most_ranges(num_runs: int) -> int:
    """Of each of so many runs."""
    return min(MAX_RANGES, MAX_ALL_RANGES // max(1, num_runs))


def add_range(ranges: list[BlockRange], following: BlockRange) -> None:
    """Adds the range that follows, to the last one if the same is known of both."""
    if not ranges or _KNOWN(ranges[-1]) != _KNOWN(following):
        ranges.append(following)
        return
    last = ranges[-1]
    newest = [each for each in (last.newest_left_seconds, following.newest_left_seconds) if each is not None]
    oldest = [each for each in (last.oldest_left_seconds, following.oldest_left_seconds) if each is not None]
    unused = last.unused_seconds
    if last.state is BlockState.COMPLETE and unused is not None and following.unused_seconds is not None:
        unused = max(unused, following.unused_seconds)
    ranges[-1] = replace(
        last,
        count=last.count + following.count,
        newest_left_seconds=min(newest, default=None),
        oldest_left_seconds=max(oldest, default=None),
        unused_seconds=unused,
    )


def _state_of(entry: Entry | None) -> BlockState | None:
    """None of a block that is being written."""
    if entry is None:
        return BlockState.MISSING
    return BlockState.COMPLETE if entry.complete else None


def _other_children(group: Group, run: BlockRun, first: int) -> int:
    """Stored blocks of other prompts that follow the block before a run's block `first`, as far as is known."""
    if first >= len(run):
        return 0
    parent = group.index.get(run.block_hashes[first - 1] if first else run.parent_hash)
    if parent is None:
        return 0
    own = group.index.get(run.block_hashes[first])
    return max(0, parent.children - (own is not None and own.parent is parent))
