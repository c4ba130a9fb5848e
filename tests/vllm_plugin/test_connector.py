from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

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


def test_vllm_finds_one_class_by_its_entry_point_by_name_and_by_the_module_path(vllm_config: MakeConfig) -> None:
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "kvpool"]
    assert found.load() is register
    for _ in range(2):
        register()
    transfer = vllm_config().kv_transfer_config
    transfer.kv_connector_module_path = "vllm_plugin.connector"
    assert KVConnectorFactory.get_connector_class(transfer) is KVPoolConnector
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is KVPoolConnector


def test_importing_the_entry_point_does_not_import_vllm() -> None:
    done = run_command(sys.executable, "-c", "import sys, vllm_plugin; assert 'vllm' not in sys.modules")
    assert done.returncode == 0, done.stderr


# What vLLM asks it


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


@pytest.mark.parametrize("options", [{"extra": {"transprt": "shm"}}, {"prefix_caching_hash_algo": "sha256"}], ids=str)
def test_a_wrong_setting_ends_the_start_and_leaves_no_thread(
    options: dict[str, Any], connector: MakeConnector, vllm_config: MakeConfig
) -> None:
    before = set(threading.enumerate())  # Some, of other tests, may end meanwhile.
    with pytest.raises(ConfigError, match=r"did you mean 'transport'|prefix_caching_hash_algo"):
        connector(vllm_config(free_endpoint(), **options))
    assert not set(threading.enumerate()) - before


# Numbers


def test_stats_of_ranks_add_up_and_a_gauge_is_as_high_as_on_the_worst_rank() -> None:
    recorders = [Recorder() for _ in range(3)]

    def step() -> KVPoolStats:
        """The ranks' numbers of one step, as vLLM aggregates them."""
        total = KVPoolStats()
        for taken in filter(None, [recorder.take() for recorder in recorders]):
            total.aggregate(taken)
        return total

    assert step().is_empty()
    for recorder in recorders[:2]:
        recorder.add("loaded_blocks", 3)
        recorder.observe("load_seconds", 0.5)
        recorder.set("breaker_open", 1)
    stats = step()
    assert stats.data == {"loaded_blocks": 6, "load_seconds": [0.5, 0.5], "breaker_open": 1}
    assert stats.reduce() == {"load_seconds_mean": 0.5, "loaded_blocks": 6, "breaker_open": 1}
    assert json.loads(json.dumps(stats.to_dict())) == stats.data
    stats.reset()
    assert stats.is_empty()
    recorders[0].set("breaker_open", 0)
    assert step().data == {"breaker_open": 1}, "the other still is"
    recorders[1].set("breaker_open", 0)
    assert step().data == {"breaker_open": 0}
    assert step().is_empty(), "nothing is said of what has not changed"


@pytest.mark.parametrize("transport", sorted({name for tried in CANDIDATES.values() for name in tried}))
def test_every_transport_has_a_counter(transport: str) -> None:
    Recorder().add(f"connected_{transport}")  # As a session does on its thread, which an error would end.


def test_prometheus_gets_every_number_under_vllms_prefix(vllm_config: MakeConfig) -> None:
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    made = KVPoolConnector.build_prom_metrics(vllm_config(), types, ["engine"], {0: ["0"], 1: ["1"]})
    assert isinstance(made, KVPoolPromMetrics)
    causes = {f"computed_tokens:{cause.label}": 3 for cause in Cause}
    made.observe({**dict.fromkeys(COUNTERS, 2), **{name: [0.01, 0.02] for name in HISTOGRAMS}, **causes}, engine_idx=1)
    made.observe(dict.fromkeys(GAUGES, 1), engine_idx=1)
    made.observe({}, engine_idx=0)

    def values(name: str, **labels: str) -> list[float | None]:
        return [REGISTRY.get_sample_value(f"vllm:kvpool_{name}", {"engine": nth, **labels}) for nth in "01"]

    try:
        for name in COUNTERS:
            assert values(f"{name}_total") == [0, 2]
        for cause in Cause:
            assert values("computed_tokens_total", cause=cause.label) == [0, 3]
        for name in HISTOGRAMS:
            assert values(f"{name}_count") == [0, 2]
        assert [values(name) for name in GAUGES] == [[0, 1]] * len(GAUGES)
        made.observe(dict.fromkeys(GAUGES, 0), engine_idx=1)
        assert [values(name) for name in GAUGES] == [[0, 0]] * len(GAUGES)
    finally:
        for metric in (*made.metrics.values(), made.computed_tokens):
            REGISTRY.unregister(metric)
