"""Keeps slots free for puts where a tier is written to on eviction.

A put cannot wait for a tier. So a share of each slot size's slots is kept free: the entries that are to be evicted next
are written to the tiers and dropped before a put needs their slots. A put that needs more slots than that, or puts that
come faster than the tiers write, evict entries that are not written; those are counted as dropped demotions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvpool_server.cache.entry import Group
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.tier_access import pin_next_victims, unpin_victims
from kvpool_server.tiering.demoter import PINNED_BYTES, Demoter
from kvpool_server.tiers.health import ANSWER_S

RESERVE = 1 / 16
"""The share of each slot size's slots that is kept free."""


class Watermark:
    """The free slots of one pool, and the demoters of the tiers that are written to on eviction."""

    def __init__(self, pool: Pool, demoters: Sequence[Demoter]):
        self._pool = pool
        self._demoters = demoters
        self._work = asyncio.Event()
        self._needs: Counter[tuple[str, int]] = Counter()
        self._freed = asyncio.Condition()
        self._late: set[asyncio.Task[bool]] = set()

    async def wait_for_free(self, group: Group, count: int) -> None:
        """Returns when a group has `count` free slots beside the reserve, or no more can be freed, or after a timeout.

        For promotions, which can wait; slots that a tier is too slow to free are evicted by whoever needs them.
        """
        self._needs[group.slot_class] += count
        self._work.set()
        try:
            async with asyncio.timeout(ANSWER_S), self._freed:
                while self._pool.arena.available(group.spec.slot_bytes, group.tenant) < count and self._work.is_set():
                    await self._freed.wait()
        except TimeoutError:
            pass
        finally:
            self._needs[group.slot_class] -= count

    def check(self) -> None:
        """Has `run` look whether too few slots are free; called when slots were allocated."""
        self._work.set()

    @property
    def is_idle(self) -> bool:
        return not self._work.is_set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            if not await self._free_slots():
                self._work.clear()
            async with self._freed:
                self._freed.notify_all()

    async def _free_slots(self) -> bool:
        """Writes the next victims to the tiers and drops them; False if no slot was freed."""
        demoters = [demoter for demoter in self._demoters if demoter.is_up]
        if not demoters:
            return False
        victims = pin_next_victims(self._pool, RESERVE, self._needs, PINNED_BYTES)
        dropped = 0
        writing = [asyncio.create_task(demoter.write(victims.entries)) for demoter in demoters]
        try:
            # A tier that has not answered by then is left alone (`Health`). What it still writes may come from slots
            # that were allocated anew; the checksums tell.
            ended, late = await asyncio.wait(writing, timeout=ANSWER_S)
            self._late |= late
            for task in late:
                task.add_done_callback(self._late.discard)
            is_written = any(task.result() for task in ended)
            dropped = unpin_victims(self._pool, victims, drop=is_written)
        except BaseException:
            unpin_victims(self._pool, victims, drop=False)
            raise
        return dropped > 0
