"""All tiers of a server, in the order in which they are asked: what the service and the pool know of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.holdings import TierHoldings
from kvpool.types import BlockRun, RunHits, TierStats
from kvpool_server.storage.below import Below
from kvpool_server.storage.catalog import Namespace
from kvpool_server.storage.entry import Entry
from kvpool_server.storage.observer import Observer
from kvpool_server.storage.pool import Pool
from kvpool_server.tiers.demotion import Demotion
from kvpool_server.tiers.health import Health
from kvpool_server.tiers.promotion import BATCHES_AT_ONCE, Promotion
from kvpool_server.tiers.room import Room
from kvpool_server.tiers.tier import Tier, TierError

log = structlog.get_logger()

MAX_AHEAD_BLOCKS = 1024
MAX_AHEAD_BYTES = 256 << 20
"""How much of a prompt is brought up before it is asked for again."""
AGAIN_S = 1.0


class _Mover:
    """One tier, and what moves blocks to and from it."""

    def __init__(self, down: Demotion, up: Promotion, tier: Tier, health: Health):
        self.down = down
        self.up = up
        self.tier = tier
        self.health = health


class Tiers(Observer, Below):
    """See the module. `open` first, `close` last.

    Args:
        memory: the arena: uint8 [arena_bytes].
        tiers: in the order in which they are asked.
        on_evict: of each, whether blocks are written when they are about to go, not when they are stored.
    """

    def __init__(self, pool: Pool, memory: npt.NDArray[np.uint8], tiers: Sequence[Tier], on_evict: Sequence[bool] = ()):
        self._pool = pool
        health = [Health(tier.name) for tier in tiers]
        down = [
            Demotion(pool, memory, tier, each, on_evict=late)
            for tier, each, late in zip(tiers, health, on_evict or [False] * len(tiers), strict=True)
        ]
        late_ones = [demotion for demotion in down if demotion.on_evict]
        self._room = Room(pool, late_ones) if late_ones else None
        up = [Promotion(pool, memory, tier, each, self._room) for tier, each in zip(tiers, health, strict=True)]
        self._movers = list(map(_Mover, down, up, tiers, health))
        self._tasks: list[asyncio.Task[None]] = []
        self._forgetting: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises ConfigError where a tier cannot be had; nothing is left behind then."""
        try:
            for mover in self._movers:
                await mover.tier.open()
        except BaseException:
            await self.close()
            raise
        if self._room is not None:
            self._tasks.append(asyncio.create_task(_for_ever(self._room.run)))
        for mover in self._movers:
            self._tasks.append(asyncio.create_task(_for_ever(mover.down.run)))
            self._tasks += [asyncio.create_task(_for_ever(mover.up.run)) for _ in range(BATCHES_AT_ONCE)]

    async def drain(self, timeout_s: float) -> int:
        """Writes what waits, as far as there is time; how many blocks were left."""
        for mover in self._movers:
            if mover.down.on_evict:
                mover.down.offer_all()
        waiting = [asyncio.create_task(mover.down.drained()) for mover in self._movers if mover.health.up]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()
        return sum(len(mover.down) for mover in self._movers)

    async def close(self) -> None:
        """Ends everything, within seconds. Idempotent."""
        tasks, self._tasks = [*self._tasks, *self._forgetting], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for mover in self._movers:
            await mover.tier.close()

    # Lookup

    def want(
        self, namespace: Namespace, runs: Sequence[BlockRun], hits: Sequence[RunHits], prefix_only: bool
    ) -> tuple[tuple[RunHits, ...], int]:
        wanted = tuple(self._want(namespace, run, hit, prefix_only) for run, hit in zip(runs, hits, strict=True))
        is_pending = any(hit.num_pending for hit in wanted)
        return wanted, max(mover.up.retry_after_ms for mover in self._movers) if is_pending else 0

    def _want(self, namespace: Namespace, run: BlockRun, hit: RunHits, prefix_only: bool) -> RunHits:
        length = len(run)
        if hit.num_leading == length:
            return hit
        most = max(1, min(MAX_AHEAD_BLOCKS, MAX_AHEAD_BYTES // namespace.groups[run.group_idx].spec.slot_bytes))
        missing: list[tuple[bytes, bytes]] = []
        for nth in range(hit.num_leading, length):
            if len(missing) == most:
                break
            if prefix_only or not hit.complete >> nth & 1:
                missing.append((run.block_hashes[nth], run.block_hashes[nth - 1] if nth else run.parent_hash))
        pending = 0
        for mover in self._movers:
            if not missing:
                break
            came = mover.up.wants(namespace, run.group_idx, missing, leading=prefix_only)
            pending += came
            if prefix_only:
                missing = missing[came:]  # What comes is the beginning; another tier may have what follows.
            elif came:
                break
        return replace(hit, num_pending=pending) if pending else hit

    # What the pool tells

    def stored(self, entry: Entry) -> None:
        for mover in self._movers:
            mover.down.stored(entry)
        if self._room is not None:
            self._room.taken()

    def evicted(self, entry: Entry) -> None:
        for mover in self._movers:
            mover.down.evicted(entry)

    # Forgetting

    def forget(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> None:
        """Has blocks removed everywhere; does not wait for it."""
        namespace = self._pool.namespace(fingerprint)
        assert namespace is not None, "the pool has removed blocks of it"
        for mover in self._movers:
            for run in runs:
                self._forget(mover, mover.tier.remove(namespace, run.group_idx, run.block_hashes))

    def clear(self, fingerprint: bytes = b"") -> None:
        """Has all blocks of a namespace, or of all, removed everywhere; does not wait for it."""
        for mover in self._movers:
            self._forget(mover, mover.tier.clear(fingerprint))

    def _forget(self, mover: _Mover, removal: Awaitable[None]) -> None:
        async def forget() -> None:
            try:
                with mover.health.call():
                    await removal
            except TierError as error:
                log.error("a tier has not forgotten what it was told to", tier=mover.tier.name, error=str(error))

        task = asyncio.create_task(forget())
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    # State

    def holdings(self, fingerprint: bytes) -> tuple[TierHoldings, ...]:
        """What each holds of a namespace."""
        return tuple(mover.tier.holdings(fingerprint) for mover in self._movers)

    def stats(self) -> tuple[TierStats, ...]:
        """A snapshot of each."""
        return tuple(replace(mover.tier.stats(), up=mover.health.up) for mover in self._movers)


async def _for_ever(run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            log.exception("moving blocks to or from a tier failed; it goes on")
            await asyncio.sleep(AGAIN_S)
