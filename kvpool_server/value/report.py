"""What other arena sizes would hit, of a server: for `kvpool value`, the page, and autoscalers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.pool import Pool
from kvpool_server.value.feed import Later, ValueFeed
from kvpool_server.value.histogram import DistanceHistogram
from kvpool_server.value.recorder import Recorder


class PoolValue:
    """The histogram of a pool's traffic.

    Args:
        policy: name of the pool's eviction policy.
        sample: most blocks in the sample; 0: there is no histogram.
        later: as for `ValueFeed`.
    """

    def __init__(self, pool: Pool, policy: str, sample: int, has_tiers: bool, later: Later):
        self._arena_bytes = pool.arena.arena_bytes
        self._policy = policy
        self._has_tiers = has_tiers
        self._histogram = DistanceHistogram(self._arena_bytes, sample)
        self._feed = ValueFeed(self._histogram, later)
        self._is_enabled = sample > 0
        if self._is_enabled:
            pool.traffic.observe(self._feed)

    def report(self, tenant: str | None = None) -> pb.ValueResponse:
        """The curve of a tenant, which is all that this tenant may see; None: of all tenants together, then of each."""
        if not self._is_enabled:
            return pb.ValueResponse(arena_bytes=self._arena_bytes, policy=self._policy, has_tiers=self._has_tiers)
        if tenant is None:
            curves = self._histogram.curves(self._has_tiers)
        else:
            curves = [self._histogram.curve_of(tenant, self._has_tiers)]
        return pb.ValueResponse(
            enabled=True,
            arena_bytes=self._arena_bytes,
            policy=self._policy,
            seconds=self._feed.seconds,
            left_out=self._feed.num_left_out,
            sampled_blocks=len(self._histogram.stack),
            cpu_seconds=self._feed.cpu_s,
            has_tiers=self._has_tiers,
            curves=curves,
        )


class ValueCollector(Collector):
    """Exports the curve of all tenants for autoscalers; the thread of the scrape calls `report`."""

    def __init__(self, report: Callable[[], pb.ValueResponse], recorder: Recorder | None):
        self._report = report
        self._recorder = recorder

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        report = self._report()
        text = "Share of looked-up tokens that an arena of size times the present one would hit under LRU."
        memory = GaugeMetricFamily("kvpool_value_hit_ratio", text, labels=["size"])
        text = "Share of looked-up tokens that an arena of size times the present one or a tier would hit."
        tiers = GaugeMetricFamily("kvpool_value_with_tiers_hit_ratio", text, labels=["size"])
        for estimate in report.curves[0].estimates if report.curves else ():
            memory.add_metric([f"{estimate.size:g}"], estimate.hit_ratio)
            tiers.add_metric([f"{estimate.size:g}"], estimate.hit_ratio_with_tiers)
        yield memory
        yield tiers
        text = "CPU time spent on the histogram that estimates the hits of other arena sizes."
        yield CounterMetricFamily("kvpool_value_cpu_seconds", text, value=report.cpu_seconds)
        text = "Lookups and puts left out of the estimates of other arena sizes because too many came at once."
        yield CounterMetricFamily("kvpool_value_left_out", text, value=report.left_out)
        text = "Size of the file of --record; 0 without one."
        recorder = self._recorder
        yield GaugeMetricFamily("kvpool_recording_bytes", text, value=recorder.nbytes if recorder else 0)
        text = "Lookups and puts not recorded because the recorder's queue or its file was full."
        yield CounterMetricFamily("kvpool_recording_dropped", text, value=recorder.num_dropped if recorder else 0)
