"""Recomputes the checksums of blocks in the arena, and drops blocks whose bytes have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.fair_slots import FairSlots
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Run
from kvpool_server.cache.tier_access import pin

log = structlog.get_logger()

VERIFIED_BYTES = 64 << 20
"""Bytes that a thread verifies before it looks whether the call was cancelled."""
MAX_WAITING = 64
"""Calls of one caller that wait for their turn."""


class Verifier:
    """Verifies blocks of one pool: of one call at a time, and the callers take turns.

    Args:
        memory: the arena, uint8 [arena_bytes].
    """

    def __init__(self, pool: Pool, memory: npt.NDArray[np.uint8], run: Run):
        self._pool = pool
        self._memory = memory
        self._run = run
        self._turns = FairSlots(1, 1, MAX_WAITING)

    async def verify(self, fingerprint: bytes, runs: Sequence[BlockRun], caller: str) -> tuple[int, int]:
        """Returns how many blocks were complete and how many of them were dropped.

        A thread computes the checksums, under a lease that keeps the bytes in their place.

        Raises BusyError if too many calls of the caller wait.
        """
        async with self._turns.slot(caller):
            found = await self._run(self._pool.removals.complete(fingerprint, runs))
            entries = [entry for entry in found if entry.live]  # Others may have dropped some since the last step.
            lease_id = pin(self._pool, entries)
            corrupt: list[Entry] = []
            try:
                count = max(1, VERIFIED_BYTES // entries[0].group.spec.slot_bytes) if entries else 1
                for start in range(0, len(entries), count):
                    corrupt += await asyncio.to_thread(find_corrupt, entries[start : start + count], self._memory)
            finally:
                self._pool.release([lease_id])
        dropped = await self._run(self._pool.removals.drop_corrupt(corrupt))
        if dropped:
            log.error("corrupt blocks dropped", checked=len(entries), dropped=dropped)
        return len(entries), dropped


def find_corrupt(entries: Sequence[Entry], memory: npt.NDArray[np.uint8]) -> list[Entry]:
    """Those of some complete entries whose bytes in the arena differ from their checksums."""
    return [
        entry
        for entry in entries
        for size in [entry.group.spec.chunk_bytes]
        if any(checksum(memory[entry.offset + nth * size :][:size]) != told for nth, told in enumerate(entry.checksums))
    ]
