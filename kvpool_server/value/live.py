"""Feeds the miniatures from the pool's traffic, within a share of one core.

Calls of clients only append to a list. The event loop moves what has arrived into a queue that is fair to tenants, and
simulates what is queued, in steps of a few milliseconds at most, when a bucket of CPU seconds that fills at `CPU_SHARE`
allows it. If the queue is full, what the tenant with most in it sent last is left out and counted (`fair_queue`).

The size of the samples follows the load. It is halved if all tenants lose lookups, so that one tenant alone cannot make
the curves of others coarser. It is doubled again, up to what was asked for, where half of the CPU share is left over.

Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from kvpool.types import BlockRun, RunHits
from kvpool.value import ValueCurve, ValueReport
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.steps import Steps
from kvpool_server.cache.traffic import TrafficObserver
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.fair_queue import FairQueue
from kvpool_server.value.sample import KEYS, HashOf

log = structlog.get_logger()

CPU_SHARE = 0.02
"""Of one core, for the simulation."""
MAX_SAVED_S = 0.02
"""CPU seconds that the bucket holds at most."""
TURN_S = 0.001
"""How long the steps of one turn may last; the loop runs what else is ready between two turns."""
TURN_EVERY_S = 0.02
MAX_QUEUED_COST = 98_304
"""In blocks. Bounds the memory of the queue, and how far the curve lags behind."""
MAX_ARRIVED_COST = 8_192
"""In blocks, of calls that are not in the queue yet: less than a millisecond moves them there."""
CALL_COST = 32
"""What a lookup or put of no blocks would cost, in blocks."""
HALF_LIFE_S = 3_600.0
"""After so long, what was counted weighs half: the curve is that of about the last hours."""
FADE_EVERY_S = 60.0
MIN_ENTRIES = 256
"""Sampled blocks a size, below which samples are not halved."""
HALVE_EVERY_S = 5.0
"""A queue that is full again so soon after samples were halved is one of before."""
ACTIVE_S = 600.0
"""Tenants that have sent something within so long have a say in whether samples are halved."""
RECOVER_S = 120.0
"""Samples are doubled once in so long, if they have been halved and may be doubled."""
_PUT = -1

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after some seconds, such as `asyncio.AbstractEventLoop.call_later`."""


class _Event(NamedTuple):
    namespace: PoolNamespace
    run: BlockRun
    num_hits: int  # _PUT: a put.
    counts: bool


