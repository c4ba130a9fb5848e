from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma

from kvpool.client.transport_choice import CANDIDATES
from kvpool.protocol.errors import ConfigError
from kvpool.protocol.reports import Cause
from testbed.ports import free_endpoint
from tests.support.processes import run_command
from tests.support.toy.fixtures import MakeConfig
from tests.support.vllm_objects import cache_config
from vllm_plugin import NAME, register
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metrics import COUNTERS, GAUGES, HISTOGRAMS, KVPoolPromMetrics, KVPoolStats, Recorder

MakeConnector = Callable[..., Any]


@pytest.fixture
def connector(vllm_config: MakeConfig) -> Iterator[MakeConnector]:
    """Makes scheduler-side connectors as vLLM does; they are shut down afterwards."""
    register()
    with ExitStack() as stack:

        def make(config: Any) -> Any:
            made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
            stack.callback(made.shutdown)
            return made

        yield make


# How vLLM finds it


def test_registering_twice_is_fine() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is KVPoolConnector


def test_the_module_path_leads_to_the_same_class(vllm_config: MakeConfig) -> None:
    transfer = vllm_config().kv_transfer_config
    transfer.kv_connector_module_path = "vllm_plugin.connector"
    assert KVConnectorFactory.get_connector_class(transfer) is KVPoolConnector


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "kvpool"]
    assert found.load() is register


def test_importing_the_entry_point_does_not_import_vllm() -> None:
    done = run_command(sys.executable, "-c", "import sys, vllm_plugin; assert 'vllm' not in sys.modules")
    assert done.returncode == 0, done.stderr


# What vLLM asks it


def test_it_serves_the_hybrid_allocator_and_is_no_delivery_service(
    connector: MakeConnector, vllm_config: MakeConfig
) -> None:
    made = connector(vllm_config(free_endpoint()))
    assert supports_hma(made)
    assert made.requires_kv_delivery is False
    assert made.has_pending_push_work() is False
    assert list(made.take_events()) == []


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("kv_transfer_config", "kv_load_failure_policy", "fail", "kv_load_failure_policy is 'fail'.*'recompute'"),
        ("kv_transfer_config", "kv_role", "kv_consumer", "'kv_consumer': this engine stores nothing in the pool"),
        ("kv_transfer_config", "kv_role", "kv_producer", "'kv_producer': this engine loads nothing from the pool"),
        ("cache_config", "enable_prefix_caching", False, "prefix caching is off"),
    ],
)
def test_a_setting_that_costs_hits_is_logged(
    section: str,
    name: str,
    value: Any,
    told: str,
    connector: MakeConnector,
    vllm_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "vllm.kvpool")
    config = vllm_config(free_endpoint())
    connector(config)
    assert not re.search(told, caplog.text)
    setattr(getattr(config, section), name, value)
    connector(config)
    assert re.search(told, caplog.text)


def test_a_wrong_setting_ends_the_start(connector: MakeConnector, vllm_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="did you mean 'transport'"):
        connector(vllm_config(free_endpoint(), extra={"transprt": "shm"}))


def test_a_refused_start_leaves_no_thread(connector: MakeConnector, vllm_config: MakeConfig) -> None:
    before = set(threading.enumerate())  # Some, of other tests, may end meanwhile.
    with pytest.raises(ConfigError):
        connector(vllm_config(free_endpoint(), prefix_caching_hash_algo="sha256"))
    assert not set(threading.enumerate()) - before


# Numbers


def test_stats_of_ranks_add_up_and_are_plain_values() -> None:
    stats = KVPoolStats()
    assert stats.is_empty()
    for _ in range(2):
        recorder = Recorder()
        recorder.add("loaded_blocks", 3)
        recorder.observe("load_seconds", 0.5)
        taken = recorder.take()
        assert taken is not None and recorder.take() is None
        stats.aggregate(taken)
    assert stats.data == {"loaded_blocks": 6, "load_seconds": [0.5, 0.5]}
    assert stats.reduce() == {"load_seconds_mean": 0.5, "loaded_blocks": 6}
    assert json.loads(json.dumps(stats.to_dict())) == stats.data
    stats.reset()
    assert stats.is_empty()


def test_a_gauge_is_as_high_as_on_the_worst_rank_and_falls_when_the_last_one_says_so() -> None:
    recorders = [Recorder() for _ in range(3)]

    def step() -> dict[str, Any]:
        """The ranks' numbers of one step, as vLLM aggregates them."""
        total = KVPoolStats()
        for taken in filter(None, [recorder.take() for recorder in recorders]):
            total.aggregate(taken)
        return total.data

    for recorder in recorders[:2]:
        recorder.set("breaker_open", 1)
    assert step() == {"breaker_open": 1}
    recorders[0].set("breaker_open", 0)
    assert step() == {"breaker_open": 1}, "the other still is"
    recorders[1].set("breaker_open", 0)
    assert step() == {"breaker_open": 0}
    assert step() == {}, "nothing is said of what has not changed"


@pytest.mark.parametrize("transport", sorted({name for tried in CANDIDATES.values() for name in tried}))
def test_every_transport_has_a_counter(transport: str) -> None:
    Recorder().add(f"connected_{transport}")  # As a session does on its thread, which an error would end.


def test_prometheus_gets_every_number_under_vllms_prefix(vllm_config: MakeConfig) -> None:
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    made = KVPoolConnector.build_prom_metrics(vllm_config(), types, ["engine"], {0: ["0"], 1: ["1"]})
    assert isinstance(made, KVPoolPromMetrics)
    made.observe({**dict.fromkeys(COUNTERS, 2), **{name: [0.01, 0.02] for name in HISTOGRAMS}}, engine_idx=1)
    made.observe(dict.fromkeys(GAUGES, 1), engine_idx=1)
    made.observe({}, engine_idx=0)
    try:
        for name in COUNTERS:
            assert REGISTRY.get_sample_value(f"vllm:kvpool_{name}_total", {"engine": "1"}) == 2
            assert REGISTRY.get_sample_value(f"vllm:kvpool_{name}_total", {"engine": "0"}) == 0
        for name in GAUGES:
            assert REGISTRY.get_sample_value(f"vllm:kvpool_{name}", {"engine": "1"}) == 1
            assert REGISTRY.get_sample_value(f"vllm:kvpool_{name}", {"engine": "0"}) == 0
            made.observe({name: 0}, engine_idx=1)
            assert REGISTRY.get_sample_value(f"vllm:kvpool_{name}", {"engine": "1"}) == 0
        series = "vllm:kvpool_computed_tokens_total"
        for cause in Cause:
            made.observe({f"computed_tokens:{cause.label}": 3}, engine_idx=1)
            assert REGISTRY.get_sample_value(series, {"engine": "1", "cause": cause.label}) == 3
            assert REGISTRY.get_sample_value(series, {"engine": "0", "cause": cause.label}) == 0
        for name in HISTOGRAMS:
            assert REGISTRY.get_sample_value(f"vllm:kvpool_{name}_count", {"engine": "1"}) == 2
    finally:
        for metric in (*made.metrics.values(), made.computed_tokens):
            REGISTRY.unregister(metric)
