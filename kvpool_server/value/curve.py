"""The curve of `kvpool value`: what other arena sizes would hit, from LRU stack distances of looked-up blocks.

The stack distance of a block is the number of bytes that were used since its last use, its own included: a cache of
that size under LRU holds the block. Distances are told apart only at the sizes of `SIZES`, so the stack is
one LRU list for each interval between two sizes, and a block that is used moves one block across each boundary.

- **Sample.** A block is sampled if the last bits of its hash are zero: a share `rate` of all blocks is sampled. The
  stack has sampled blocks alone, at sizes scaled by `rate`. If they are more than `max_blocks`, `rate` is halved.
- **Prefixes.** A block is a hit only if all blocks before it are hits: its distance is the largest in its prefix. The
  blocks of a run are used from the last to the first, so that LRU evicts the end of a prefix before its start.
- **Storage.** A block enters the stack when it is put, or when the pool has it. A lookup that misses stores nothing.
- **Cost.** Calls of clients only append to a bounded queue. The event loop counts what is queued, in steps of about a
  millisecond, and rests after each turn until its share of one core is `CPU_SHARE` again. Lookups and puts that find
  the queue full are left out, and counted.

Source: C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, Efficient MRC Construction with SHARDS, FAST 2015. As in its
SHARDS_adj, the difference between the expected and the actual number of sampled references counts as references of the
smallest distance, because blocks that are referenced very often make most of the difference.

Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol.types import BlockRun, RunHits
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.lookups import count_tokens
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Steps

log = structlog.get_logger()

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Arena sizes that hits are estimated for, as multiples of the present one."""
STEP_SAMPLED_BLOCKS = 256
"""Sampled blocks that one step looks up or uses: less than 1 ms."""
MAX_TENANTS = 32
"""Tenants with a curve of their own, those seen first; the rest share one."""
REST = "other"
"""Name of the curve of all tenants beyond `MAX_TENANTS`. Operators alone see it: a tenant may have that name, too."""
CPU_SHARE = 0.01
"""Of one core, for the histogram."""
TURN_S = 0.001
"""How long the steps of one turn may last; the loop runs what else is ready between two turns."""
TURN_EVERY_S = 0.02
MAX_QUEUED_BLOCKS = 131_072
"""Bounds the memory of the queue, and how far the curve lags behind."""
CALL_BLOCKS = 32
"""What a run costs beside its blocks, in blocks."""
HALF_LIFE_S = 3_600.0
"""Counts weigh half after this time: the curve is that of about the last hours."""
FADE_EVERY_S = 60.0

Counts = npt.NDArray[np.float64]
"""References of one tenant, in tokens: all, those that the pool has hit, those that the sampled ones stand for, and of
the sampled ones those with a distance in each segment: float64 [3 + sizes]."""


def _no_counts() -> Counts:
    return np.zeros(3 + len(SIZES))


class SampledStack:
    """LRU stack of sampled blocks, in segments: segment n has the blocks whose distance is within limit n, not n - 1.

    Args:
        limits: sizes in bytes, ascending. Blocks beyond the last one leave the stack.
        max_blocks: bound of the sample.
    """

    def __init__(self, limits: Sequence[float], max_blocks: int):
        self.mask = 0  # Bits of a hash that are zero if the block is sampled.
        self._limits = limits
        self._max_blocks = max_blocks
        self._segments: list[OrderedDict[int, int]] = [OrderedDict() for _ in limits]  # Bytes by hash, oldest first.
        self._used_bytes = [0 for _ in limits]
        self.segment_of: dict[int, int] = {}  # Of each block of the stack.

    def __len__(self) -> int:
        return len(self.segment_of)

    @property
    def rate(self) -> float:
        return 1 / (self.mask + 1)

    def use(self, blocks: Iterable[int], nbytes: int) -> None:
        """Makes blocks of `nbytes` each the most recently used ones, the last one most recently of all."""
        newest, segment_of = self._segments[0], self.segment_of
        for block in blocks:
            if block & self.mask:
                continue  # The rate was halved after the caller had chosen its sample.
            segment = segment_of.get(block)
            if segment is not None:
                self._used_bytes[segment] -= self._segments[segment].pop(block)
            newest[block] = nbytes
            self._used_bytes[0] += nbytes
            segment_of[block] = 0
        self._settle()
        while len(segment_of) > self._max_blocks:
            self._halve_rate()

    def _settle(self) -> None:
        """Moves the least recently used blocks of each segment that is too full to the next one."""
        used_bytes, within, rate = self._used_bytes, 0, self.rate
        for nth, segment in enumerate(self._segments):
            within += used_bytes[nth]
            limit = self._limits[nth] * rate
            while within > limit:
                block, nbytes = segment.popitem(last=False)
                within -= nbytes
                used_bytes[nth] -= nbytes
                if nth + 1 < len(self._segments):
                    self._segments[nth + 1][block] = nbytes
                    used_bytes[nth + 1] += nbytes
                    self.segment_of[block] = nth + 1
                else:
                    del self.segment_of[block]

    def _halve_rate(self) -> None:
        self.mask = 2 * self.mask + 1
        for nth, segment in enumerate(self._segments):
            for block in [block for block in segment if block & self.mask]:
                self._used_bytes[nth] -= segment.pop(block)
                del self.segment_of[block]
        self._settle()


