"""A pool above tiers: lookups prefetch what they miss, stored blocks are written down, removals reach every tier.

The tiers are tried in the order in which they are given. Without tiers, every operation is the pool's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol.errors import InvalidRequestError, OutOfSpaceError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun, Lookup, RunHits
from kvpool.protocol.wire import message_of
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.cache.hints import HintResult
from kvpool_server.cache.leases import NOBODY, Found, Owner
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Run, Steps, at_once, finish
from kvpool_server.sharing import Shares
from kvpool_server.tiering.demoter import Demoter, Watermark
from kvpool_server.tiering.prefetcher import Prefetcher, prefetch
from kvpool_server.tiering.promoter import MAX_ARENA_SHARE, Promoter
from kvpool_server.tiers.calls import ANSWER_S, Health, Holders, holders_of
from kvpool_server.tiers.tier import BlockKey, Tier, TierError

log = structlog.get_logger()

RESTART_S = 1.0
"""Of what transfers blocks, after it has failed."""
MAX_LOCATED_CHUNKS = 1 << 18
"""Of one lookup that says where its blocks lie, which it does in one step: 128k tokens of three groups of 8 shards have
fewer. The client of a larger one, as after any lookup without places, asks `Get`, batch by batch."""
MAX_NAMESPACES = 256  # That are opened at the start for a tier that holds blocks of more: the newest.
MAX_UNLEASED_BYTES = 256 << 20
"""Of a prompt, what comes up before the lookup that waits for it leases it: other prompts may evict it meanwhile."""
MAX_WAIT_MS, MAX_WAITING = 1_000, 1_024
"""How long one lookup waits for pending blocks (its client may look up again), and how many wait, of one client as many
as are then left; others do not."""


class _Level(NamedTuple):
    """A tier, and what transfers blocks to and from it."""

    tier: Tier
    health: Health
    demoter: Demoter
    promoter: Promoter


class TieredPool(Observer):
    """Open it first, close it last; call `pool` for what does not concern tiers. Belongs to the pool's event loop.

    Args:
        memory: the arena: uint8 [arena_bytes].
        write_back: of each tier, whether blocks are written before their eviction, not when they are stored.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: Pool,
        memory: npt.NDArray[np.uint8],
        tiers: Sequence[Tier] = (),
        write_back: Sequence[bool] = (),
        clock: Callable[[], float] = time.monotonic,
        run: Run = at_once,
    ):
        self.pool = pool
        self._run = run
        health = [Health(tier.name, clock) for tier in tiers]
        backs = write_back or [False] * len(tiers)
        each_of = zip(tiers, health, backs, strict=True)
        demoters = [Demoter(pool, memory, tier, each, write_back=back) for tier, each, back in each_of]
        on_eviction = [demoter for demoter in demoters if demoter.write_back]
        self._watermark = Watermark(pool, on_eviction) if on_eviction else None
        self._promoters = [
            Promoter(pool, memory, tier, each, self._watermark, clock, self._progressed, run, self._is_clearing)
            for tier, each in zip(tiers, health, strict=True)
        ]
        self._levels = list(map(_Level, tiers, health, demoters, self._promoters))
        self._num_open = 0
        self._waiting = Shares()  # Lookups.
        self._tasks: list[asyncio.Task[None]] = []
        self._clearing: Counter[bytes] = Counter()
        self._progress = asyncio.Event()  # Replaced once it is set.
        self._prefetcher = Prefetcher(lambda *look: finish(self.bring_up(*look)))
        if self._levels:
            pool.observe(self)

    async def open(self) -> None:
        """Opens the tiers. Raises ConfigError where one cannot be opened; all are closed then."""
        try:
            for level in self._levels:
                await level.tier.open()
                self._num_open += 1
        except BaseException:
            await self.close()
            raise
        if self._watermark is not None:
            self._tasks.append(asyncio.create_task(_run_forever(self._watermark.run)))
        for level in self._levels:
            self._open_namespaces(level.tier)
            runs = [level.demoter.run] * level.tier.writes_at_once + [level.promoter.run] * level.tier.reads_at_once
            self._tasks += [asyncio.create_task(_run_forever(run)) for run in runs]

    def _open_namespaces(self, tier: Tier) -> None:
        """Opens the namespaces of a tier's blocks, so that operators can list and clear them before an engine comes.

        Of each tenant, it opens fewer than the tenant may open: its engines can open another one at once.
        """
        stats, has_tenants = tier.stats(), self.pool.arena.has_tenants
        log.info("tier opened", tier=tier.name, size_bytes=stats.size_bytes or None, entries=stats.num_entries)
        chosen: list[NamespaceSpec] = []
        num_chosen: Counter[str] = Counter()
        for spec in reversed(tier.specs()[-MAX_NAMESPACES:]):
            num_chosen[spec.tenant] += 1
            if not has_tenants or num_chosen[spec.tenant] < self.pool.limits.max_tenant_namespaces:
                chosen.append(spec)
        for spec in reversed(chosen):
            # Its blocks may be larger than an extent of the arena, or another tier's namespaces may be open.
            with contextlib.suppress(InvalidRequestError, OutOfSpaceError):
                self.pool.open_namespace(spec)

    async def drain(self, timeout_s: float) -> int:
        """Writes all blocks that the tiers lack, as far as there is time; returns how many are still queued."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(level.demoter.drain() for level in self._levels)), timeout_s)
        if self._levels:
            log.info("tiers drained", blocks_left=self.num_queued)
        return self.num_queued

    async def close(self) -> None:
        """Ends every transfer and closes the tiers, within seconds. Idempotent."""
        self._prefetcher.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for level in self._levels:
            await level.tier.close()

    async def lookup(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int = 0,
        locate: bool = False,
        owner: Owner = NOBODY,
        wait_ms: int = 0,
        here: bool = False,
    ) -> Lookup:
        """Which blocks are complete. With a TTL, leases them, and prefetches missing blocks from the tiers.

        Args:
            locate: also say where the leased blocks lie, unless they have more than MAX_LOCATED_CHUNKS, or the lookup
                is to be repeated: the get under its lease records its use.
            owner: of the lease.
            wait_ms: where blocks are pending, answer once none is, or after this time, MAX_WAIT_MS at most. Meanwhile
                the lookup is repeated whenever half of the rest has come up, so that it is leased. One of more than
                LOOKUP_STEP_BLOCKS blocks does not wait: each repetition would cost turns of the loop.
            here: prefetch nothing, and count nothing as looked up: another server asks, whose clients count.
        """

        async def look() -> Lookup:
            return await self._run(self._lookup(fingerprint, runs, prefix_only, lease_ttl_ms, locate, owner, here))

        found = await look()
        has_room = self._waiting.has_room(owner.name, 1, MAX_WAITING)
        if not wait_ms or not has_room or sum(map(len, runs)) > LOOKUP_STEP_BLOCKS:
            return found
        self._waiting.add(owner.name)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + min(wait_ms, MAX_WAIT_MS) / 1000
        try:
            while found.retry_after_ms and loop.time() < ends_at:
                awaited = self._awaited(fingerprint, runs, found)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(ends_at):
                        while awaited and all(map(self._is_pending, awaited)):
                            await self._progress.wait()
                earlier, found = found, await look()
                self.pool.release([earlier.lease_id], owner)
        except BaseException:  # Nobody will hear of the lease.
            self.pool.release([found.lease_id], owner)
            raise
        finally:
            self._waiting.add(owner.name, -1)
        return found

    def _awaited(self, fingerprint: bytes, runs: Sequence[BlockRun], found: Lookup) -> list[BlockKey]:
        """Of each run, the pending block behind the first half of them: they come up in this order.

        What comes up before has no lease, so it is `MAX_UNLEASED_BYTES`, and a share of the arena, at most.
        """
        awaited: list[BlockKey] = []
        most_bytes = min(MAX_UNLEASED_BYTES, MAX_ARENA_SHARE * self.pool.arena.arena_bytes)
        for run, hit in zip(runs, found.hits, strict=True):
            keys = ((fingerprint, run.group_idx, each) for each in run.block_hashes[hit.num_leading :])
            pending = list(filter(self._is_pending, keys)) if hit.num_pending else []
            most = int(most_bytes // self.pool.group_spec(fingerprint, run).slot_bytes)
            awaited += pending[min(len(pending) // 2, most) :][:1]
        return awaited

    def _is_pending(self, key: BlockKey) -> bool:
        return any(promoter.is_pending(key) for promoter in self._promoters)

    def _lookup(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int,
        locate: bool,
        owner: Owner,
        here: bool,
    ) -> Steps[Lookup]:
        """One lookup, which does not wait."""
        pause = (None,) * (sum(map(len, runs)) > LOOKUP_STEP_BLOCKS)  # Other calls get turns between its parts.
        yield from pause
        lookups = self.pool.lookups
        found = yield from lookups.find(fingerprint, runs, prefix_only, lease_ttl_ms, owner)
        yield from pause
        hits, retry_after_ms = found.hits, 0
        if lease_ttl_ms and not here:
            hits, retry_after_ms = yield from self._prefetch_missing(found, runs, prefix_only)
        if retry_after_ms:
            lookups.record_use_on_get(found)
        elif here:
            lookups.touch(found)
        else:
            lookups.record_use(found)
            if lease_ttl_ms:
                self.pool.tell_traffic(found.namespace, runs, found.hits)
        yield from pause
        num_chunks = sum((stop - start) * group.spec.num_shards for group, start, stop in found.spans)
        if not locate or not found.lease_id or retry_after_ms or num_chunks > MAX_LOCATED_CHUNKS:
            return Lookup(hits, found.lease_id, found.lease_ttl_ms, retry_after_ms)
        if found.lease_id not in self.pool.leases:  # It has ended since the last step, and its slots may be others'.
            return Lookup(hits)
        return Lookup(hits, found.lease_id, found.lease_ttl_ms, slots=lookups.slots(found))

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def prefetch(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> HintResult:
        """Begins to bring prefixes up from the tiers, whatever their length; says how far they are.

        Raises OutOfSpaceError if too many such hints are under way, and InvalidRequestError for two runs of a group.
        """
        namespace, groups = self.pool.namespaces.groups(fingerprint, runs)
        if len({run.group_idx for run in runs}) < len(runs):
            raise InvalidRequestError(
                f"a prefetch of {len(runs)} runs, some of one group; give one run a group, a request for each prefix"
            )
        self.pool.counters["prefetch_hints"] += 1
        needs_prefix = [group.needs_prefix for group in groups]
        return await self._prefetcher.prefetch(fingerprint, runs, needs_prefix, namespace.spec.tenant)

    def bring_up(self, fingerprint: bytes, runs: Sequence[BlockRun], prefix_only: bool) -> Steps[Lookup]:
        """Looks blocks up without updating recency, and queues those that are missing for promotion."""
        found = yield from self.pool.lookups.find(fingerprint, runs, prefix_only)
        hits, retry_after_ms = yield from self._prefetch_missing(found, runs, prefix_only)
        return Lookup(hits, retry_after_ms=retry_after_ms)

    def _prefetch_missing(
        self, found: Found, runs: Sequence[BlockRun], prefix_only: bool
    ) -> Steps[tuple[tuple[RunHits, ...], int]]:
        """The hits with what is pending, and when to look up again, milliseconds."""
        if not self._levels or self._is_clearing(found.namespace.fingerprint):
            return found.hits, 0
        return (yield from prefetch(self._promoters, found, runs, prefix_only))

    def _is_clearing(self, fingerprint: bytes) -> bool:
        return bool(self._clearing[fingerprint] or self._clearing[b""])

    def stored(self, entries: Sequence[Entry]) -> None:
        for level in self._levels:
            level.demoter.stored(entries)
        if self._watermark is not None:
            self._watermark.wake()

    def evicted(self, entry: Entry) -> None:
        for level in self._levels:
            level.demoter.evicted(entry)

    def removed(self, entry: Entry) -> None:
        for level in self._levels:
            level.demoter.removed(entry)

    async def remove(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> int:
        """Drops blocks from the pool and from every tier; returns how many the pool held.

        Raises TierError if a tier has not dropped them in time; the pool has dropped them then.
        """
        namespace = self.pool.namespace(fingerprint)
        removed = await self._run(self.pool.removals.remove(fingerprint, runs))
        assert namespace is not None, "the pool has just removed blocks of it"
        group = namespace.groups[runs[0].group_idx]  # The pool refuses runs of several groups.
        block_hashes = [block_hash for run in runs for block_hash in run.block_hashes]
        for promoter in self._promoters:
            promoter.forget(group, block_hashes)
        await self._on_every_tier(lambda tier: tier.remove(group, block_hashes))
        return removed

    async def clear(self, fingerprint: bytes = b"") -> int:
        """Drops all blocks of a namespace, or of all, from the pool and every tier; none is promoted meanwhile.

        Returns how many the pool held. Raises as `remove`.
        """
        # After a restart, a tier may hold blocks of a namespace that no engine has opened yet.
        is_open = not fingerprint or self.pool.namespace(fingerprint) is not None
        is_in_pool = is_open or not any(held.num_entries for held in self.holdings(fingerprint))
        self._clearing[fingerprint] += 1
        try:
            removed = await self._run(self.pool.removals.clear(fingerprint)) if is_in_pool else 0
            await self._on_every_tier(lambda tier: tier.clear(fingerprint))
        finally:
            self._clearing[fingerprint] -= 1
        return removed

    async def _on_every_tier(self, removal: Callable[[Tier], Awaitable[object]]) -> None:
        async def remove_from(level: _Level) -> str:
            try:
                with level.health.call():
                    async with asyncio.timeout(ANSWER_S):
                        await removal(level.tier)
            except TimeoutError:
                return f"{level.tier.name} does not answer"
            except TierError as error:
                return str(error)
            return ""

        removals = [remove_from(level) for level in self._levels if level.tier.keeps]
        if failures := list(filter(None, await asyncio.gather(*removals))):
            raise TierError("; ".join(failures))

    @property
    def num_queued(self) -> int:
        """Blocks that wait to be written to a tier."""
        return sum(len(level.demoter) for level in self._levels)

    @property
    def is_idle(self) -> bool:
        """True if no block is queued for, or on its way to or from, a tier that answers."""
        if self._watermark is not None and self._watermark.work.is_set():
            return False
        levels = [level for level in self._levels if level.health.is_available]
        return all(level.demoter.idle.is_set() and level.promoter.is_idle for level in levels)

    async def tiers_of(self, group: Group, names: Sequence[bytes]) -> Holders:
        """The first tier that has each block."""
        return await holders_of([(level.tier, level.health) for level in self._levels], group, names)

    def holdings(self, fingerprint: bytes) -> list[pb.TierHoldings]:
        """What each tier holds of a namespace, which need not be open."""
        return [level.tier.holdings(fingerprint) for level in self._levels]

    def stats(self, prefaulted_bytes: int = 0) -> pb.StatsResponse:
        """A snapshot of the pool and of each tier that was opened; a scrape may come before `open` has ended."""
        stats = message_of(self.pool.stats(), pb.StatsResponse, prefaulted_bytes=prefaulted_bytes)
        for level in self._levels[: self._num_open]:
            stats.tiers.append(level.tier.stats())
            servers = stats.tiers[-1].servers
            stats.tiers[-1].up = any(each.up for each in servers) if servers else level.health.is_working
        return stats


async def _run_forever(run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            log.exception("transferring blocks to or from a tier failed; restarting", seconds=RESTART_S)
            await asyncio.sleep(RESTART_S)
