"""The curve of a trace: replays it through the pool at one size, and simulates the other sizes beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from kvpool.types import BlockRun
from kvpool.value import ValueCurve
from kvpool_server.replay.replay import LEASE_MS, REQUESTS_PER_STEP, make_pool, put, run_of
from kvpool_server.replay.trace import Request
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

    now = cpu_s = 0.0
    pool, fingerprint = make_pool(capacity, policy, lambda: now)
    arena_bytes = pool.arena.arena_bytes
    simulation = CurveSimulation(
        SAMPLED_POLICIES[policy], arena_bytes, max_entries=max_entries, sampler=Sampler(hash_of)
    )
    live = LiveValue(simulation, lambda seconds, turn: None, lambda: now, hash_of=hash_of)
    pool.observe_traffic(live)
    for nth, request in enumerate(requests):
        if nth % REQUESTS_PER_STEP == 0:
            advance()
        if not request.ids:
            continue
        now = max(now, request.at_s)
        run = run_of(request)
        lease_id, num_stored = 0, len(request.stored)
        if not request.is_put:
            lease_id = pool.lookup(fingerprint, [run], prefix_only=True, lease_ttl_ms=LEASE_MS).lease_id
        if num_stored:
            put(pool, fingerprint, BlockRun(0, run.block_hashes[:num_stored], run.parent_hash))
        if lease_id:
            pool.release([lease_id])
        started = time.process_time()
        live.finish()
        cpu_s += time.process_time() - started
    return Simulated(simulation.curves()[0], cpu_s, simulation.num_entries)
