"""Feeds the histogram of `kvpool value` with the pool's traffic, within a share of one core.

Calls of clients only append to a bounded queue. The event loop counts what is queued, in steps of about a millisecond,
and rests after each turn until its share is `CPU_SHARE` again. Lookups and puts that find the queue full are left out,
and counted.

Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvpool.protocol.types import BlockRun, RunHits
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.lookups import count_tokens
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Steps
from kvpool_server.value.histogram import DistanceHistogram

log = structlog.get_logger()

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

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after some seconds, such as `asyncio.AbstractEventLoop.call_later`."""


class ValueFeed:
    """Counts a pool's traffic into a histogram, and reports what other arena sizes would hit.

    Args:
        policy: name of the pool's eviction policy.
        sample: most blocks in the sample; 0: nothing is counted, and reports say so.

    Attributes:
        num_left_out: lookups and puts that found the queue full, or whose counting failed.
        cpu_s: CPU time spent so far.
    """

    def __init__(
        self,
        pool: Pool,
        policy: str,
        sample: int,
        has_tiers: bool,
        later: Later,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ):
        self.num_left_out, self.cpu_s = 0, 0.0
        self.histogram = DistanceHistogram(pool.arena.arena_bytes, sample, has_tiers)
        self._settings: dict[str, Any] = {
            "enabled": sample > 0,
            "arena_bytes": pool.arena.arena_bytes,
            "policy": policy,
            "has_tiers": has_tiers,
        }
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
    def seconds(self) -> float:
        """How long the traffic took that was counted, faded as the counts are."""
        return self._seconds + self._clock() - self._faded_at

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
        if not self._settings["enabled"]:
            return pb.ValueResponse(**self._settings)
        curves = self.histogram.curves() if tenant is None else [self.histogram.curve_of(tenant)]
        return pb.ValueResponse(
            seconds=self.seconds,
            left_out=self.num_left_out,
            sampled_blocks=len(self.histogram.stack),
            cpu_seconds=self.cpu_s,
            curves=curves,
            **self._settings,
        )
