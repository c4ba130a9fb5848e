"""A pool of another size, in miniature: the eviction policy in use, on a spatial sample of the blocks.

Of all blocks, those whose key is below a threshold are in the sample, a share R, always the same ones. A pool that is R
times as large as the simulated arena holds them. So a prefix is in the sample with about R of its blocks, in their
order: the policy sees shorter prefixes, deepest block first as in the pool, at the same times (in calls).

If there are more sampled entries than `max_entries`, R is halved, and the entries that leave the sample go. Where there
is room for twice as many again, `double_rate` doubles R. The keys that join are **fresh**: the miniature lacks what it
would hold of them. So they are not counted until it has about as many fresh blocks as others, and until then each fresh
block brings its own room, so that the others have the room that they had.

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
from kvpool_server.cache.steps import Steps
from kvpool_server.value.sample import KEYS, Sampled, SampledRun
from kvpool_server.value.sampled_density import SampledHitDensity

if TYPE_CHECKING:
    from kvpool_server.cache.entry import Entry
    from kvpool_server.cache.eviction.evictor import Chosen

MIN_SAMPLED_BLOCKS = 16
"""Blocks that the arena's miniature holds, at least: R is not halved below."""
STEP_ENTRIES = 64
"""Entries of one step that evicts blocks, or takes them out of the sample: less than 1 ms."""
WARM = 0.9
"""Fresh keys are counted when the miniature has this share of the fresh blocks that it would have in proportion."""


