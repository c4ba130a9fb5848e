"""What the connector counts, and how it reaches vLLM's log and its /metrics (`vllm:kvpool_*`).

The guard stands between the connector and vLLM: an error that the connector did not foresee is logged and counted here,
costs a hit or a store, and never reaches vLLM. Every hook that vLLM calls passes through `hook`, and work inside a hook
that must not fail together through `Guard.part`.

To add a metric, give it a name with its unit last and a HELP text that can be read alone in a dashboard; then run
`python -m tests.support.metrics_page`, which writes the tables of docs/reference/metrics.md.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from kvpool.protocol.reports import Cause

logger = init_logger("vllm.kvpool.guard")

COUNTERS = {
    "lookups": "Lookups that the pool answered in time. A request that waits for a tier looks up twice, or more often.",
    "lookup_failures": "Lookups that failed or took too long; each is a miss.",
    "promotion_waits": "Requests that waited for blocks to be promoted from a tier of the pool.",
    "promotion_missed_tokens": "Tokens computed because their blocks were not promoted from a tier in time.",
    "hit_tokens": "Tokens found in the pool beyond the engine's own cache.",
    "loaded_blocks": "Blocks loaded from the pool, by all ranks together.",
    "loaded_bytes": "Bytes loaded from the pool, by all ranks together.",
    "load_failures": "Requests whose load failed on a rank and that were computed instead.",
    "stored_blocks": "Blocks stored in the pool, by all ranks together.",
    "stored_bytes": "Bytes stored in the pool, by all ranks together.",
    "store_skipped_blocks": "Blocks that a store found present in the pool.",
    "store_failures": "Store jobs that failed; their blocks are not in the pool.",
    "deferred_stores": "Times that a store waited because too many blocks were pinned.",
    "store_dropped_blocks": "Blocks not stored because the engine needed their memory before the pool had taken them.",
    "refused_hints": "Hints of requests (kv_transfer_params) with an unknown key or a bad value; the log names them.",
    "lost_hints": "Hints of requests that did not reach the pool: it was away, refused them, or too many waited.",
    "pinned_hint_blocks": "Blocks that the pool has pinned for requests' hints, each time that it was told of them.",
    "unpinned_hint_blocks": "Stored blocks that the pool did not pin for requests' hints: beyond the tenant's budget.",
    "declined_waits": "Times that a request was computed because too many others waited for lookups, room or a tier.",
    "declined_loads": "Hits that were computed because loading them would have taken longer.",
    "saved_seconds": "Estimated compute time of loaded hits minus their load time, where that is positive.",
    "lost_seconds": "Estimated load time of loaded hits minus their compute time, where that is positive.",
    "breaker_openings": "Times that the scheduler or a rank stopped using the pool because its calls failed.",
    "unexpected_errors": "Errors that the connector did not foresee; each costs a hit or a store, and never a request.",
    "connected_shm": "Times that the scheduler or a rank connected to the pool with transport shm.",
    "connected_tcp": "Times that the scheduler or a rank connected to the pool with transport tcp.",
    "connected_grpc": "Times that the scheduler or a rank connected to the pool with transport grpc, the slow one.",
    "connected_mooncake": "Times that the scheduler or a rank connected to the pool with transport mooncake.",
}
COMPUTED_TOKENS = (
    "Prompt tokens that the engine computed, by what kept them from being loaded; all causes together are vLLM's "
    "vllm:prompt_tokens_by_source with source local_compute."
)
"""HELP of the counter `computed_tokens`, whose label is the cause. `KVPoolStats` has a sum for each cause."""
GAUGES = {
    "namespaces_disagree": "1 if ranks and scheduler name different namespaces: the engine shares nothing.",
    "sharing_off": "1 while nothing is loaded or stored because blocks from before a reset, or in doubt, are in use.",
    "breaker_open": "1 if the scheduler or a rank did without the pool at the engine's last step, also at the start.",
}
HISTOGRAMS = {
    "lookup_seconds": "Time from sending one lookup to its answer, without lookups that wait for a tier.",
    "promotion_wait_seconds": "Time from a request's first answer with pending blocks to the end of its wait.",
    "load_seconds": "Time of one rank's load of one request.",
    "store_seconds": "Time of one rank's store job.",
}
_BUCKETS = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MAX_KINDS = 256
"""Kinds of unexpected errors that one guard logs."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Part:
    """A part of a hook, named `what` in the log, whose errors end the part alone."""

    _guard: Guard
    _what: str
    failed: bool = False

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        self._guard.failed(self._what, error)
        return True


class Guard:
    """Logs and counts the unexpected errors of one side of the connector. `count` is called for each. Thread-safe."""

    def __init__(self, count: Callable[[], None] = lambda: None):
        self._count = count
        self._lock = threading.Lock()
        self._said: set[tuple[str, type[BaseException]]] = set()

    def part(self, what: str) -> Part:
        """A part named `what`. A step may have hundreds of parts, and `contextlib.contextmanager` adds 5 us to each."""
        return Part(self, what)

    def failed(self, what: str, error: BaseException) -> None:
        """Counts an unexpected error, and logs the first of its kind."""
        self._count()
        kind = what, type(error)
        with self._lock:
            if kind in self._said or len(self._said) >= MAX_KINDS:
                return
            self._said.add(kind)
        logger.error(
            "kvpool: %s failed with an unexpected error, and the engine continues without it; further errors of this "
            "kind are only counted, in vllm:kvpool_unexpected_errors",
            what,
            exc_info=error,
        )


