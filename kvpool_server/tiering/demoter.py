"""Down: blocks on their way from the arena to one tier.

Written through, a block goes down when it is stored; written on eviction, when its slot is about to be needed (`room`).

What waits does so as a reference: nothing keeps it in the arena until it is being written, so that a slow tier takes no
space from puts, and what is evicted before its turn is a demotion that was dropped, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import structlog

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.tier_access import Moves
from kvpool_server.tiers.health import Health
from kvpool_server.tiers.tier import Block, Tier, TierError

log = structlog.get_logger()

BATCH_BYTES = 32 << 20
"""Written at once, and kept in the arena meanwhile."""
MAX_BATCH_BLOCKS = 64
"""Held at once: who evicts steps over each of them."""
MAX_CLIMB = 64
"""Blocks before a new one that are looked at, whether they are lacking: a put is not to pay for a whole prefix."""
MAX_WAITING = 1 << 17
"""Blocks that may wait: beyond that the oldest are dropped."""


class Demoter:
    """To one tier.

    Args:
        memory: the arena: uint8 [arena_bytes].
        on_evict: write blocks when they are about to go, not when they are stored.
    """

    def __init__(
        self, pool: Pool, memory: npt.NDArray[np.uint8], tier: Tier, health: Health, *, on_evict: bool = False
    ):
        self.on_evict = on_evict
        self._pool = pool
        self._moves = Moves(pool)
        self._memory = memory
        self._tier = tier
        self._health = health
        self._waiting: dict[Entry, None] = {}  # In the order in which they came.
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_up(self) -> bool:
        return self._health.is_available

    def stored(self, entry: Entry) -> None:
        """The pool has a new block."""
        if not self.on_evict:
            self.offer(entry)

    def evicted(self, entry: Entry) -> None:
        """The pool could not wait, and lets a block go."""
        if self.on_evict and self._known(entry) is not True:
            self._tier.counters["dropped_demotions"] += 1

    def offer(self, entry: Entry) -> None:
        """Takes a complete entry, and what the tier lacks of the prefix before it: without that it would be no use."""
        if self._known(entry) is True:
            return
        if not self._health.is_available:
            self._tier.counters["dropped_demotions"] += 1
            return
        self._take(entry, MAX_CLIMB)
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self._tier.counters["dropped_demotions"] += 1

    def _take(self, entry: Entry, max_climb: int) -> None:
        """Has an entry wait, and before it what the tier lacks of so many before it in its prefix."""
        lacking = [entry]
        while len(lacking) <= max_climb and (parent := lacking[-1].parent) is not None and self._is_lacking(parent):
            lacking.append(parent)
        for each in reversed(lacking):
            self._waiting[each] = None
        self._idle.clear()
        self._work.set()

    def _is_lacking(self, entry: Entry) -> bool:
        return entry.live and entry.complete and entry not in self._waiting and self._known(entry) is False

    def _known(self, entry: Entry) -> bool | None:
        """Whether the tier has a block; None where it would have to ask."""
        namespace = self._pool.namespace(entry.group.fingerprint)
        known = None if namespace is None else self._tier.known(namespace, entry.group.idx, [entry.block_hash])
        return None if known is None else known[0]

    async def run(self) -> None:
        """Writes, for ever."""
        while True:
            await self._work.wait()
            if self._waiting:
                await self._write_waiting()
            else:
                self._work.clear()
                self._idle.set()

    async def _write_waiting(self) -> None:
        group, entries = self._next_batch()
        if not entries:
            return
        lease_id = self._moves.hold(entries)
        try:
            await self._write(group, entries)
        except TierError:
            self._tier.counters["dropped_demotions"] += len(entries) + len(self._waiting)
            self._waiting.clear()
        finally:
            self._pool.release([lease_id])

    async def keep(self, entries: Sequence[Entry]) -> bool:
        """Writes entries that are about to go, and are held meanwhile, those that the tier has not; False if it failed.

        Args:
            entries: from the ends of prefixes to their beginnings.
        """
        by_group: dict[Group, list[Entry]] = {}
        for entry in reversed(entries):
            if entry.complete and self._known(entry) is not True:
                by_group.setdefault(entry.group, []).append(entry)
        try:
            for group, members in by_group.items():
                await self._write(group, members)
        except TierError:
            return False
        return True

    async def _write(self, group: Group, entries: list[Entry]) -> None:
        """Writes entries of one group, which are held meanwhile. Raises TierError."""
        namespace = self._pool.namespace(group.fingerprint)
        if namespace is None:
            return
        size = group.spec.slot_bytes
        blocks = [
            Block(
                entry.block_hash,
                entry.parent_hash,
                entry.checksums,
                self._memory[entry.offset : entry.offset + size].data,
            )
            for entry in entries
        ]
        with self._health.call():
            kept = await self._tier.write(namespace, group.idx, blocks)
            self._tier.counters["demoted_blocks"] += kept
            # What is held is not evicted: it was removed, or cleared, while it was being written.
            gone = [entry.block_hash for entry in entries if not entry.live]
            if gone:
                await self._tier.remove(namespace, group.idx, gone)

    def offer_all(self) -> None:
        """Takes all that the pool has and the tier has not, what was used last first; for a last time."""
        entries = [
            entry
            for namespace in self._pool.open_namespaces()
            for entry in namespace.entries()
            if entry.complete and self._known(entry) is not True
        ]
        for entry in sorted(entries, key=lambda entry: entry.used, reverse=True):
            if entry not in self._waiting:
                self._take(entry, entry.depth)

    async def drained(self) -> None:
        """Returns when nothing waits."""
        await self._idle.wait()

    def _next_batch(self) -> tuple[Group, list[Entry]]:
        """What has waited longest, and those of its group right behind it."""
        group = next(iter(self._waiting)).group
        entries: list[Entry] = []
        most = min(MAX_BATCH_BLOCKS, max(1, BATCH_BYTES // group.spec.slot_bytes))
        taken: list[Entry] = []
        for entry in self._waiting:
            if entry.group is not group or len(entries) == most:
                break
            taken.append(entry)
            if entry.live and entry.complete:
                entries.append(entry)
            else:
                self._tier.counters["dropped_demotions"] += 1
        for entry in taken:
            del self._waiting[entry]
        return group, entries
