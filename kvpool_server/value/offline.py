"""The curve of a trace: replays it through the pool at one size, and simulates the other sizes beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from kvpool.value import ValueCurve
from kvpool_server.replay.replay import REQUESTS_PER_STEP, ReplayedPool
from kvpool_server.replay.request import Request
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.instruments import SAMPLED_POLICIES
from kvpool_server.value.live import LiveValue
from kvpool_server.value.sample import Sampler


@dataclass(frozen=True, slots=True)
class Simulated:
    """The curve of a trace, and what it took.

    Args:
        cpu_s: CPU time of the simulation, without the replay of the pool.
        num_entries: sampled blocks in all sizes at the end.
    """

    curve: ValueCurve
    cpu_s: float
    num_entries: int


def simulate(
    requests: Sequence[Request],
    capacity: int,
    policy: str,
    max_entries: int,
    seed: int = 0,
    advance: Callable[[], object] = lambda: None,
) -> Simulated:
    """The hit ratios around a pool of `capacity` blocks. Calls `advance` once for each `REQUESTS_PER_STEP` requests.

    Args:
        max_entries: sampled blocks a size.
        seed: chooses the sample.
    """

    def hash_of(block_hash: bytes) -> int:
        return xxhash.xxh3_64_intdigest(block_hash, seed)

    replayed, cpu_s = ReplayedPool(capacity, policy), 0.0
    arena_bytes = replayed.pool.arena.arena_bytes
    simulation = CurveSimulation(
        SAMPLED_POLICIES[policy], arena_bytes, max_entries=max_entries, sampler=Sampler(hash_of)
    )
    live = LiveValue(simulation, lambda seconds, turn: None, lambda: replayed.now_s, hash_of=hash_of)
    replayed.pool.observe_traffic(live)
    for nth, request in enumerate(requests):
        if nth % REQUESTS_PER_STEP == 0:
            advance()
        replayed.play(request)
        started = time.process_time()
        live.finish()
        cpu_s += time.process_time() - started
    return Simulated(simulation.total_curve(), cpu_s, simulation.num_entries)
