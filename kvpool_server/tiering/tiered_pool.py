"""A pool above tiers: lookups prefetch what they miss, stored blocks are written down, removals reach every tier.

The tiers are tried in the order in which they are given. The pool knows nothing of them: this module calls it, and
observes it. Without tiers, every operation is the pool's own. Belongs to the pool's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.errors import InvalidRequestError, OutOfSpaceError
from kvpool.holdings import TierHoldings
from kvpool.namespace import NamespaceSpec
from kvpool.types import BlockRun, HintResult, Lookup, PoolStats, RunHits, TierStats
from kvpool_server.cache.entry import Entry, Observer
from kvpool_server.cache.leases import NOBODY, Found, Owner
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Run, Steps, at_once, finish
from kvpool_server.tiering.demoter import Demoter
from kvpool_server.tiering.prefetcher import Prefetcher
from kvpool_server.tiering.promoter import Promoter
from kvpool_server.tiering.watermark import Watermark
from kvpool_server.tiers.health import ANSWER_S, Health
from kvpool_server.tiers.tier import Tier, TierError

log = structlog.get_logger()

MAX_PREFETCH_BLOCKS = 1024
MAX_PREFETCH_BYTES = 256 << 20
"""How much one lookup prefetches; the client's next lookup prefetches what follows."""
PART_BLOCKS, MAX_FIND_BLOCKS, FIND_S = 1_024, 8_192, 1.0
"""Of questions which blocks a tier has: blocks at a time, blocks of tiers that do not know at once, and their time."""
MAX_NAMESPACES = 256
"""Namespaces that are opened at the start for a tier that holds blocks of more: the newest."""
RESTART_S = 1.0
MAX_WAIT_MS = 1_000
"""The longest that one lookup waits for pending blocks; its client looks up again if it wants to wait longer."""
MAX_WAITING = 1_024
"""Lookups that wait at once. Further ones are answered as if they did not wait."""


@dataclass(frozen=True, slots=True)
class _Level:
    """A tier, and what transfers blocks to and from it."""

    tier: Tier
    health: Health
    demoter: Demoter
    promoter: Promoter