class MiniEntry:
    """A block in a miniature, with what `Evictor` and its policy need of an `Entry`."""

    __slots__ = ("block_hash", "children", "depth", "live", "nbytes", "parent", "queued", "used")

    leases = pending = pinned_until = 0
    group = None

    def __init__(self, key: int, parent: MiniEntry | None, depth: int, nbytes: int, used: int):
        self.block_hash = key
        self.parent = parent
        self.depth = depth
        self.nbytes = nbytes
        self.children = 0
        self.used = used
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
        counted_rate, counted: as `rate` and `threshold`, without fresh keys.
        max_entries: as given; may be changed.
    """

    def __init__(self, policy: Callable[[], Policy], arena_bytes: int | None, max_entries: int, block_bytes: int):
        self.arena_bytes = arena_bytes
        self.max_entries = max_entries
        self._policy = policy()
        self._evictor = Evictor(self._policy)
        self._index: dict[int, MiniEntry] = {}
        self._used_bytes = self._fresh_bytes = 0
        self._num_fresh = 0
        self._largest_bytes = block_bytes
        self._call = 0
        self._set_rate(1.0 if arena_bytes is None else min(1.0, max_entries * block_bytes / arena_bytes))
        self._count_all()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_counted(self) -> int:
        """Blocks whose keys are not fresh."""
        return len(self._index) - self._num_fresh

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        self.threshold = int(rate * KEYS)
        if isinstance(self._policy, SampledHitDensity):
            self._policy.blocks_each = 1 / rate

    def _count_all(self) -> None:
        self.counted_rate, self.counted = self.rate, self.threshold
        self._num_fresh = self._fresh_bytes = 0

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

    def fits(self, count: int, block_bytes: int) -> bool:
        """Whether so many sampled blocks fit, with nothing else beside them."""
        return self.arena_bytes is None or count * block_bytes <= self.arena_bytes * self.rate

    def store(
        self,
        run: SampledRun,
        sampled: Sampled,
        num_blocks: int,
        block_bytes: int,
        last: tuple[int, int] | None = None,
    ) -> Steps[None]:
        """Stores the sampled ones of the first `num_blocks` blocks of a run, all of those that lack or none.

        Args:
            last: of a run that is stored in parts, (position, key) of the sampled block before this part.
        """
        index = self._index
        parent_key = run.parent_key(self.threshold) if last is None else last[1]
        parent = None if parent_key is None else index.get(parent_key)
        present = [entry for _, key in sampled if (entry := index.get(key)) is not None]
        if len(present) < len(sampled):
            missing = [key for _, key in sampled if key not in index]
            kept = present if parent is None else [*present, parent]
            if not (yield from self._make_room(missing, block_bytes, kept)):
                return
        stamp = self._call * TICK
        self._evictor.renewed(_entries(present), stamp)
        stored: list[MiniEntry] = []
        previous = -1 if last is None else last[0]
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
            self._add_bytes(stored, 1)
            self._largest_bytes = max(self._largest_bytes, block_bytes)
            self._evictor.stored(_entries(stored), stamp)
            for entry in stored:
                if not entry.children:
                    self._add(entry)
        while len(self._index) > max(self.max_entries, MIN_SAMPLED_BLOCKS):
            yield
            yield from self.halve_rate()
        if self._num_fresh and self._num_fresh >= WARM * self.num_counted * (self.rate / self.counted_rate - 1):
            self._count_all()

    def _add_bytes(self, entries: Sequence[MiniEntry], sign: int) -> None:
        """Counts entries that come (`sign` 1) or go (-1)."""
        self._used_bytes += sign * sum(entry.nbytes for entry in entries)
        if self.counted < self.threshold:
            fresh = [entry for entry in entries if entry.block_hash >= self.counted]
            self._num_fresh += sign * len(fresh)
            self._fresh_bytes += sign * sum(entry.nbytes for entry in fresh)

    def _make_room(self, missing: Sequence[int], block_bytes: int, kept: Sequence[MiniEntry]) -> Steps[bool]:
        """Evicts what the miniature cannot hold beside new blocks; False, and nothing has changed, if it cannot.

        Args:
            missing: keys of the new blocks.
        """
        if self.arena_bytes is None:
            return True
        if not self.fits(len(missing), block_bytes):
            return False
        used = self._used_bytes + block_bytes * len(missing)
        fresh = self._fresh_bytes + block_bytes * sum(key >= self.counted for key in missing)
        victims: list[MiniEntry] = []
        for entry in kept:
            entry.children += 1  # Only leaves are evicted.
        try:
            chosen: Chosen = {}
            while (excess := used - self._room_bytes(fresh)) > 0:
                count = min(STEP_ENTRIES, max(1, int(excess // self._largest_bytes)))
                more = cast("list[MiniEntry]", self._evictor.choose(count, chosen))
                if not more:
                    break
                victims += more
                used -= sum(entry.nbytes for entry in more)
                fresh -= sum(entry.nbytes for entry in more if entry.block_hash >= self.counted)
                if count == STEP_ENTRIES or len(victims) % STEP_ENTRIES == 0:
                    yield
            for start in range(0, len(victims), STEP_ENTRIES):
                if excess > 0:
                    self._evictor.restore(_entries(victims[start : start + STEP_ENTRIES]))
                else:
                    self._drop(victims[start : start + STEP_ENTRIES])
                yield
        finally:
            for entry in kept:
                entry.children -= 1
                if not entry.children:
                    self._add(entry)
        return excess <= 0

    def _room_bytes(self, fresh_bytes: int) -> float:
        """What the miniature may hold if so much of it is fresh."""
        assert self.arena_bytes is not None
        counted = self.arena_bytes * self.counted_rate
        return counted + min(fresh_bytes, self.arena_bytes * self.rate - counted)

    def _drop(self, entries: Sequence[MiniEntry]) -> None:
        self._add_bytes(entries, -1)
        for entry in entries:
            entry.live = False
            self._evictor.dropped(_entry(entry))
            del self._index[entry.block_hash]
            if (parent := entry.parent) is not None:
                entry.parent = None
                parent.children -= 1
                if parent.live and not parent.children:
                    self._add(parent)

    def _add(self, entry: MiniEntry) -> None:
        self._evictor.add(_entry(entry))

    def double_rate(self) -> None:
        """Doubles R if all keys of the sample are counted and a sample of twice as many would be within its bound."""
        if self.counted < self.threshold or self.rate == 1 or not self._index:
            return
        most = len(self._index)
        if self.arena_bytes is not None:  # As many as there will be when the arena's miniature is full.
            most = max(most, int(self.arena_bytes * self.rate * most / self._used_bytes))
        if 2 * most <= self.max_entries:
            self._set_rate(min(1.0, 2 * self.rate))

    def halve_rate(self) -> Steps[None]:
        """Halves R; not if the miniature of the arena would hold too few blocks for a policy."""
        if len(self._index) < MIN_SAMPLED_BLOCKS:
            return
        self._set_rate(self.rate / 2)
        kept: list[MiniEntry] = []
        leaving: list[MiniEntry] = []
        for entry in self._index.values():
            (kept if entry.block_hash < self.threshold else leaving).append(entry)
        yield
        for nth, entry in enumerate(kept, 1):
            while entry.parent is not None and entry.parent.block_hash >= self.threshold:
                entry.parent = entry.parent.parent
            entry.children = 0
            if nth % STEP_ENTRIES == 0:
                yield
        for entry in kept:
            if entry.parent is not None:
                entry.parent.children += 1
        yield
        for nth, entry in enumerate(leaving, 1):
            entry.live = False
            entry.parent = None
            entry.depth = 0  # No policy is to take it for evicted: it only leaves the sample.
            self._evictor.dropped(_entry(entry))
            if nth % STEP_ENTRIES == 0:
                yield
        self._add_bytes(leaving, -1)
        self._index = {entry.block_hash: entry for entry in kept}
        if self.threshold <= self.counted:
            self._count_all()
        yield
        for nth, entry in enumerate(kept, 1):
            if not entry.children:
                self._add(entry)
            if nth % STEP_ENTRIES == 0:
                yield


def _entry(entry: MiniEntry) -> Entry:
    return cast("Entry", entry)


def _entries(entries: Sequence[MiniEntry]) -> Sequence[Entry]:
    return cast("Sequence[Entry]", entries)