class LiveValue(TrafficObserver):
    """See the module.

    Attributes:
        simulation: the curves.
        num_left_out: lookups and puts that were not simulated because the queue was full.
        cpu_s: CPU time spent so far.
    """

    def __init__(
        self,
        simulation: CurveSimulation,
        later: Later,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        hash_of: HashOf = hash,
    ):
        self.simulation = simulation
        self.num_left_out = 0
        self.cpu_s = 0.0
        self._later = later
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._hash_of = hash_of
        self._arrived: list[tuple[PoolNamespace, Sequence[BlockRun], Sequence[RunHits] | None]] = []  # None: a put.
        self._arrived_cost = 0
        self._queue: FairQueue[_Event] = FairQueue(MAX_QUEUED_COST)
        self._steps: Steps[None] | None = None
        self._is_scheduled = False
        self._filled_at = self._faded_at = self._checked_at = clock()
        self._cpu_s_at_check, self._left_out_at_check = 0.0, 0
        self._saved_s = MAX_SAVED_S
        self._seconds = 0.0  # Of the traffic that was counted, faded as it is.

    @property
    def seconds(self) -> float:
        """How long the traffic took that was counted, faded as the counts are."""
        return self._seconds + self._clock() - self._faded_at

    @property
    def is_idle(self) -> bool:
        return self._steps is None and not self._arrived and not self._queue

    def report(self, curves: Sequence[ValueCurve], has_tiers: bool, policy: str) -> ValueReport:
        """Some of the simulation's curves, and what the simulation took."""
        simulation = self.simulation
        return ValueReport(
            enabled=True,
            arena_bytes=simulation.arena_bytes,
            policy=policy,
            seconds=self.seconds,
            left_out=self.num_left_out,
            sampled_blocks=simulation.num_entries,
            cpu_seconds=self.cpu_s,
            has_tiers=has_tiers,
            curves=curves,
        )

    def looked_up(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> None:
        self._arrive(namespace, runs, hits)

    def put(self, namespace: PoolNamespace, runs: Sequence[BlockRun]) -> None:
        self._arrive(namespace, runs, None)

    def _arrive(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits] | None) -> None:
        self._arrived.append((namespace, runs, hits))
        for run in runs:
            self._arrived_cost += CALL_COST + len(run.block_hashes)
        if self._arrived_cost > MAX_ARRIVED_COST:
            self._enqueue_arrived()
        if not self._is_scheduled:
            self._is_scheduled = True
            self._later(TURN_EVERY_S, self.turn)

    def _enqueue_arrived(self) -> None:
        now = self._clock()
        arrived, self._arrived, self._arrived_cost = self._arrived, [], 0
        for namespace, runs, hits in arrived:
            tenant = namespace.spec.tenant
            for nth, run in enumerate(runs):
                num_hits = _PUT if hits is None else hits[nth].num_leading
                event = _Event(namespace, run, num_hits, counts=nth == 0)
                self.num_left_out += self._queue.push(tenant, event, CALL_COST + len(run), now)

    def turn(self) -> None:
        """Simulates for `TURN_S` at most, or one step, if CPU time is left for it."""
        self._is_scheduled = False
        now = self._clock()
        self._saved_s = min(MAX_SAVED_S, self._saved_s + CPU_SHARE * (now - self._filled_at))
        self._filled_at = now
        if now - self._faded_at >= FADE_EVERY_S:
            self._fade(now)
        started = self._cpu_clock()
        ends_at, spent = started + min(TURN_S, self._saved_s), 0.0
        try:
            self._enqueue_arrived()
            while started + spent < ends_at and self._step(now):
                before, spent = spent, self._cpu_clock() - started
                self._queue.charge(spent - before)
        except Exception:
            # An instrument must not end the server's loop; the event that failed is left out.
            log.exception("simulating other arena sizes failed; the lookup is left out of the curves")
            self._steps = None
            self.num_left_out += 1
        self._saved_s -= spent
        self.cpu_s += spent
        if not self.is_idle:
            self._is_scheduled = True
            self._later(TURN_EVERY_S, self.turn)

    def finish(self) -> None:
        """Simulates all that has arrived, however long it takes."""
        self._enqueue_arrived()
        while self._step(self._clock()):
            pass

    def _step(self, now: float) -> bool:
        """One step of the simulation; False if nothing is queued."""
        if self._steps is None:
            self._steps = self._resize(now)
        if self._steps is None:
            event = self._queue.pop()
            if event is None:
                return False
            self._steps = self._simulate(event)
        if next(self._steps, _ENDED) is _ENDED:
            self._steps = None
        return True

    def _resize(self, now: float) -> Steps[None] | None:
        """Halves or doubles the samples if it is time to."""
        elapsed = now - self._checked_at
        if elapsed < HALVE_EVERY_S:
            return None
        is_lossy = self.num_left_out > self._left_out_at_check
        if is_lossy and self._queue.have_all_lost(self._checked_at, now - ACTIVE_S):
            if self.simulation.max_entries <= MIN_ENTRIES:
                return None
            self._check(now)
            return self.simulation.halve_rates()
        if elapsed < RECOVER_S:
            return None
        # Some tenants lose lookups, and others do not: these need not suffer, though no CPU time is left.
        is_cheap = self.cpu_s - self._cpu_s_at_check <= CPU_SHARE / 2 * elapsed
        self._check(now)
        return self.simulation.double_rates() if is_cheap or is_lossy else None

    def _check(self, now: float) -> None:
        self._checked_at, self._cpu_s_at_check, self._left_out_at_check = now, self.cpu_s, self.num_left_out

    def _simulate(self, event: _Event) -> Steps[None]:
        namespace, run = event.namespace, event.run
        group = namespace.spec.groups[run.group_idx]
        salt = self._hash_of(namespace.fingerprint + run.group_idx.to_bytes(4, "little")) % KEYS
        if event.num_hits == _PUT:
            yield from self.simulation.put(salt, run.parent_hash, run.block_hashes, group.slot_bytes)
        else:
            yield from self.simulation.lookup(
                namespace.spec.tenant, salt, run.parent_hash, run.block_hashes, event.num_hits,
                group.slot_bytes, group.block_tokens, event.counts,
            )  # fmt: skip

    def _fade(self, now: float) -> None:
        keep = 0.5 ** ((now - self._faded_at) / HALF_LIFE_S)
        self.simulation.fade(keep)
        self._seconds = keep * (self._seconds + now - self._faded_at)
        self._faded_at = now


_ENDED = object()
