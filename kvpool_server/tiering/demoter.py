"""Demotes blocks from the arena to the tiers.

With write-through, a block is queued when it is stored. With write-back, it is written before it is evicted: a put
cannot wait for a tier, so a share of each slot size's slots is kept free, and the entries that are to be evicted next
are written and dropped before a put needs their slots. A put that needs more slots than that, or puts that come faster
than the tiers write, evict entries that are not written; those are counted as dropped demotions.

A queued block is a reference that does not pin its entry, so that a slow tier takes no slots from puts. An entry is
pinned only while it is written; one that is evicted before is counted as a dropped demotion, and one that is removed
before is not, for nobody wants it in the tier. Blocks of measurements are not written.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import operator
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from kvpool_server.cache.entry import Entry, Group
from kvpool_server.cache.eviction import SearchCutError
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.server_access import pin, pin_next_victims, unpin_victims
from kvpool_server.cache.steps import STEP_BLOCKS, Steps, finish
from kvpool_server.tiers.calls import ANSWER_S, Health
from kvpool_server.tiers.tier import Block, Tier, TierError

log = structlog.get_logger()

PINNED_BYTES = 32 << 20
"""Written, and pinned in the arena, at once, by all writes to one tier."""
MAX_BATCH_BLOCKS = 64
"""Pinned by one write: an eviction skips each of them."""
MAX_ANCESTORS = 64
"""Ancestors of a new block that are checked, whether the tier lacks them: bounds the cost for a put."""
MAX_QUEUED = 1 << 17
"""Beyond it the oldest queued blocks are dropped."""
RESERVE = 1 / 16
"""The share of each slot size's slots that is kept free where a tier is written to on eviction."""
LOOK_EVERY_S = 0.01
"""How often a drain looks whether a full queue has room."""
_last_use = operator.attrgetter("used")


