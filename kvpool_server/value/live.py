"""Feeds the miniatures from the pool's traffic, within a share of one core.

Calls of clients only append to a queue. The event loop simulates what is queued, in steps of about a millisecond or
less, when a bucket of CPU seconds that fills at `CPU_SHARE` allows it. If the queue is full, what comes is left out and
counted, and all samples are halved (`CurveSimulation.halve_rates`): so the simulation soon follows all traffic again.

Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from kvpool.types import BlockRun, RunHits
from kvpool.value import ValueReport
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.steps import Steps
from kvpool_server.cache.traffic import TrafficObserver
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.sample import KEYS, HashOf

log = structlog.get_logger()

CPU_SHARE = 0.02
"""Of one core, for the simulation."""
MAX_SAVED_S = 0.02
"""CPU seconds that the bucket holds at most."""
TURN_S = 0.001
"""How long the steps of one turn may last; the loop runs what else is ready between two turns."""
TURN_EVERY_S = 0.02
MAX_QUEUED_BLOCKS = 65_536
HALF_LIFE_S = 3_600.0
"""After so long, what was counted weighs half: the curve is that of about the last hours."""
FADE_EVERY_S = 60.0
MIN_ENTRIES = 256
"""Sampled blocks a size, below which samples are not halved."""
HALVE_EVERY_S = 5.0
"""A queue that is full again so soon after samples were halved is one of before."""
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
        self._queue: deque[_Event] = deque()
        self._num_queued = 0
        self._steps: Steps[None] | None = None
        self._is_scheduled = False
        self._halve = False
        self._started = self._filled_at = self._faded_at = self._halved_at = clock()
        self._saved_s = MAX_SAVED_S
        self._seconds = 0.0  # Of the traffic that was counted, faded as it is.

    @property
    def seconds(self) -> float:
        """How long the traffic took that was counted, faded as the counts are."""
        return self._seconds + self._clock() - self._faded_at

    @property
    def is_idle(self) -> bool:
        return self._steps is None and not self._queue

    def report(self, tenant: str | None, has_tiers: bool, policy: str) -> ValueReport:
        """The curves that a caller of a tenant may see; None: all."""
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
            curves=simulation.curves() if tenant is None else [simulation.curve_of(tenant)],
        )

    def looked_up(self, namespace: PoolNamespace, runs: Sequence[BlockRun], hits: Sequence[RunHits]) -> None:
        counts = True
        for run, hit in zip(runs, hits, strict=True):
            self._enqueue(_Event(namespace, run, hit.num_leading, counts))
            counts = False

    def put(self, namespace: PoolNamespace, runs: Sequence[BlockRun]) -> None:
        for run in runs:
            self._enqueue(_Event(namespace, run, _PUT, False))

    def _enqueue(self, event: _Event) -> None:
        if self._num_queued + len(event.run) > MAX_QUEUED_BLOCKS:
            self.num_left_out += 1
            self._halve = True
            return
        self._num_queued += len(event.run)
        self._queue.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._later(TURN_EVERY_S, self.turn)

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
            while started + spent < ends_at and self._step(now):
                spent = self._cpu_clock() - started
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
        """Simulates all that is queued, however long it takes."""
        while self._step(self._clock()):
            pass

    def _step(self, now: float) -> bool:
        """One step of the simulation; False if nothing is queued."""
        if self._steps is None:
            if self._halve and now - self._halved_at >= HALVE_EVERY_S and self.simulation.max_entries > MIN_ENTRIES:
                self._halved_at = now
                self._steps = self.simulation.halve_rates()
            elif self._queue:
                event = self._queue.popleft()
                self._num_queued -= len(event.run)
                self._steps = self._simulate(event)
            else:
                return False
            self._halve = False
        if next(self._steps, _ENDED) is _ENDED:
            self._steps = None
        return True

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