class DistanceHistogram:
    """Stack distances in one arena's traffic, by tenant.

    Args:
        has_tiers: whether tiers keep what the arena evicts.
        hash_of: hash of a block's name, whose bits are uniform. Clients must not be able to predict it: Python's own
            hash has a secret seed, and the pool's index has already computed it.
    """

    def __init__(self, arena_bytes: int, max_blocks: int, has_tiers: bool, hash_of: Callable[[bytes], int] = hash):
        self.stack = SampledStack([size * arena_bytes for size in SIZES], max_blocks)
        self._has_tiers = has_tiers
        self._hash_of = hash_of
        self._counts: dict[str, Counts] = {}
        self._rest = _no_counts()

    def lookup(
        self, tenant: str, salt: bytes, hashes: Sequence[bytes], leading: int, block_bytes: int, tokens: tuple[int, int]
    ) -> Steps[None]:
        """Counts a lookup of a run, of which the pool has hit the first `leading` blocks.

        Args:
            salt: names the namespace and group of the blocks.
            tokens: that the lookup asked for, and found; 0 for its further runs, whose blocks hold the same tokens.
        """
        stack = self.stack
        sampled = yield from self._sample(salt, hashes)
        (asked, found), farthest, num_found = tokens, 0, 0
        weight = asked / len(hashes) / stack.rate
        hits_of = [0.0 for _ in SIZES]
        for _, block in sampled:
            segment = stack.segment_of.get(block)
            if segment is None:
                break
            farthest = max(farthest, segment)
            hits_of[farthest] += weight
            num_found += 1
            if num_found % STEP_SAMPLED_BLOCKS == 0:
                yield
        if asked:
            counts = self._counts_of(tenant)
            counts += [asked, found, weight * len(sampled), *hits_of]
        num_used = num_found + sum(position < leading for position, _ in sampled[num_found:])
        yield from self._use(sampled[:num_used], block_bytes)

    def put(self, salt: bytes, hashes: Sequence[bytes], block_bytes: int) -> Steps[None]:
        """Stores a run, whether or not the pool had its blocks."""
        yield from self._use((yield from self._sample(salt, hashes)), block_bytes)

    def _sample(self, salt: bytes, hashes: Sequence[bytes]) -> Steps[list[tuple[int, int]]]:
        """Position and hash of the sampled blocks of a run."""
        hash_of, mask, salted = self._hash_of, self.stack.mask, self._hash_of(salt)
        wanted = salted & mask
        sampled: list[tuple[int, int]] = []
        for start in range(0, len(hashes), LOOKUP_STEP_BLOCKS):
            if start:
                yield
            sampled += [
                (position, hash_of(name) ^ salted)
                for position, name in enumerate(hashes[start : start + LOOKUP_STEP_BLOCKS], start)
                if hash_of(name) & mask == wanted
            ]
        return sampled

    def _use(self, sampled: Sequence[tuple[int, int]], block_bytes: int) -> Steps[None]:
        blocks = [block for _, block in reversed(sampled)]
        for start in range(0, len(blocks), STEP_SAMPLED_BLOCKS):
            if start:
                yield
            self.stack.use(blocks[start : start + STEP_SAMPLED_BLOCKS], block_bytes)

    def _counts_of(self, tenant: str) -> Counts:
        if tenant not in self._counts and len(self._counts) >= MAX_TENANTS:
            return self._rest
        return self._counts.setdefault(tenant, _no_counts())

    def fade(self, keep: float) -> None:
        """Multiplies every counter by `keep` (exponential decay)."""
        for counts in (*self._counts.values(), self._rest):
            counts *= keep

    def curves(self) -> list[pb.ValueCurve]:
        """The curve of all tenants together, then that of each tenant by name, then `REST` if there is any."""
        named = sorted(self._counts.items()) + ([(REST, self._rest)] if self._rest[0] else [])
        total = sum((counts for _, counts in named), _no_counts())
        curves = [self._curve(counts, tenant=tenant) for tenant, counts in named]
        return [self._curve(total, tenant="", is_total=True), *curves]

    def curve_of(self, tenant: str) -> pb.ValueCurve:
        """The curve of one tenant; without estimates if the tenant has none of its own."""
        return self._curve(self._counts.get(tenant, _no_counts()), tenant=tenant)

    def _curve(self, counts: Counts, **names: Any) -> pb.ValueCurve:
        """The share of looked-up tokens that LRU would hit at each of `SIZES`.

        With tiers, what the pool hits now is a hit at each size.
        """
        looked_up, hit, sampled, *hits_of = counts.tolist()
        if not looked_up:
            return pb.ValueCurve(**names)
        hits = itertools.accumulate(hits_of, initial=looked_up - sampled)
        ratios = [min(max(each / looked_up, 0.0), 1.0) for each in hits][1:]
        below = hit / looked_up if self._has_tiers else 0.0
        return pb.ValueCurve(
            lookup_tokens=looked_up,
            hit_tokens=hit,
            estimates=[
                pb.ValueEstimate(size=size, hit_ratio=ratio, hit_ratio_with_tiers=max(ratio, below))
                for size, ratio in zip(SIZES, ratios, strict=True)
            ],
            **names,
        )


