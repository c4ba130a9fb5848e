"""What a server runs to say what its memory is worth: the live simulation, and the recorder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.types import TierStats
from kvpool.value import ValueCurve, ValueReport
from kvpool_server.cache.eviction import POLICIES, Policy
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Steps, finish
from kvpool_server.value.curve import CurveSimulation
from kvpool_server.value.live import LiveValue
from kvpool_server.value.recorder import Recorder
from kvpool_server.value.sampled_density import SampledHitDensity

SAMPLED_POLICIES: Mapping[str, Callable[[], Policy]] = {**POLICIES, "density": SampledHitDensity}
"""By the name of `--policy`: what simulates the policy on a sample of blocks."""


class ValueInstruments:
    """Both, as far as the settings want them.

    Args:
        policy: the name of the policy in use.
        sample: blocks that are sampled for each size; 0: none, and no curve.
        recorder: None: nothing is recorded.
    """

    def __init__(self, pool: Pool, policy: str, sample: int, tiers: Sequence[TierStats], recorder: Recorder | None):
        self.recorder = recorder
        self._policy = policy
        self._has_tiers = bool(tiers)
        self._arena_bytes = pool.arena.arena_bytes
        self._live: LiveValue | None = None
        if sample:
            unbounded = any(not tier.size_bytes for tier in tiers)
            tier_bytes = None if unbounded else sum(tier.size_bytes for tier in tiers)
            simulation = CurveSimulation(SAMPLED_POLICIES[policy], self._arena_bytes, tier_bytes, sample)
            self._live = LiveValue(simulation, asyncio.get_running_loop().call_later)
            pool.observe_traffic(self._live)
        if recorder is not None:
            pool.observe_traffic(recorder)

    def report(self, tenant: str | None = None) -> ValueReport:
        """What a caller of a tenant may see; None: all."""
        if tenant is None or self._live is None:
            return finish(self.report_of_all())
        return self._report([self._live.simulation.curve_of(tenant)])

    def report_of_all(self) -> Steps[ValueReport]:
        """The curves of all tenants, in steps: they take some milliseconds."""
        if self._live is None:
            return self._report([])
        return self._report((yield from self._live.simulation.curves()))

    def total(self) -> ValueReport:
        """The curve of all tenants together."""
        return self._report([] if self._live is None else [self._live.simulation.total_curve()])

    def _report(self, curves: Sequence[ValueCurve]) -> ValueReport:
        if self._live is None:
            return ValueReport(False, self._arena_bytes, self._policy, has_tiers=self._has_tiers)
        return self._live.report(curves, self._has_tiers, self._policy)


class ValueCollector(Collector):
    """Exports the curve of all tenants for autoscalers; the thread of the scrape calls `report`."""

    def __init__(self, report: Callable[[], ValueReport], recorder: Recorder | None):
        self._report = report
        self._recorder = recorder

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        report = self._report()
        memory = GaugeMetricFamily(
            "kvpool_value_hit_ratio",
            "Share of looked-up tokens that an arena of size times the present one would hit, by simulation.",
            labels=["size"],
        )
        tiers = GaugeMetricFamily(
            "kvpool_value_with_tiers_hit_ratio",
            "Share of looked-up tokens that an arena of size times the present one or a tier would hit, by simulation.",
            labels=["size"],
        )
        error = GaugeMetricFamily(
            "kvpool_value_error_ratio",
            "Distance between simulated and counted hit ratio at the present arena size: how good the simulation is.",
        )
        for curve in report.curves[:1]:
            for estimate in curve.estimates:
                memory.add_metric([f"{estimate.size:g}"], estimate.hit_ratio)
                tiers.add_metric([f"{estimate.size:g}"], estimate.hit_ratio_with_tiers)
            if curve.estimates:
                error.add_metric([], abs(curve.simulated_hit_ratio - curve.hit_ratio))
        yield memory
        yield tiers
        yield error
        text = "CPU time that the simulation of other arena sizes took."
        yield CounterMetricFamily("kvpool_value_cpu_seconds", text, value=report.cpu_seconds)
        text = "Lookups and puts left out of the simulation of other arena sizes because too many came at once."
        yield CounterMetricFamily("kvpool_value_left_out", text, value=report.left_out)
        text = "Size of the file of --record; 0 without one."
        recorder = self._recorder
        yield GaugeMetricFamily("kvpool_recording_bytes", text, value=recorder.nbytes if recorder else 0)
        text = "Lookups and puts not recorded because the recorder's queue or its file was full."
        yield CounterMetricFamily("kvpool_recording_dropped", text, value=recorder.num_dropped if recorder else 0)
