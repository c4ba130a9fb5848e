"""The simulation beside a pool: what it costs the loop, and what callers see of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import xxhash

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.types import BlockRun
from kvpool_server.replay.replay import make_pool, put
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.instruments import SAMPLED_POLICIES
from kvpool_server.value.live import (
    ACTIVE_S,
    CPU_SHARE,
    MAX_ARRIVED_COST,
    MAX_QUEUED_COST,
    MAX_SAVED_S,
    MIN_ENTRIES,
    RECOVER_S,
    LiveValue,
)
from kvpool_server.value.sample import Sampler
from tests.support.clock import FakeClock
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import namespace_spec, payload, run_of


class Bench:
    """A pool, a live simulation of it whose steps take a given CPU time, and the timer of its loop."""

    def __init__(self, step_s: float = 0.0001) -> None:
        self.clock, self.cpu, self.step_s = FakeClock(), 0.0, step_s
        self.due: list[object] = []
        self.pool, self.fingerprint = make_pool(256, "lru", self.clock)
        spec = self.pool.namespace(self.fingerprint).spec
        self.fingerprints = {"": self.fingerprint} | {
            tenant: self.pool.open_namespace(dataclasses.replace(spec, tenant=tenant))[0].fingerprint for tenant in "ab"
        }
        arena_bytes, sampler = self.pool.arena.arena_bytes, Sampler(xxhash.xxh3_64_intdigest)
        simulation = CurveSimulation(SAMPLED_POLICIES["lru"], arena_bytes, max_entries=1_024, sampler=sampler)
        self.live = LiveValue(
            simulation,
            lambda _, turn: self.due.append(turn),
            self.clock,
            self._cpu_clock,
            xxhash.xxh3_64_intdigest,
        )
        self.pool.observe_traffic(self.live)

    def _cpu_clock(self) -> float:
        self.cpu += self.step_s
        return self.cpu

    def look(self, name: object, length: int = 4, tenant: str = "") -> int:
        run = BlockRun(0, run_of(*((name, nth) for nth in range(length))).block_hashes)
        found = self.pool.lookup(self.fingerprints[tenant], [run], prefix_only=True, lease_ttl_ms=1_000)
        put(self.pool, self.fingerprints[tenant], run)
        self.pool.release([found.lease_id])
        return found.hits[0].num_leading

    def flood(self, tenant: str = "") -> None:
        """More lookups than the queue holds."""
        for nth in range(MAX_QUEUED_COST // 128 + 2):
            self.look(nth % 2, 128, tenant)

    def run(self, seconds: float) -> None:
        """Turns, as the event loop does them."""
        ends_at = self.clock() + seconds
        while self.clock() < ends_at:
            self.clock.advance(0.02)
            self.live.turn()


def test_calls_only_queue_and_turns_keep_to_their_share() -> None:
    bench = Bench(step_s=0.0005)
    for nth in range(200):
        bench.look(nth % 20)
    assert len(bench.due) == 1 and bench.live.cpu_s == 0
    for _ in range(100):
        bench.clock.advance(0.02)
        bench.live.turn()
    assert 0 < bench.live.cpu_s <= 2.0 * CPU_SHARE + MAX_SAVED_S + 0.001
    bench.live.finish()
    assert bench.live.is_idle


def test_the_curve_at_the_present_size_is_what_the_pool_counted() -> None:
    bench = Bench()
    hits = sum(bench.look(nth % 70) for nth in range(300))
    bench.live.finish()
    curve = bench.live.simulation.total_curve()
    assert curve.hit_tokens == hits * 512
    assert curve.estimates[2].hit_ratio == pytest.approx(curve.hit_ratio, abs=0.01)


def test_a_flood_of_all_tenants_is_left_out_and_halves_the_samples() -> None:
    bench = Bench()
    bench.flood("a")
    bench.flood("b")
    assert bench.live.num_left_out
    bench.clock.advance(10)
    bench.live.finish()
    assert MIN_ENTRIES <= bench.live.simulation.max_entries == 512


def test_a_flood_of_one_tenant_neither_coarsens_nor_delays_the_curve_of_another() -> None:
    bench = Bench()
    bench.look("of b", tenant="b")
    for _ in range(3):
        bench.flood("a")
        for nth in range(20):
            bench.look(nth, tenant="b")
        bench.run(6)
    simulation = bench.live.simulation
    assert bench.live.num_left_out and not bench.live.is_idle  # Of tenant a.
    assert simulation.curve_of("b").lookup_tokens == (1 + 3 * 20) * 4 * 512
    assert simulation.max_entries == 1_024


def test_a_tenant_that_left_long_ago_does_not_keep_the_samples_of_others_large() -> None:
    bench = Bench()
    bench.look("of b", tenant="b")
    bench.live.turn()
    bench.clock.advance(ACTIVE_S + 1)
    bench.flood("a")
    bench.live.finish()
    assert bench.live.simulation.max_entries == 512


def test_a_call_leaves_its_traffic_to_the_next_turn_unless_much_waits() -> None:
    bench = Bench()
    bench.look("short")
    assert not len(bench.live._queue) and not bench.live.is_idle
    bench.look("long", length=MAX_ARRIVED_COST)
    assert len(bench.live._queue) == 3  # A lookup and a put, and the long lookup; its put finds no room in the pool.
    bench.look("short again")
    bench.live.turn()
    assert bench.live.simulation.total_curve().lookup_tokens >= 4 * 512
    bench.live.finish()
    assert bench.live.is_idle
    assert bench.live.simulation.total_curve().lookup_tokens == (4 + MAX_ARRIVED_COST + 4) * 512


def test_samples_recover_after_a_flood() -> None:
    bench = Bench(step_s=0.00001)
    for _ in range(2):
        bench.flood()
        bench.clock.advance(10)
        bench.live.finish()
    assert bench.live.simulation.max_entries == 256
    rates = bench.live.simulation.rates
    for nth in range(8):
        bench.clock.advance(RECOVER_S / 2)
        bench.look(nth % 2, 128)
        bench.run(1)
    assert bench.live.simulation.max_entries == 1_024
    assert bench.live.simulation.rates[-1] == pytest.approx(4 * rates[-1])


def test_a_fault_of_the_simulation_does_not_reach_the_pool() -> None:
    bench = Bench()
    bench.live.simulation.lookup = None  # type: ignore[assignment, method-assign]
    assert bench.look("a") == 0
    bench.clock.advance(1)
    bench.live.turn()
    assert bench.live.num_left_out == 1


def test_a_server_serves_curves_metrics_and_none_after_a_restart(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--memory", "16MiB", "--value-sample", "640")
    try:
        with Client(ClientConfig(server.endpoint)) as client:
            assert not client.admin.value().curves[0].estimates
            namespace = client.open_namespace(namespace_spec(tenant="acme"))
            client.put_blocks(namespace, run_of("a", "b"), [payload(name, 256) for name in "ab"])
            for _ in range(3):
                client.release([client.lookup(namespace, [run_of("a", "b", "c")]).lease_id])
            wait_for(lambda: client.admin.value().curves[0].lookup_tokens == 9 * 16, "the lookups to be simulated")
            report = client.admin.value()
        assert report.enabled and report.arena_bytes == 16 << 20
        assert [curve.tenant for curve in report.curves] == ["", "acme"]
        assert [each.hit_ratio for each in report.curves[1].estimates] == pytest.approx([2 / 3] * 6)
    finally:
        server.stop()


def test_a_server_without_a_sample_says_so(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--memory", "16MiB")
    try:
        with Client(ClientConfig(server.endpoint)) as client:
            assert not client.admin.value().enabled
    finally:
        server.stop()
