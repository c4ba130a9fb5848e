"""The feed of the histogram: what it costs the loop, and what callers see of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool_server.cache.steps import Steps
from kvpool_server.value.feed import CPU_SHARE, FADE_EVERY_S, HALF_LIFE_S, MAX_QUEUED_BLOCKS, ValueFeed
from tests.conftest import StartServer
from tests.support.bare_pool import SLOT_BYTES, make_pool, put
from tests.support.clock import FakeClock
from tests.support.processes import wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

BLOCK_TOKENS = 16


class Bench:
    """A pool with a feed whose steps take a given CPU time, and the timer of its loop."""

    def __init__(self, step_s: float = 0.0001) -> None:
        self.clock, self.cpu, self.step_s = FakeClock(), 0.0, step_s
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.pool, self.fingerprint = make_pool(2_048, "lru", self.clock)
        clocks = self.clock, self._cpu_clock
        self.feed = ValueFeed(self.pool, "lru", 8_192, False, self._later, *clocks)
        self.histogram = self.feed.histogram

    def _later(self, seconds: float, turn: Callable[[], None]) -> None:
        self.due.append((self.clock() + seconds, turn))

    def _cpu_clock(self) -> float:
        self.cpu += self.step_s
        return self.cpu

    def look(self, name: object, length: int = 4) -> int:
        run = run_of(*((name, nth) for nth in range(length)))
        found = self.pool.lookup(self.fingerprint, [run], prefix_only=True, lease_ttl_ms=1_000)
        put(self.pool, self.fingerprint, run)
        self.pool.release([found.lease_id])
        return found.hits[0].num_leading

    def run(self, seconds: float) -> None:
        """Turns, as the event loop does them."""
        ends_at = self.clock() + seconds
        while self.clock() < ends_at:
            self.clock.advance(0.02)
            due = [turn for at, turn in self.due if at <= self.clock()]
            self.due = [(at, turn) for at, turn in self.due if at > self.clock()]
            for turn in due:
                turn()

    @property
    def lookup_tokens(self) -> float:
        return self.histogram.curves()[0].lookup_tokens


def test_calls_only_queue_and_turns_keep_to_their_share() -> None:
    bench = Bench(step_s=0.0005)
    for nth in range(200):
        bench.look(nth % 20)
    assert len(bench.due) == 1 and bench.feed.cpu_s == 0 and bench.lookup_tokens == 0
    bench.run(2.0)
    assert 0 < bench.feed.cpu_s <= 2.0 * CPU_SHARE + 0.002 and not bench.feed.is_idle
    bench.run(50.0)
    assert bench.feed.is_idle and bench.lookup_tokens == 200 * 4 * BLOCK_TOKENS


def test_the_curve_of_lru_at_the_present_size_is_what_an_lru_pool_counted() -> None:
    bench = Bench(step_s=1e-7)
    hits = 0
    for nth in range(3_000):
        hits += bench.look(nth * nth % 1_021 % 700)
        bench.clock.advance(0.02)
        bench.feed.turn()
    curve = bench.histogram.curves()[0]
    assert curve.hit_tokens == pytest.approx(hits * BLOCK_TOKENS, rel=0.01)
    assert 0.1 < curve.hit_tokens / curve.lookup_tokens < 0.9
    assert curve.estimates[2].hit_ratio == pytest.approx(curve.hit_tokens / curve.lookup_tokens, abs=0.005)


def test_a_token_counts_once_and_is_hit_where_the_namespace_counts_a_hit() -> None:
    """The first group has a sliding window, of which engines store the end, and a second pipeline stage asks, too."""
    bench = Bench(step_s=1e-7)
    window = group_spec(chunk_bytes=SLOT_BYTES, kind="sliding_window", window_tokens=2 * BLOCK_TOKENS)
    groups, names = (window, group_spec(chunk_bytes=SLOT_BYTES)), range(8)
    stages = [
        bench.pool.open_namespace(namespace_spec(*groups, num_pipeline_stages=2, pipeline_stage=stage))[0]
        for stage in (0, 1)
    ]
    for namespace in stages:
        put(bench.pool, namespace.fingerprint, run_of(*names[-2:]))
        put(bench.pool, namespace.fingerprint, run_of(*names, group_idx=1))
        runs = [run_of(*names, "new", "newer", group_idx=idx) for idx in (0, 1)]
        bench.pool.lookup(namespace.fingerprint, runs, prefix_only=False, lease_ttl_ms=1_000)
    bench.run(1.0)
    curve = bench.histogram.curves()[0]
    assert (curve.lookup_tokens, curve.hit_tokens) == (stages[0].lookup_tokens, stages[0].hit_tokens) == (160, 128)
    assert [each.hit_ratio for each in curve.estimates] == pytest.approx([0.8] * 6)


def test_what_finds_the_queue_full_is_left_out() -> None:
    bench = Bench(step_s=1e-7)
    for _ in range(2 * MAX_QUEUED_BLOCKS // 1_024):
        bench.look("long", 1_024)
    assert bench.feed.num_left_out > 0
    assert bench.feed._queued_blocks <= MAX_QUEUED_BLOCKS
    bench.run(1.0)
    assert bench.feed.is_idle and bench.feed._queued_blocks == 0
    bench.look("another")
    bench.run(1.0)
    assert bench.histogram.stack.segment_of, "what comes later is counted"


def test_a_call_of_more_blocks_than_the_queue_holds_is_counted_alone() -> None:
    bench = Bench(step_s=1e-7)
    run = run_of(*range(MAX_QUEUED_BLOCKS + 1))
    namespace = bench.pool.namespace(bench.fingerprint)
    assert namespace is not None
    bench.feed.observe(namespace, [run], None)
    bench.feed.observe(namespace, [run], None)
    assert bench.feed.num_left_out == 1 and not bench.feed.is_idle


def test_a_fault_of_the_histogram_does_not_reach_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_: object) -> Steps[None]:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.histogram, "lookup", broken)
    assert bench.look("a") == 0
    bench.clock.advance(1)
    bench.feed.turn()
    assert bench.feed.num_left_out == 1


def test_counts_fade_with_time() -> None:
    bench = Bench(step_s=1e-7)
    bench.look("a")
    bench.run(1.0)
    before = bench.lookup_tokens
    bench.clock.advance(HALF_LIFE_S - 1.02)
    bench.feed.turn()
    assert bench.lookup_tokens == pytest.approx(before / 2, rel=0.01)
    assert bench.feed.seconds == pytest.approx(HALF_LIFE_S / 2, rel=0.01)
    bench.clock.advance(FADE_EVERY_S / 2)
    assert bench.feed.seconds == pytest.approx(HALF_LIFE_S / 2 + FADE_EVERY_S / 2, rel=0.01)


def test_a_server_has_curves_without_being_asked_to(pool_server: StartServer) -> None:
    server = pool_server("--memory", "16MiB")
    with Client(ClientConfig(server.endpoint)) as client:
        assert not client.admin.value().curves[0].estimates
        namespace = client.open_namespace(namespace_spec(tenant="acme"))
        client.put_blocks(namespace, run_of("a", "b"), [payload(name, 256) for name in "ab"])
        for _ in range(3):
            client.release([client.lookup(namespace, [run_of("a", "b", "c")]).lease_id])
        wait_for(lambda: client.admin.value().curves[0].lookup_tokens == 9 * 16, "the lookups to be counted")
        report = client.admin.value()
    assert report.enabled and report.arena_bytes == 16 << 20
    assert [curve.tenant for curve in report.curves] == ["", "acme"]
    assert [each.hit_ratio for each in report.curves[1].estimates] == pytest.approx([2 / 3] * 6)