class ValueFeed:
    """Counts a pool's traffic into a histogram, and reports what other arena sizes would hit.

    Args:
        sample: most blocks in the sample; 0: nothing is counted, and reports say so.
        later: calls a function after some seconds, as `asyncio.AbstractEventLoop.call_later`.

    Attributes:
        num_left_out: lookups and puts that found the queue full, or whose counting failed.
    """

    def __init__(
        self,
        pool: Pool,
        policy: str,
        sample: int,
        has_tiers: bool,
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ):
        self.num_left_out, self.cpu_s = 0, 0.0
        self.histogram = DistanceHistogram(pool.arena.arena_bytes, sample, has_tiers)
        self._settings = pb.ValueResponse(
            enabled=sample > 0, arena_bytes=pool.arena.arena_bytes, policy=policy, has_tiers=has_tiers
        )
        self._later = later
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._queue: deque[tuple[PoolNamespace, Sequence[BlockRun], Sequence[RunHits] | None, int]] = deque()
        self._queued_blocks = 0
        self._steps: Steps[None] | None = None
        self._is_scheduled = False
        self._rests_until = self._faded_at = clock()
        self._seconds = 0.0  # Of the traffic that was counted until `_faded_at`, faded as the counts are.
        if sample:
            pool.traffic.append(self.observe)

    @property
    def is_idle(self) -> bool:
        return self._steps is None and not self._queue

    def observe(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits] | None) -> None:
        """Queues a lookup or put, as a `TrafficObserver`."""
        cost = sum(map(len, runs)) + CALL_BLOCKS * len(runs)
        if self._queue and self._queued_blocks + cost > MAX_QUEUED_BLOCKS:
            self.num_left_out += 1
            return
        self._queue.append((namespace, runs, hits, cost))
        self._queued_blocks += cost
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._later(max(TURN_EVERY_S, self._rests_until - self._clock()), self.turn)

    def turn(self) -> None:
        """Counts for `TURN_S`, and to the end of the step."""
        self._is_scheduled = False
        now = self._clock()
        if now - self._faded_at >= FADE_EVERY_S:
            self._fade(now)
        started, spent = self._cpu_clock(), 0.0
        try:
            while spent < TURN_S and self._step():
                spent = self._cpu_clock() - started
        except Exception:
            # An instrument must not end the server's loop; the call that failed is left out.
            log.exception("counting a lookup or put for `kvpool value` failed; the call is left out")
            self._steps = None
            self.num_left_out += 1
        self._rests_until = now + spent / CPU_SHARE
        self.cpu_s += spent
        if not self.is_idle:
            self._schedule()

    def _step(self) -> bool:
        """One step of counting; False if nothing is queued."""
        if self._steps is None:
            if not self._queue:
                return False
            namespace, runs, hits, cost = self._queue.popleft()
            self._queued_blocks -= cost
            self._steps = self._count(namespace, runs, hits)
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
        return True

    def _count(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits] | None) -> Steps[None]:
        groups = namespace.spec.groups
        # Groups with windows or states store few blocks of a prompt: a miss in their runs does not end the hit.
        counted = next((nth for nth, run in enumerate(runs) if groups[run.group_idx].needs_prefix), 0)
        for nth, run in enumerate(runs):
            group = groups[run.group_idx]
            salt = namespace.fingerprint + run.group_idx.to_bytes(4, "little")
            if hits is None:
                yield from self.histogram.put(salt, run.block_hashes, group.slot_bytes)
            else:
                tokens = count_tokens(namespace, runs, hits) if nth == counted else (0, 0)
                yield from self.histogram.lookup(
                    namespace.spec.tenant, salt, run.block_hashes, hits[nth].num_leading, group.slot_bytes, tokens
                )

    def _fade(self, now: float) -> None:
        keep = 0.5 ** ((now - self._faded_at) / HALF_LIFE_S)
        self.histogram.fade(keep)
        self._seconds = keep * (self._seconds + now - self._faded_at)
        self._faded_at = now

    def report(self, tenant: str | None = None) -> pb.ValueResponse:
        """The curve of a tenant, which is all that this tenant may see; None: of all tenants together, then of each."""
        report = pb.ValueResponse()
        report.CopyFrom(self._settings)
        if report.enabled:
            report.seconds, report.cpu_seconds = self._seconds + self._clock() - self._faded_at, self.cpu_s
            report.left_out, report.sampled_blocks = self.num_left_out, len(self.histogram.stack)
            report.curves.extend(self.histogram.curves() if tenant is None else [self.histogram.curve_of(tenant)])
        return report
