"""Prometheus metrics of the server. docs/metrics.md glosses each one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.errors import KVPoolError
from kvpool.types import PoolStats
from kvpool.wire import status_of

_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 5e-1, 1.0, 5.0)

_GAUGES = {
    "arena_bytes": "Size of the arena.",
    "free_bytes": "Bytes of the arena in no entry's slot.",
    "prefaulted_bytes": "Bytes of the arena backed by memory so far.",
    "num_entries": "Complete (readable) blocks.",
    "num_incomplete": "Blocks that miss a shard.",
    "num_quarantined": "Slots that wait for late writers or readers.",
    "num_leases": "Live leases.",
    "num_tickets": "Live put tickets.",
}

_COUNTERS = {
    "lookups": "Lookup calls.",
    "lookup_blocks": "Blocks asked for by lookups.",
    "lookup_hits": "Blocks found complete by lookups.",
    "put_blocks_granted": "Blocks for which a put got a region.",
    "put_blocks_present": "Blocks that a put found present.",
    "put_blocks_busy": "Blocks that a put found being written by another.",
    "put_blocks_completed": "Blocks that became readable.",
    "get_blocks": "Blocks asked for by gets.",
    "get_blocks_present": "Blocks that gets found.",
    "evicted_blocks": "Blocks evicted to make room.",
    "quota_evicted_blocks": "Blocks evicted to keep quotas.",
    "removed_blocks": "Blocks removed or cleared by request.",
    "corrupt_blocks_dropped": "Blocks dropped because their bytes had changed.",
    "out_of_space": "Puts refused for lack of room.",
    "over_quota": "Puts refused because of a quota.",
    "leases_expired": "Leases that ended at their deadline.",
    "leases_refused": "Lookups that got no lease because too many were live.",
    "tickets_expired": "Put tickets that ended at their deadline.",
    "tickets_revoked": "Put tickets given back.",
    "kv_event_batches": "KV event messages published.",
    "kv_events": "KV events in them.",
    "kv_event_batches_dropped": "KV event messages left out because publishing was too far behind.",
    "kv_event_replays": "Replay requests of KV event subscribers.",
    "kv_event_snapshots": "Replay requests answered with a snapshot.",
}

_TIER_GAUGES = {
    "up": "1: it answers; 0: it has failed, and is left alone for a while.",
    "size_bytes": "What it may hold; 0: not for this server to say.",
    "used_bytes": "What it holds, as far as this server knows.",
    "num_entries": "Blocks that it holds, as far as this server knows.",
}

_TIER_COUNTERS = {
    "demoted_blocks": "Blocks written to it.",
    "dropped_demotions": "Blocks that were not, because it was too slow, or away.",
    "refused_blocks": "Blocks that it had no room for.",
    "promoted_blocks": "Blocks brought up from it.",
    "missed_promotions": "Blocks that were not there any more, or had changed, when they were to be brought up.",
    "dropped_promotions": "Blocks that were not brought up: nobody asked any more, or the arena had no room.",
    "corrupt_blocks": "Blocks in it that had changed, and were forgotten.",
    "evicted_blocks": "Blocks that it let go of to make room.",
    "read_bytes": "Bytes read from it and found right.",
    "written_bytes": "Bytes written to it.",
}


class PoolCollector(Collector):
    """Reads the pool's own counters when it is scraped, so that nothing is counted twice."""

    def __init__(self, stats: Callable[[], PoolStats]):
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        for name, gloss in _GAUGES.items():
            yield GaugeMetricFamily(f"kvpool_{name.removeprefix('num_')}", gloss, value=getattr(stats, name))
        for name, gloss in _COUNTERS.items():
            yield CounterMetricFamily(f"kvpool_{name}", gloss, value=stats.counters.get(name, 0))
        for name, gloss in _TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvpool_tier_{name.removeprefix('num_')}", gloss, labels=["tier"])
            for tier in stats.tiers:
                gauge.add_metric([tier.name], getattr(tier, name))
            yield gauge
        for name, gloss in _TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"kvpool_tier_{name}", gloss, labels=["tier"])
            for tier in stats.tiers:
                counter.add_metric([tier.name], tier.counters.get(name, 0))
            yield counter


class RpcMetrics:
    """Calls by method and status, and bytes that passed through the server.

    Args:
        data_bytes: what the data workers have moved so far, by direction.
    """

    def __init__(self, registry: CollectorRegistry, data_bytes: Callable[[], dict[str, int]] = dict):
        self._seconds = Histogram(
            "kvpool_rpc_seconds", "Time in the server, by method and status.", ["method", "status"],
            buckets=_BUCKETS, registry=registry,
        )  # fmt: skip
        self._bytes = {"read": 0, "write": 0}
        self._data_bytes = data_bytes
        registry.register(_Lazy(self._collect_bytes))

    @contextlib.contextmanager
    def timed(self, method: str, was_answered: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Observes the time that the body takes, with the status that the body's outcome has as an RPC.

        Args:
            was_answered: whether a call that was cancelled had been answered in full, and counts as OK.
        """
        started = time.perf_counter()
        status = "UNKNOWN"
        try:
            yield
            status = "OK"
        except KVPoolError as error:
            status = status_of(error).name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            status = "OK" if was_answered() else "CANCELLED"
            raise
        finally:
            self._seconds.labels(method, status).observe(time.perf_counter() - started)

    def add_bytes(self, direction: str, nbytes: int) -> None:
        self._bytes[direction] += nbytes

    def _collect_bytes(self) -> Iterator[CounterMetricFamily]:
        gloss = "Payload bytes through gRPC and the data port (shared-memory bytes never pass here)."
        family = CounterMetricFamily("kvpool_stream_bytes", gloss, labels=["direction"])
        through_workers = self._data_bytes()
        for direction, nbytes in self._bytes.items():
            family.add_metric([direction], nbytes + through_workers.get(direction, 0))
        yield family


class OwnMemory(Collector):
    """Memory of this process beside the arena.

    Not PSS: for that the kernel walks all pages of the arena, at each scrape. Not RSS: it has the arena in it.
    """

    def collect(self) -> Iterator[GaugeMetricFamily]:
        status = Path("/proc/self/status").read_text()
        (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        gloss = "Memory of the server process without the arena and without program files (RssAnon)."
        yield GaugeMetricFamily("kvpool_own_memory_bytes", gloss, value=int(kib) << 10)


class _Lazy(Collector):
    """A collector that is a function."""

    def __init__(self, collect: Callable[[], Iterator[CounterMetricFamily]]):
        self._collect = collect

    def collect(self) -> Iterator[CounterMetricFamily]:
        return self._collect()
