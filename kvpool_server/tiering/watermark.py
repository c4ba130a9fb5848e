"""Room for puts, where blocks are written down on eviction.

A put cannot wait for a tier. So a part of each slot size's slots is kept free: who would have to go next is written
down, and let go, before anybody needs the room. What puts more at once, or faster than the tiers write, evicts for
itself, and what is lost that way is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvpool_server.cache.pool import Pool
from kvpool_server.cache.tier_access import Moves
from kvpool_server.tiering.demoter import BATCH_BYTES, Demoter
from kvpool_server.tiers.health import ANSWER_S

RESERVE = 1 / 16
"""Of a slot size's slots."""


class Watermark:
    """One pool's.

    Args:
        demotions: to the tiers that are written to on eviction.
    """

    def __init__(self, pool: Pool, demotions: Sequence[Demoter]):
        self._pool = pool
        self._moves = Moves(pool)
        self._demotions = demotions
        self._work = asyncio.Event()
        self._needs: Counter[int] = Counter()
        self._made = asyncio.Condition()
        self._late: set[asyncio.Task[bool]] = set()

    async def need(self, slot_bytes: int, count: int) -> None:
        """Returns when so many slots are free beside the reserve, or no more can be made: who comes up can wait."""
        self._needs[slot_bytes] += count
        self._work.set()
        try:
            async with asyncio.timeout(ANSWER_S), self._made:
                while self._pool.arena.available(slot_bytes) < count and self._work.is_set():
                    await self._made.wait()
        except TimeoutError:
            pass  # A tier that stands still: what is lost for it is counted where it is lost.
        finally:
            self._needs[slot_bytes] -= count

    def taken(self) -> None:
        """Somebody has taken room."""
        self._work.set()

    async def run(self) -> None:
        """Makes room, for ever."""
        while True:
            await self._work.wait()
            if not await self._make():
                self._work.clear()
            async with self._made:
                self._made.notify_all()

    async def _make(self) -> bool:
        """Whether there is more room now."""
        awake = [demotion for demotion in self._demotions if demotion.is_up]
        if not awake:
            return False
        ahead = self._moves.hold_next_victims(RESERVE, self._needs, BATCH_BYTES)
        dropped = 0
        writing = [asyncio.create_task(demotion.keep(ahead.entries)) for demotion in awake]
        try:
            # Who has not ended by then is left alone (`Health`): what it still writes is no more what it is called, and
            # its checksums tell.
            ended, late = await asyncio.wait(writing, timeout=ANSWER_S)
            self._late |= late
            for task in late:
                task.add_done_callback(self._late.discard)
            is_kept = any(task.result() for task in ended)
            dropped = self._moves.let_go(ahead, drop=is_kept)
        except BaseException:
            self._moves.let_go(ahead, drop=False)
            raise
        return dropped > 0
