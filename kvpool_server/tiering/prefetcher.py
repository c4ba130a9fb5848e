"""Prefetches what lookups miss, and whole prefixes that clients name before a request comes for them.

A lookup prefetches what it misses, up to a bound, for a client that will look up again. A prefetch hint has no such
client: the server itself looks again while blocks come up, until none is on its way any more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpool.protocol.errors import KVPoolError, OutOfSpaceError
from kvpool.protocol.types import BlockRun, Lookup, RunHits
from kvpool_server.cache.hints import HintResult
from kvpool_server.cache.leases import Found
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Steps
from kvpool_server.tiering.promoter import MIN_RETRY_MS, Promoter

MAX_PREFETCH_BLOCKS, MAX_PREFETCH_BYTES = 1_024, 2 << 30
"""How much one lookup prefetches; the client's next lookup prefetches what follows."""
MAX_SEARCHED_BLOCKS, MAX_SEARCHED_BYTES = 2_048, 2 * MAX_PREFETCH_BYTES
"""Of one `find`, where the tier is known to have the block before: another server keeps what it has until it is read.
Else the tier is asked for what is to be prefetched."""
MAX_PREFETCHES = 16
"""Hints that are followed at once. A tenant may have as many as are left: one alone gets half of them."""
MAX_FOLLOWED_S = 120.0
"""How long one hint is followed."""
LOOK_EVERY_S = 0.2
"""From one look to the next of one hint, of which each may take the event loop 2 ms. What is behind a run that is
on its way is not looked at again before that run is up."""

Look = Callable[[bytes, Sequence[BlockRun], bool], Lookup]
"""Finds blocks of a run and queues those that lack: (fingerprint, run, prefix_only) -> what is there and pending."""


@dataclass(slots=True)
class _Prefix:
    """Of a run, `at` is the first block that is not known to be in the arena, or not to come."""

    run: BlockRun
    prefix_only: bool
    at: int = 0
    num_present: int = 0


class Prefetcher:
    """Follows prefetch hints. Belongs to the pool's event loop."""

    def __init__(self, look: Look):
        self._look = look
        self._by_tenant: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def prefetch(
        self, fingerprint: bytes, runs: Sequence[BlockRun], needs_prefix: Sequence[bool], tenant: str
    ) -> HintResult:
        """Begins to prefetch prefixes, and follows them to their ends; says how far they are.

        `needs_prefix` says of each run whether a block is of no use without those before it. Raises OutOfSpaceError if
        too many are followed already, and what the look raises.
        """
        total = self._by_tenant.total()
        if self._by_tenant[tenant] >= MAX_PREFETCHES - total:
            raise OutOfSpaceError(
                f"{total} prefetches are under way; the limit is {MAX_PREFETCHES}, and a tenant may have as many as "
                "are left; try again in a moment"
            )
        self._by_tenant[tenant] += 1
        prefixes = list(map(_Prefix, runs, needs_prefix))
        try:
            pending = [await self._advance(fingerprint, prefix) for prefix in prefixes]
        except BaseException:
            self._ended(tenant)
            raise
        left = [prefix for prefix, count in zip(prefixes, pending, strict=True) if count]
        if left:
            task = asyncio.create_task(self._follow(fingerprint, left, tenant))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._ended(tenant)
        return HintResult(sum(prefix.num_present for prefix in prefixes), num_pending=sum(pending))

    def close(self) -> None:
        """Follows no hint any more."""
        for task in self._tasks:
            task.cancel()

    async def _follow(self, fingerprint: bytes, prefixes: list[_Prefix], tenant: str) -> None:
        try:
            async with asyncio.timeout(MAX_FOLLOWED_S):
                while prefixes:
                    await asyncio.sleep(LOOK_EVERY_S)
                    while prefixes and not await self._advance(fingerprint, prefixes[0]):
                        del prefixes[0]
        except (TimeoutError, KVPoolError):
            pass  # What is queued still comes up; or the namespace was closed.
        finally:
            self._ended(tenant)

    async def _advance(self, fingerprint: bytes, prefix: _Prefix) -> int:
        """Queues the next blocks of a prefix that lack; returns how many are pending: 0 if no more will come."""
        run = prefix.run
        while prefix.at < len(run):
            hashes = run.block_hashes[prefix.at : prefix.at + LOOKUP_STEP_BLOCKS]
            parent = run.block_hashes[prefix.at - 1] if prefix.at else run.parent_hash
            (hit,) = self._look(fingerprint, [BlockRun(run.group_idx, hashes, parent)], prefix.prefix_only).hits
            await asyncio.sleep(0)  # Here, so that other calls come between any two looks, whatever they find.
            prefix.at += hit.num_leading
            prefix.num_present += hit.num_leading
            if hit.num_leading < len(hashes):
                if hit.num_pending:
                    return hit.num_pending
                if prefix.prefix_only:
                    return 0
                prefix.num_present += hit.complete.bit_count() - hit.num_leading
                prefix.at += len(hashes) - hit.num_leading
        return 0

    def _ended(self, tenant: str) -> None:
        self._by_tenant -= Counter({tenant: 1})  # Without the tenants that have none left.


def prefetch(
    promoters: Sequence[Promoter], found: Found, runs: Sequence[BlockRun], prefix_only: bool
) -> Steps[tuple[tuple[RunHits, ...], int]]:
    """Prefetches what a lookup misses from tiers, in their order.

    Returns the hits with what is pending, and when to look up again, milliseconds.
    """
    num_pending = pending_bytes = num_examined = 0
    hits = []
    for run, hit in zip(runs, found.hits, strict=True):
        group = found.namespace.groups[run.group_idx]
        slot_bytes = group.spec.slot_bytes
        most = min(MAX_PREFETCH_BLOCKS - num_pending, (MAX_PREFETCH_BYTES - pending_bytes) // slot_bytes)
        most = max(most, 0 if num_pending else 1)  # One block is prefetched, however large.
        missing = list(itertools.islice(_missing(run, hit, prefix_only), most))
        if (num_examined := num_examined + len(missing)) > LOOKUP_STEP_BLOCKS:
            num_examined = len(missing)
            yield
        behind: Sequence[bytes] = ()
        if prefix_only:
            searched = min(MAX_SEARCHED_BLOCKS, MAX_SEARCHED_BYTES // slot_bytes)
            behind = run.block_hashes[hit.num_leading + most : hit.num_leading + searched]
        pending = 0
        for promoter in promoters:
            if not missing:
                break
            count = promoter.prefetch(group, missing, behind, prefix_only)
            pending += count
            if prefix_only:
                missing = missing[count:]  # The first ones are pending; the next tier may hold those behind them.
            elif count:
                break
        num_pending += pending
        pending_bytes += pending * slot_bytes
        hits.append(replace(hit, num_pending=pending) if pending else hit)
    waits = [promoter.retry_after_ms for promoter in promoters if not promoter.is_idle]
    return tuple(hits), min(waits, default=MIN_RETRY_MS) if num_pending else 0  # All may be up since the last step.


def _missing(run: BlockRun, hit: RunHits, prefix_only: bool) -> Iterator[tuple[bytes, bytes]]:
    """The blocks of a run that a lookup has not found, each with its parent's hash."""
    flags = "" if prefix_only else f"{hit.complete:b}"[::-1]
    for nth in range(hit.num_leading, len(run)):
        if flags[nth : nth + 1] != "1":
            yield run.block_hashes[nth], run.block_hashes[nth - 1] if nth else run.parent_hash
