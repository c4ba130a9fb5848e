"""A pool of another size, in miniature: the eviction policy in use, on a spatial sample of the blocks.

Of all blocks, those whose key is below a threshold are in the sample, a share R, always the same ones. A pool that is R
times as large as the simulated arena holds them. So a prefix is in the sample with about R of its blocks, in their
order: the policy sees shorter prefixes, deepest block first as in the pool, at the same times (in calls).

If there are more sampled entries than `max_entries`, R is halved, and the entries that leave the sample go.

Sources:
- C. Waldspurger, T. Saemundsson, I. Ahmad, N. Park, Cache Modeling and Optimization using Miniature Simulations,
  USENIX ATC 2017.
- C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, Efficient MRC Construction with SHARDS, FAST 2015: spatial sampling
  and the bound on the size of a sample.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvpool_server.cache.eviction import TICK, Evictor, Policy
from kvpool_server.value.sample import KEYS, Sampled, SampledRun
from kvpool_server.value.sampled_density import SampledHitDensity

if TYPE_CHECKING:
    from kvpool_server.cache.entry import Entry
    from kvpool_server.cache.eviction.evictor import Chosen

MIN_SAMPLED_BLOCKS = 16
"""Blocks that the arena's miniature holds, at least: R is not halved below."""


class MiniEntry:
    """A block in a miniature, with what `Evictor` and its policy need of an `Entry`."""

    __slots__ = ("block_hash", "children", "depth", "leases", "live", "nbytes", "parent", "queued", "used")

    pending = 0
    group = None

    def __init__(self, key: int, parent: MiniEntry | None, depth: int, nbytes: int, used: int):
        self.block_hash = key
        self.parent = parent
        self.depth = depth
        self.nbytes = nbytes
        self.children = 0
        self.used = used
        self.leases = 0
        self.live = True
        self.queued: Any = None