class Demoter:
    """Writes to one tier from the memory of the arena: uint8 [arena_bytes].

    Attributes:
        idle: set while no block is queued, or being written from the queue.
    """

    def __init__(
        self, pool: Pool, memory: npt.NDArray[np.uint8], tier: Tier, health: Health, *, write_back: bool = False
    ):
        self.write_back = write_back
        self._pool = pool
        self._memory = memory
        self._tier = tier
        self.health = health
        # A plain dict takes long to find its first key once many keys before that have left.
        self._queue: OrderedDict[Entry, None] = OrderedDict()
        self._num_writing = 0
        self._work = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        """Queued blocks."""
        return len(self._queue)

    def stored(self, entries: Sequence[Entry]) -> None:
        """Queues new readable blocks, unless blocks are written on eviction, and their ancestors that the tier lacks.

        No lookup could use a block without its ancestors.
        """
        for entry in entries:
            self._tier.hold(entry, is_there=True)
            if self.write_back or not self._is_wanted(entry):
                continue
            if not self.health.is_available:
                self._tier.counters["dropped_demotions"] += 1
                continue
            finish(self._enqueue(entry, MAX_ANCESTORS))
            while len(self._queue) > MAX_QUEUED:
                self._queue.popitem(last=False)
                self._tier.counters["dropped_demotions"] += 1

    def evicted(self, entry: Entry) -> None:
        """The pool evicts a block for a put that cannot wait. `removed` follows."""
        if entry in self._queue or (self.write_back and self._is_wanted(entry)):
            self._tier.counters["dropped_demotions"] += 1

    def removed(self, entry: Entry) -> None:
        """A block has left the pool: it is no longer to be written."""
        self._tier.hold(entry, is_there=False)
        if self._queue.pop(entry, self) is None:
            self._check_idle()

    def _enqueue(self, entry: Entry, max_ancestors: int) -> Steps[int]:
        """Queues an entry behind those of its nearest ancestors that the tier lacks; returns how many were visited."""
        lacking = [entry]
        while len(lacking) <= max_ancestors and (parent := lacking[-1].parent) is not None and self._is_lacking(parent):
            lacking.append(parent)
            if len(lacking) % STEP_BLOCKS == 0:
                yield
        for each in reversed(lacking):
            if each.live:  # Else it was removed between two steps.
                self._queue[each] = None
                self.idle.clear()
                self._work.set()
        return len(lacking)

    def _is_lacking(self, entry: Entry) -> bool:
        return entry.live and entry.complete and entry not in self._queue and self._is_in_tier(entry) is False

    def _is_wanted(self, entry: Entry) -> bool:
        """Whether the tier is to have a block and, as far as is known, has not."""
        namespace = self._pool.namespace(entry.group.fingerprint)
        is_needed = not entry.group.is_measurement and not (namespace is not None and namespace.superseded)
        return self._tier.keeps and is_needed and self._is_in_tier(entry) is not True

    def _is_in_tier(self, entry: Entry) -> bool | None:
        """Whether the tier has a block; None if the tier cannot tell without a call."""
        namespace = self._pool.namespace(entry.group.fingerprint)
        known = None if namespace is None else self._tier.known(entry.group, [entry.block_hash])
        return None if known is None else known[0]

    async def run(self) -> None:
        """Writes queued blocks until it is cancelled; as many of these run as the tier takes writes at once."""
        while True:
            await self._work.wait()
            if self._queue:
                await self._write_batch()
            else:
                self._work.clear()

    async def _write_batch(self) -> None:
        group = next(iter(self._queue)).group  # The oldest entries of one group.
        batch_bytes = PINNED_BYTES // self._tier.writes_at_once
        most = min(MAX_BATCH_BLOCKS, max(1, batch_bytes // group.spec.slot_bytes))
        first = itertools.islice(self._queue, most)
        entries = list(itertools.takewhile(lambda entry: entry.group is group, first))
        for entry in entries:
            del self._queue[entry]
        lease_id = pin(self._pool, entries)
        self._num_writing += 1
        try:
            await self._write_group(group, entries)
        except TierError:
            self._tier.counters["dropped_demotions"] += len(entries) + len(self._queue)
            self._queue.clear()
        finally:
            self._pool.release([lease_id])
            self._num_writing -= 1
            self._check_idle()

    def _check_idle(self) -> None:
        if not self._queue and not self._num_writing:
            self.idle.set()

    async def write(self, entries: Sequence[Entry]) -> bool:
        """Writes the pinned entries that the tier lacks, in reverse order: parents first. False if the tier failed."""
        by_group: dict[Group, list[Entry]] = {}
        for entry in reversed(entries):
            if entry.complete and self._is_wanted(entry):
                by_group.setdefault(entry.group, []).append(entry)
        try:
            for group, members in by_group.items():
                await self._write_group(group, members)
        except TierError:
            return False
        return True

    async def _write_group(self, group: Group, entries: list[Entry]) -> None:
        """Writes pinned entries of one group. Raises TierError."""
        namespace = self._pool.namespace(group.fingerprint)
        if namespace is None:
            return
        size = group.spec.slot_bytes
        payloads = [self._memory[entry.offset : entry.offset + size].data for entry in entries]
        blocks = [
            Block(entry.block_hash, entry.parent_hash, entry.checksums, payload)
            for entry, payload in zip(entries, payloads, strict=True)
        ]
        with self.health.call():
            written = await self._tier.write(group, blocks)
            self._tier.counters["demoted_blocks"] += written
            # A pinned entry that is no longer live was removed or cleared while it was being written.
            removed = [entry.block_hash for entry in entries if not entry.live]
            if removed:
                await self._tier.remove(group, removed)

    async def drain(self) -> None:
        """Returns when no block is queued or being written, or the tier is unavailable.

        With write-back, queues all blocks of the pool first, a part at a time: Python copies a queue that grows, which
        would hold the loop.
        """
        for _ in self._enqueue_all() if self.write_back else ():
            await asyncio.sleep(0)
            while len(self._queue) > MAX_QUEUED and self.health.is_available:
                await asyncio.sleep(LOOK_EVERY_S)
        if self.health.is_available:
            await self.idle.wait()

    def _enqueue_all(self) -> Steps[None]:
        """Queues all blocks that the tier lacks, the last used first; while it is unavailable, blocks are dropped."""
        groups = (group for namespace in self._pool.open_namespaces() for group in namespace.groups)
        parts: list[list[Entry]] = []
        for part in itertools.chain.from_iterable(group.index.parts() for group in groups):
            parts.append(sorted(part, key=_last_use, reverse=True))
            yield
        num_visited = 0
        for entry in heapq.merge(*parts, key=_last_use, reverse=True):
            num_visited += 1
            if entry.live and entry.complete and entry not in self._queue and self._is_wanted(entry):
                if self.health.is_available:
                    num_visited += yield from self._enqueue(entry, entry.depth)
                else:
                    self._tier.counters["dropped_demotions"] += 1
            if num_visited >= STEP_BLOCKS:
                num_visited = 0
                yield


class Watermark:
    """The free slots of one pool, and the demoters of the tiers that are written to on eviction.

    Attributes:
        work: set when slots were allocated, until `run` has seen since that enough are free or none can be freed.
    """

    def __init__(self, pool: Pool, demoters: Sequence[Demoter]):
        self._pool = pool
        self._demoters = demoters
        self.work, self._is_woken = asyncio.Event(), False
        self._needs: Counter[tuple[str, int]] = Counter()
        self._freed = asyncio.Condition()
        self._late: set[asyncio.Task[bool]] = set()

    @contextlib.asynccontextmanager
    async def room(self, group: Group, count: int) -> AsyncIterator[None]:
        """Around the allocation of `count` slots of a promotion, which waits until all that are needed are free.

        The allocation also begins when no more can be freed, or after a timeout: then it evicts blocks that a tier was
        too slow to write. Puts, which cannot wait, do not come here.
        """
        size, tenant = group.spec.slot_bytes, group.tenant
        self._needs[group.slot_class] += count
        self.wake()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S), self._freed:
                    while (
                        self._pool.arena.available(size, tenant) < self._needs[group.slot_class] and self.work.is_set()
                    ):
                        await self._freed.wait()
            yield
        finally:
            self._needs[group.slot_class] -= count

    def wake(self) -> None:
        """Slots were allocated, or are needed."""
        self._is_woken = True
        self.work.set()

    async def run(self) -> None:
        while True:
            await self.work.wait()
            self._is_woken = False
            if not await self._free_slots() and not self._is_woken:
                self.work.clear()
            async with self._freed:
                self._freed.notify_all()

    async def _free_slots(self) -> bool:
        """Writes the next victims to the tiers and drops them; False if there were none, or they were not written."""
        demoters = [demoter for demoter in self._demoters if demoter.health.is_available]
        if not demoters:
            return False
        try:
            victims = pin_next_victims(self._pool, RESERVE, self._needs, PINNED_BYTES)
        except SearchCutError:
            await asyncio.sleep(0)
            return True  # The next search goes on behind what this one has visited.
        writing = [asyncio.create_task(demoter.write(victims.entries)) for demoter in demoters]
        try:
            # A tier that has not answered by then is left alone (`Health`). What it still writes may come from slots
            # that were allocated anew; the checksums tell.
            ended, late = await asyncio.wait(writing, timeout=ANSWER_S)
            self._late |= late
            for task in late:
                task.add_done_callback(self._late.discard)
            is_written = any(task.result() for task in ended)
            unpin_victims(self._pool, victims, drop=is_written)
        except BaseException:
            unpin_victims(self._pool, victims, drop=False)
            raise
        return is_written and bool(victims.entries)  # Those that are used or continued by now are victims no longer.