def hook(recover: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a method, whose object or class has a `guard`, a hook that raises no Exception.

    Once the method has failed, `recover` is called with the method's arguments. It leaves nothing of the hook's work
    half done, returns what vLLM gets instead, and must not raise.
    """

    def guarded_by(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                owner: Any = args[0]
                owner.guard.failed(method.__name__, error)
            recovered: R = recover(*args, **kwargs)
            return recovered

        return guarded

    return guarded_by


@dataclass
class KVPoolStats(KVConnectorStats):
    """One interval: `data` maps a counter to its sum, a gauge to its highest, a histogram to its values.

    The highest, since vLLM aggregates over ranks and over time with the same call.
    """

    guard = Guard()

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    @hook(lambda self, other: self)
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name not in self.data:
                self.data[name] = value
            elif name in GAUGES:
                self.data[name] = max(self.data[name], value)
            else:
                self.data[name] = self.data[name] + value
        return self

    @hook(lambda self: {})
    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if name in HISTOGRAMS:
                reduced[f"{name}_mean"] = round(sum(value) / len(value), 6)
            else:
                reduced[name] = round(value, 6)
        return reduced


CAUSE_PREFIX = "computed_tokens:"
TALLIES = frozenset({"loaded_tokens", "load_seconds", "num_requests"})
REPORTED = TALLIES | {"saved_seconds", "lost_seconds", *(f"{CAUSE_PREFIX}{cause.label}" for cause in Cause)}
"""Counters that are reported to the server, by their names in `ReportRequest`; `TALLIES` are reported there alone."""


class Recorder:
    """Counts for the connector's threads."""

    def __init__(self) -> None:
        self.guard = Guard(lambda: self.add("unexpected_errors"))
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}
        self._gauges: dict[str, int] = {}
        self._totals: dict[str, float] = {}

    def add(self, name: str, count: float = 1) -> None:
        """Counts one of `COUNTERS` or `REPORTED`."""
        assert name in COUNTERS or name in REPORTED, name
        if count:
            with self._lock:
                if name not in TALLIES:
                    self._data[name] = self._data.get(name, 0) + count
                if name in REPORTED:
                    self._totals[name] = self._totals.get(name, 0) + count

    def totals(self) -> dict[str, float]:
        """Sums of `REPORTED` since the start."""
        with self._lock:
            return dict(self._totals)

    def observe(self, name: str, seconds: float) -> None:
        assert name in HISTOGRAMS, name
        with self._lock:
            self._data.setdefault(name, []).append(seconds)

    def set(self, name: str, value: int) -> None:
        """Of a gauge. It is handed over again and again while it is not 0, and once when it is 0 again.

        Otherwise a rank that says 0 would speak for one that said 1 earlier and still means it.
        """
        assert name in GAUGES, name
        with self._lock:
            self._gauges[name] = value

    def take(self) -> KVPoolStats | None:
        with self._lock:
            data, self._data = {**self._data, **self._gauges}, {}
            self._gauges = {name: value for name, value in self._gauges.items() if value}
        return KVPoolStats(data) if data else None


class KVPoolPromMetrics(KVConnectorPromMetrics):
    """vLLM's Prometheus series of the connector."""

    guard = Guard()

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Any API server may be the one that hears of a step.
        kinds: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
            (self._counter_cls, COUNTERS, {}),
            (self._gauge_cls, GAUGES, {"multiprocess_mode": "mostrecent"}),
            (self._histogram_cls, HISTOGRAMS, {"buckets": _BUCKETS}),
        ]
        self.metrics = {
            name: cls(name=f"vllm:kvpool_{name}", documentation=gloss, labelnames=labelnames, **options)
            for cls, glosses, options in kinds
            for name, gloss in glosses.items()
        }
        self.computed_tokens = self._counter_cls(
            name="vllm:kvpool_computed_tokens", documentation=COMPUTED_TOKENS, labelnames=[*labelnames, "cause"]
        )
        for labels in per_engine_labelvalues.values():
            for metric in self.metrics.values():
                metric.labels(*labels)  # A series that starts at 0: a rate of what is absent is no rate.
            for cause in Cause:
                self.computed_tokens.labels(*labels, cause.label)

    @hook(lambda self, transfer_stats_data, engine_idx=0: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in (transfer_stats_data or {}).items():
            if name.startswith(CAUSE_PREFIX):
                self.computed_tokens.labels(*labels, name.removeprefix(CAUSE_PREFIX)).inc(value)
            elif name in COUNTERS:
                self.metrics[name].labels(*labels).inc(value)
            elif name in GAUGES:
                self.metrics[name].labels(*labels).set(value)
            elif name in HISTOGRAMS:
                for seconds in value:
                    self.metrics[name].labels(*labels).observe(seconds)