class Miniature:
    """See the module.

    Args:
        policy: makes the policy in use.
        arena_bytes: of the simulated pool; None: without bound.
        max_entries: bound of the sample.
        block_bytes: what a block takes, to choose R from the start.

    Attributes:
        rate: R.
        threshold: keys below it are in the sample.
        max_entries: as given; may be lowered.
    """

    def __init__(self, policy: Callable[[], Policy], arena_bytes: int | None, max_entries: int, block_bytes: int):
        self.arena_bytes = arena_bytes
        self.rate = 1.0
        self.threshold = KEYS
        self.max_entries = max_entries
        self._policy = policy()
        self._evictor = Evictor(self._policy)
        self._index: dict[int, MiniEntry] = {}
        self._used_bytes = 0
        self._call = 0
        if arena_bytes is not None:
            self._set_rate(min(1.0, max_entries * block_bytes / arena_bytes))

    def __len__(self) -> int:
        return len(self._index)

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        self.threshold = int(rate * KEYS)
        if isinstance(self._policy, SampledHitDensity):
            self._policy.blocks_each = 1 / rate

    def leading(self, sampled: Sampled, elsewhere: Container[int] = ()) -> int:
        """How many of a run's sampled blocks, from the first, are in the miniature, or their keys elsewhere."""
        count = 0
        for _, key in sampled:
            if key not in self._index and key not in elsewhere:
                break
            count += 1
        return count

    def held(self, sampled: Sampled) -> frozenset[int]:
        """The keys of those of a run's sampled blocks that are in the miniature."""
        return frozenset(key for _, key in sampled if key in self._index)

    def pass_time(self, calls: int = 1) -> None:
        """The pool has used entries in so many calls since; see `Policy`."""
        self._call += calls

    def use(self, sampled: Sampled, leading: int) -> None:
        """A lookup has hit the `leading` first ones of a run's sampled blocks."""
        if leading:
            self._evictor.used(_entries([self._index[key] for _, key in sampled[:leading]]), self._call * TICK)

    def store(self, run: SampledRun, sampled: Sampled, num_blocks: int, block_bytes: int) -> None:
        """Stores the sampled ones of the first `num_blocks` blocks of a run, all of those that lack or none."""
        parent_key = run.parent_key(self.threshold)
        index = self._index
        present = [entry for _, key in sampled if (entry := index.get(key)) is not None]
        parent = None if parent_key is None else index.get(parent_key)
        missing = len(sampled) - len(present)
        if missing and not self._make_room(missing * block_bytes, present if parent is None else [*present, parent]):
            return
        stamp = self._call * TICK
        self._evictor.renewed(_entries(present), stamp)
        stored: list[MiniEntry] = []
        previous = -1
        for position, key in sampled:
            entry = index.get(key)
            if entry is None:
                if not stored and isinstance(self._policy, SampledHitDensity):
                    # Of the blocks between the last sampled one that is present and this one, half are taken to lack.
                    self._policy.num_added = num_blocks - (previous + 1 + position) // 2
                    self._policy.has_tail = sampled[-1][0] == num_blocks - 1
                entry = index[key] = MiniEntry(key, parent, run.depth + position, block_bytes, stamp)
                if parent is not None:
                    parent.children += 1
                stored.append(entry)
            elif not stored:
                previous = position
            parent = entry
        if stored:
            self._used_bytes += block_bytes * len(stored)
            self._evictor.stored(_entries(stored), stamp)
            for entry in stored:
                if not entry.children:
                    self._add(entry)
        if len(index) > self.max_entries:
            self.halve_rate()

    def _make_room(self, nbytes: int, kept: Sequence[MiniEntry]) -> bool:
        """Evicts what the miniature cannot hold beside new blocks; False, and nothing has changed, if it cannot."""
        if self.arena_bytes is None:
            return True
        capacity = self.arena_bytes * self.rate
        for entry in kept:
            entry.leases += 1
        chosen: Chosen = {}
        victims: list[MiniEntry] = []
        try:
            while (excess := self._used_bytes + nbytes - sum(each.nbytes for each in victims) - capacity) > 0:
                if not (more := self._evictor.choose(max(1, int(excess // nbytes)), chosen)):
                    break
                victims += cast("list[MiniEntry]", more)
        finally:
            for entry in kept:
                entry.leases -= 1
        if excess > 0:
            self._evictor.restore(_entries(victims))
            return False
        for victim in victims:
            self._drop(victim)
        return True

    def _drop(self, entry: MiniEntry) -> None:
        entry.live = False
        self._evictor.dropped(_entry(entry))
        del self._index[entry.block_hash]
        self._used_bytes -= entry.nbytes
        if (parent := entry.parent) is not None:
            entry.parent = None
            parent.children -= 1
            if parent.live and not parent.children:
                self._add(parent)

    def _add(self, entry: MiniEntry) -> None:
        self._evictor.add(_entry(entry))

    def halve_rate(self) -> None:
        """Halves R; not if the miniature of the arena would hold too few blocks for a policy."""
        if len(self._index) < MIN_SAMPLED_BLOCKS:
            return
        self._set_rate(self.rate / 2)
        kept: list[MiniEntry] = []
        leaving: list[MiniEntry] = []
        for entry in self._index.values():
            (kept if entry.block_hash < self.threshold else leaving).append(entry)
        for entry in kept:
            while entry.parent is not None and entry.parent.block_hash >= self.threshold:
                entry.parent = entry.parent.parent
            entry.children = 0
        for entry in kept:
            if entry.parent is not None:
                entry.parent.children += 1
        for entry in leaving:
            entry.live = False
            entry.parent = None
            entry.depth = 0  # No policy is to take it for evicted: it only leaves the sample.
            self._evictor.dropped(_entry(entry))
            self._used_bytes -= entry.nbytes
        self._index = {entry.block_hash: entry for entry in kept}
        for entry in kept:
            if not entry.children:
                self._add(entry)


def _entry(entry: MiniEntry) -> Entry:
    return cast("Entry", entry)


def _entries(entries: Sequence[MiniEntry]) -> Sequence[Entry]:
    return cast("Sequence[Entry]", entries)