class TieredPool(Observer):
    """See the module. `open` first, `close` last. Call `pool` for everything that does not concern tiers.

    Args:
        memory: the arena: uint8 [arena_bytes].
        write_back: of each tier, whether blocks are written when they are about to be evicted, not when they are
            stored; default: no.
        clock: monotonic seconds.
        run: does work in steps; default: all steps at once.
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
        demoters = [
            Demoter(pool, memory, tier, each, write_back=back)
            for tier, each, back in zip(tiers, health, write_back or [False] * len(tiers), strict=True)
        ]
        on_eviction = [demoter for demoter in demoters if demoter.write_back]
        self._watermark = Watermark(pool, on_eviction) if on_eviction else None
        promoters = [
            Promoter(pool, memory, tier, each, self._watermark, clock, self._progressed, run)
            for tier, each in zip(tiers, health, strict=True)
        ]
        self._levels = list(map(_Level, tiers, health, demoters, promoters))
        self._num_open = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._clearing: Counter[bytes] = Counter()
        self._progress = asyncio.Event()  # Replaced once it is set.
        self._num_waiting = 0
        self._prefetcher = Prefetcher(self._look)
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
        """Opens the namespaces of a tier's blocks, so that operators can list and clear them before an engine comes."""
        stats, specs = tier.stats(), tier.specs()
        log.info("tier opened", tier=tier.name, size_bytes=stats.size_bytes or None, entries=stats.num_entries)
        for spec in self._newest(specs[-MAX_NAMESPACES:]):
            try:
                self.pool.open_namespace(spec)
            except (InvalidRequestError, OutOfSpaceError):
                continue  # Its blocks are larger than an extent of the arena, or another tier's namespaces are open.

    def _newest(self, specs: Sequence[NamespaceSpec]) -> list[NamespaceSpec]:
        """The newest of each tenant, fewer than it may open, so that its engines can open another one at once."""
        if not self.pool.arena.has_tenants:
            return list(specs)
        num_chosen: Counter[str] = Counter()
        newest = []
        for spec in reversed(specs):
            num_chosen[spec.tenant] += 1
            if num_chosen[spec.tenant] < self.pool.limits.max_tenant_namespaces:
                newest.append(spec)
        return newest[::-1]

    async def drain(self, timeout_s: float) -> int:
        """Writes all blocks that the tiers lack, as far as there is time; returns how many were not written."""
        for level in self._levels:
            if level.demoter.write_back:
                level.demoter.enqueue_all()
        waiting = [
            asyncio.create_task(level.demoter.wait_idle()) for level in self._levels if level.health.is_available
        ]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()
        left = self.num_queued
        if self._levels:
            log.info("tiers drained", blocks_left=left)
        return left

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
    ) -> Lookup:
        """Which blocks are complete. With a TTL, leases them, and prefetches missing blocks from the tiers.

        Args:
            locate: also say where the leased blocks lie, unless the lookup is to be repeated: the get under its lease
                records its use.
            owner: of the lease.
            wait_ms: where blocks are pending, answer once none is, or after this time, MAX_WAIT_MS at most. Meanwhile
                the lookup is repeated whenever blocks have come up, so that they are leased. One of more than
                LOOKUP_STEP_BLOCKS blocks does not wait: each repetition would cost turns of the loop.
        """

        async def look() -> Lookup:
            return await self._run(self._lookup(fingerprint, runs, prefix_only, lease_ttl_ms, locate, owner))

        found = await look()
        if not wait_ms or self._num_waiting >= MAX_WAITING or sum(map(len, runs)) > LOOKUP_STEP_BLOCKS:
            return found
        self._num_waiting += 1
        try:
            async with asyncio.timeout(min(wait_ms, MAX_WAIT_MS) / 1000):
                while found.retry_after_ms:
                    await self._next_come_up(fingerprint, runs, found)
                    earlier, found = found, await look()
                    self.pool.release([earlier.lease_id], owner)
        except TimeoutError:
            pass
        except BaseException:  # Nobody will hear of the lease.
            self.pool.release([found.lease_id], owner)
            raise
        finally:
            self._num_waiting -= 1
        return found

    def _lookup(
        self,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        prefix_only: bool,
        lease_ttl_ms: int,
        locate: bool,
        owner: Owner,
    ) -> Steps[Lookup]:
        """One lookup, which does not wait."""
        is_large = sum(map(len, runs)) > LOOKUP_STEP_BLOCKS  # Other calls get turns between its parts.
        if is_large:
            yield
        lookups = self.pool.lookups
        found = yield from lookups.find(fingerprint, runs, prefix_only, lease_ttl_ms, owner)
        if is_large:
            yield
        hits, retry_after_ms = found.hits, 0
        if lease_ttl_ms and self._levels:
            hits, retry_after_ms = self._prefetch(found, runs, prefix_only)
        if retry_after_ms:
            lookups.record_use_on_get(found)
        else:
            lookups.record_use(found)
            if lease_ttl_ms:
                self.pool.tell_lookup(found, runs)
        if is_large:
            yield
        if not locate or not found.lease_id or retry_after_ms:
            return Lookup(hits, found.lease_id, found.lease_ttl_ms, retry_after_ms)
        if found.lease_id not in self.pool.leases:  # It has ended since the last step, and its slots may be others'.
            return Lookup(hits)
        return Lookup(hits, found.lease_id, found.lease_ttl_ms, slots=lookups.slots(found))

    async def _next_come_up(self, fingerprint: bytes, runs: Sequence[BlockRun], found: Lookup) -> None:
        """Returns when the first pending block of a run may be up, or lost."""
        first = [
            (fingerprint, run.group_idx, run.block_hashes[hit.num_leading])
            for run, hit in zip(runs, found.hits, strict=True)
            if hit.num_pending
        ]
        while True:
            await self._progress.wait()
            if not all(any(level.promoter.is_pending(key) for level in self._levels) for key in first):
                return

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    def _prefetch(self, found: Found, runs: Sequence[BlockRun], prefix_only: bool) -> tuple[tuple[RunHits, ...], int]:
        """Prefetches missing blocks; returns the hits with what is pending, and when to look up again, milliseconds."""
        namespace = found.namespace
        if self._clearing[namespace.fingerprint] or self._clearing[b""]:
            return found.hits, 0
        num_pending = pending_bytes = 0
        hits = []
        for run, hit in zip(runs, found.hits, strict=True):
            slot_bytes = namespace.groups[run.group_idx].spec.slot_bytes
            most = min(MAX_PREFETCH_BLOCKS - num_pending, (MAX_PREFETCH_BYTES - pending_bytes) // slot_bytes)
            if not num_pending:
                most = max(most, 1)  # One block is prefetched, however large.
            pending = 0
            if most and hit.num_leading < len(run):
                missing = list(itertools.islice(_missing(run, hit, prefix_only), most))
                pending = self._prefetch_run(namespace, run.group_idx, missing, prefix_only)
            num_pending += pending
            pending_bytes += pending * slot_bytes
            hits.append(replace(hit, num_pending=pending) if pending else hit)
        waiting = [level.promoter.retry_after_ms for level in self._levels if not level.promoter.is_idle]
        retry_after_ms = min(waiting) if num_pending else 0
        return tuple(hits), retry_after_ms

    def _prefetch_run(
        self, namespace: PoolNamespace, group_idx: int, missing: list[tuple[bytes, bytes]], prefix_only: bool
    ) -> int:
        """Prefetches blocks, given with their parents' hashes; returns how many are pending."""
        num_pending = 0
        for level in self._levels:
            if not missing:
                break
            pending = level.promoter.prefetch(namespace, group_idx, missing, prefix_only=prefix_only)
            num_pending += pending
            if prefix_only:
                missing = missing[pending:]  # The first ones are pending; the next tier may hold those behind them.
            elif pending:
                break
        return num_pending

    async def prefetch(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> HintResult:
        """Begins to bring prefixes up from the tiers, whatever their length; says how far they are.

        Raises OutOfSpaceError if too many such hints are under way, and InvalidRequestError for two runs of a group.
        """
        namespace, groups = self.pool.hints.groups(fingerprint, runs)
        if len({run.group_idx for run in runs}) < len(runs):
            raise InvalidRequestError(
                f"a prefetch of {len(runs)} runs, of which some are of the same group; give one run a group, and a "
                "request for each prefix"
            )
        self.pool.counters["prefetch_hints"] += 1
        with_rules = [(run, group.needs_prefix) for run, group in zip(runs, groups, strict=True)]
        return await self._prefetcher.prefetch(fingerprint, with_rules, namespace.spec.tenant)

    def _look(self, fingerprint: bytes, run: BlockRun, prefix_only: bool) -> RunHits:
        """Looks up a run for a prefetch hint without updating recency, and queues its missing blocks for promotion."""
        found = finish(self.pool.lookups.find(fingerprint, [run], prefix_only))
        hits = self._prefetch(found, [run], prefix_only)[0] if self._levels else found.hits
        return hits[0]

    def stored(self, entry: Entry) -> None:
        if not entry.group.is_measurement:
            for level in self._levels:
                level.demoter.stored(entry)
        if self._watermark is not None:
            self._watermark.check()

    def evicted(self, entry: Entry) -> None:
        if not entry.group.is_measurement:
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
        removed = await self._run(self.pool.remove_in_steps(fingerprint, runs))
        assert namespace is not None, "the pool has just removed blocks of it"
        for level in self._levels:
            for run in runs:
                level.promoter.forget(namespace, run.group_idx, run.block_hashes)
        await self._on_every_tier(
            lambda tier: asyncio.gather(*(tier.remove(namespace, run.group_idx, run.block_hashes) for run in runs))
        )
        return removed

    async def clear(self, fingerprint: bytes = b"") -> int:
        """Drops all blocks of a namespace, or of all, from the pool and every tier; none is promoted meanwhile.

        Returns how many the pool held. Raises as `remove`.
        """
        # After a restart, a tier may hold blocks of a namespace that no engine has opened yet.
        is_open = not fingerprint or self.pool.namespace(fingerprint) is not None
        is_in_tiers = any(held.num_entries for held in self.holdings(fingerprint)) if not is_open else False
        self._clearing[fingerprint] += 1
        try:
            removed = await self._run(self.pool.clear_in_steps(fingerprint)) if is_open or not is_in_tiers else 0
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

        if self._levels:
            failures = list(filter(None, await asyncio.gather(*map(remove_from, self._levels))))
            if failures:
                raise TierError("; ".join(failures))

    @property
    def num_queued(self) -> int:
        """Blocks that wait to be written to a tier."""
        return sum(len(level.demoter) for level in self._levels)

    @property
    def is_idle(self) -> bool:
        """True if no block is queued for, or on its way to or from, a tier that answers."""
        levels = [level for level in self._levels if level.health.is_available]
        is_watermark_idle = self._watermark is None or self._watermark.is_idle
        return is_watermark_idle and all(level.demoter.is_idle and level.promoter.is_idle for level in levels)

    async def tiers_of(
        self, namespace: PoolNamespace, group_idx: int, names: Sequence[bytes]
    ) -> tuple[list[str], list[str]]:
        """The first tier that has each block, by its name, empty if none has; and the tiers that have not told.

        A tier that does not know from memory is asked for `MAX_FIND_BLOCKS` blocks, which may take `FIND_S`.
        """
        found, away = [""] * len(names), []
        for level in self._levels:
            left, num_asked = [nth for nth, tier in enumerate(found) if not tier], 0
            try:
                for at in range(0, len(left), PART_BLOCKS):
                    part = left[at : at + PART_BLOCKS]
                    asked = [names[nth] for nth in part]
                    known = level.tier.known(namespace, group_idx, asked)
                    if known is None:
                        num_asked += len(part)
                        known = (
                            await _find(level, namespace, group_idx, asked) if num_asked <= MAX_FIND_BLOCKS else None
                        )
                    if known is None:
                        away.append(level.tier.name)
                        break
                    for nth, is_there in zip(part, known, strict=True):
                        if is_there:
                            found[nth] = level.tier.name
                    await asyncio.sleep(0)
            except (TierError, TimeoutError):
                away.append(level.tier.name)
        return found, away

    def holdings(self, fingerprint: bytes) -> tuple[TierHoldings, ...]:
        """What each tier holds of a namespace, which need not be open."""
        return tuple(level.tier.holdings(fingerprint) for level in self._levels)

    def stats(self, prefaulted_bytes: int = 0) -> PoolStats:
        """A snapshot of the pool and of each tier that was opened; a scrape may come before `open` has ended."""
        tiers: list[TierStats] = []
        for level in self._levels[: self._num_open]:
            stats = level.tier.stats()
            tiers.append(replace(stats, up=level.health.is_working))
        return replace(self.pool.stats(prefaulted_bytes), tiers=tuple(tiers))


async def _find(level: _Level, namespace: PoolNamespace, group_idx: int, names: Sequence[bytes]) -> list[bool] | None:
    """Whether a tier has each block; None if it is away. Raises TierError, TimeoutError."""
    if not level.health.is_available:
        return None
    async with asyncio.timeout(FIND_S):
        with level.health.call():
            return await level.tier.find(namespace, group_idx, names)


async def _run_forever(run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            log.exception("transferring blocks to or from a tier failed; restarting", seconds=RESTART_S)
            await asyncio.sleep(RESTART_S)


def _missing(run: BlockRun, hit: RunHits, prefix_only: bool) -> Iterator[tuple[bytes, bytes]]:
    """The blocks of a run that a lookup has not found, each with its parent's hash."""
    flags = "" if prefix_only else f"{hit.complete:b}"[::-1]
    for nth in range(hit.num_leading, len(run)):
        if flags[nth : nth + 1] != "1":
            yield run.block_hashes[nth], run.block_hashes[nth - 1] if nth else run.parent_hash
