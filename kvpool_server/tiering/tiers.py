"""All tiers of a server, in the order in which they are asked: what the service and the pool know of them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.errors import InvalidRequestError
from kvpool.holdings import TierHoldings
from kvpool.types import BlockRun, RunHits, TierStats
from kvpool_server.cache.below import Below
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.cache.observer import Observer
from kvpool_server.cache.pool import Pool
from kvpool_server.tiering.demoter import Demoter
from kvpool_server.tiering.promoter import BATCHES_AT_ONCE, Promoter
from kvpool_server.tiering.watermark import Watermark
from kvpool_server.tiers.health import ANSWER_S, Health
from kvpool_server.tiers.tier import COUNTERS, Tier, TierError

log = structlog.get_logger()

MAX_AHEAD_BLOCKS = 1024
MAX_AHEAD_BYTES = 256 << 20
"""How much of a prompt is brought up before it is asked for again."""
MAX_NAMESPACES = 256
"""Of a tier that are opened at the start, the newest."""
AGAIN_S = 1.0


class _Mover:
    """One tier, and what moves blocks to and from it."""

    def __init__(self, down: Demoter, up: Promoter, tier: Tier, health: Health):
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
            Demoter(pool, memory, tier, each, on_evict=late)
            for tier, each, late in zip(tiers, health, on_evict or [False] * len(tiers), strict=True)
        ]
        late_ones = [demotion for demotion in down if demotion.on_evict]
        self._watermark = Watermark(pool, late_ones) if late_ones else None
        up = [Promoter(pool, memory, tier, each, self._watermark) for tier, each in zip(tiers, health, strict=True)]
        self._movers = list(map(_Mover, down, up, tiers, health))
        self._tasks: list[asyncio.Task[None]] = []
        self._clearing: Counter[bytes] = Counter()

    async def open(self) -> None:
        """Raises ConfigError where a tier cannot be had; nothing is left behind then."""
        try:
            for mover in self._movers:
                await mover.tier.open()
        except BaseException:
            await self.close()
            raise
        if self._watermark is not None:
            self._tasks.append(asyncio.create_task(_for_ever(self._watermark.run)))
        for mover in self._movers:
            self._open_namespaces(mover.tier)
            self._tasks.append(asyncio.create_task(_for_ever(mover.down.run)))
            self._tasks += [asyncio.create_task(_for_ever(mover.up.run)) for _ in range(BATCHES_AT_ONCE)]

    def _open_namespaces(self, tier: Tier) -> None:
        """What a tier holds is there to be seen, and cleared, before an engine asks for it."""
        stats, specs = tier.stats(), tier.specs()
        log.info("tier opened", tier=tier.name, size_bytes=stats.size_bytes or None, entries=stats.num_entries)
        for spec in specs[-MAX_NAMESPACES:]:
            try:
                self._pool.open_namespace(spec)
            except InvalidRequestError:
                continue  # Its blocks are larger than what the arena has room for.

    async def drain(self, timeout_s: float) -> int:
        """Writes what waits, as far as there is time; how many blocks were left."""
        for mover in self._movers:
            if mover.down.on_evict:
                mover.down.offer_all()
        waiting = [asyncio.create_task(mover.down.drained()) for mover in self._movers if mover.health.is_available]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()
        return sum(len(mover.down) for mover in self._movers)

    async def close(self) -> None:
        """Ends everything, within seconds. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for mover in self._movers:
            await mover.tier.close()

    # Lookup

    def want(
        self, namespace: Namespace, runs: Sequence[BlockRun], hits: Sequence[RunHits], prefix_only: bool
    ) -> tuple[tuple[RunHits, ...], int]:
        if self._clearing[namespace.fingerprint] or self._clearing[b""]:
            return tuple(hits), 0
        ahead = ahead_bytes = 0
        wanted = []
        for run, hit in zip(runs, hits, strict=True):
            slot_bytes = namespace.groups[run.group_idx].spec.slot_bytes
            most = min(MAX_AHEAD_BLOCKS - ahead, (MAX_AHEAD_BYTES - ahead_bytes) // slot_bytes)
            if not ahead:
                most = max(most, 1)  # However large a block is, one may come.
            pending = self._want(namespace, run, hit, prefix_only, most) if most and hit.num_leading < len(run) else 0
            ahead += pending
            ahead_bytes += pending * slot_bytes
            wanted.append(replace(hit, num_pending=pending) if pending else hit)
        return tuple(wanted), max(mover.up.retry_after_ms for mover in self._movers) if ahead else 0

    def _want(self, namespace: Namespace, run: BlockRun, hit: RunHits, prefix_only: bool, most: int) -> int:
        """Asks for up to `most` blocks of a run that are missing; how many come, or may come."""
        missing = list(itertools.islice(_missing(run, hit, prefix_only), most))
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
        return pending

    # What the pool tells

    def stored(self, entry: Entry) -> None:
        for mover in self._movers:
            mover.down.stored(entry)
        if self._watermark is not None:
            self._watermark.taken()

    def evicted(self, entry: Entry) -> None:
        for mover in self._movers:
            mover.down.evicted(entry)

    # Forgetting

    async def forget(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> None:
        """Has blocks removed everywhere. Raises TierError where that has not been done, or not in time."""
        namespace = self._pool.namespace(fingerprint)
        assert namespace is not None, "the pool has removed blocks of it"
        for mover in self._movers:
            for run in runs:
                mover.up.forget(namespace, run.group_idx, run.block_hashes)
        await self._everywhere(
            lambda tier: asyncio.gather(*(tier.remove(namespace, run.group_idx, run.block_hashes) for run in runs))
        )

    async def clear(self, fingerprint: bytes = b"") -> None:
        """Has all blocks of a namespace, or of all, removed everywhere; none comes up meanwhile. Raises as `forget`."""
        self._clearing[fingerprint] += 1
        try:
            await self._everywhere(lambda tier: tier.clear(fingerprint))
        finally:
            self._clearing[fingerprint] -= 1

    async def _everywhere(self, removal: Callable[[Tier], Awaitable[object]]) -> None:
        async def one(mover: _Mover) -> str:
            try:
                with mover.health.call():
                    async with asyncio.timeout(ANSWER_S):
                        await removal(mover.tier)
            except TimeoutError:
                return f"{mover.tier.name} does not answer"
            except TierError as error:
                return str(error)
            return ""

        failures = list(filter(None, await asyncio.gather(*map(one, self._movers))))
        if failures:
            raise TierError("; ".join(failures))

    def has_any(self, fingerprint: bytes) -> bool:
        """Whether a tier holds blocks of a namespace, which need not be open."""
        return any(held.num_entries for held in self.holdings(fingerprint))

    # State

    def holdings(self, fingerprint: bytes) -> tuple[TierHoldings, ...]:
        """What each holds of a namespace."""
        return tuple(mover.tier.holdings(fingerprint) for mover in self._movers)

    def stats(self) -> tuple[TierStats, ...]:
        """A snapshot of each."""
        found = []
        for mover in self._movers:
            stats = mover.tier.stats()
            counters = {**dict.fromkeys(COUNTERS, 0), **stats.counters}
            found.append(replace(stats, up=mover.health.is_working, counters=counters))
        return tuple(found)


async def _for_ever(run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            log.exception("moving blocks to or from a tier failed; it goes on")
            await asyncio.sleep(AGAIN_S)


def _missing(run: BlockRun, hit: RunHits, prefix_only: bool) -> Iterator[tuple[bytes, bytes]]:
    """The blocks of a run that a lookup has not found, each with its parent's hash."""
    there = "" if prefix_only else f"{hit.complete:b}"[::-1]
    for nth in range(hit.num_leading, len(run)):
        if there[nth : nth + 1] != "1":
            yield run.block_hashes[nth], run.block_hashes[nth - 1] if nth else run.parent_hash
