"""Errors that nobody foresees, anywhere in the connector: vLLM's hooks raise nothing, every request is answered right,
and nothing is left behind.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults

from testbed.tiny_llama import write
from tests.simulation.schedules import make_schedule, play
from tests.support.effort import effort
from tests.support.quiet_engine import quiet_engine
from tests.support.saboteur import PLACES, Sabotage
from tests.support.toy.fixtures import TINY
from tests.support.vllm_objects import make_config
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.metadata import ConnectorMetadata
from vllm_plugin.metrics import MAX_KINDS, Guard, KVPoolPromMetrics, KVPoolStats, Recorder
from vllm_plugin.scheduler.scheduler import KVPoolScheduler

NUM_SCHEDULES = effort(40)
REFUSES_AT_START = {"__init__", "register_kv_caches"}
HAS_NO_CODE = {"requires_kv_delivery", "wait_for_layer_load", "save_kv_layer"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(write(tmp_path_factory.mktemp("models") / "tiny", TINY), "127.0.0.1:1")


@pytest.fixture
def quiet() -> Iterator[None]:
    with quiet_engine():
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm.kvpool")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


# The guard


def test_each_kind_of_error_is_logged_once_with_its_traceback_and_all_are_counted(log: Any) -> None:
    recorder = Recorder()
    for error in (IndexError("one"), IndexError("two"), KeyError("three")):
        with recorder.guard.part("a part") as part:
            raise error
        assert part.failed
    assert [record.exc_info[1].args for record in log.records] == [("one",), ("three",)]
    stats = recorder.take()
    assert stats is not None and stats.data == {"unexpected_errors": 3}
    with pytest.raises(KeyboardInterrupt), recorder.guard.part("a part"):
        raise KeyboardInterrupt
    for nth in range(MAX_KINDS + 10):  # An error that is new each time does not fill the log.
        with recorder.guard.part(f"part {nth}"):
            raise RuntimeError
    assert len(log.records) == MAX_KINDS


class Failing:
    """A side all of whose methods raise, but for those that end what a failed hook has begun."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.ended: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "stages":
            return self
        raise IndexError(name)

    def miss(self, request: Any) -> None:
        self.ended.append("miss")

    def fail_load(self, request: Any, num_external_tokens: int) -> None:
        self.ended.append(f"load of {num_external_tokens}")

    def bare_metadata(self, output: Any) -> ConnectorMetadata:
        return ConnectorMetadata()

    def turn_off(self) -> None:
        self.ended.append("off")


HOOKS: dict[str, tuple[tuple[Any, ...], Any, list[str]]] = {
    "bind_gpu_block_pool": ((None,), None, ["off"]),
    "set_xfer_handshake_metadata_pp_aware": (({},), None, ["off"]),
    "on_new_request": ((None,), None, []),
    "get_num_new_matched_tokens": ((None, 0), (0, False), ["miss"]),
    "update_state_after_alloc": ((None, None, 32), None, ["load of 32"]),
    "build_connector_meta": ((None,), ConnectorMetadata(), []),
    "update_connector_output": ((None,), None, []),
    "request_finished": ((None, []), (False, None), []),
    "request_finished_all_groups": ((None, ([],)), (False, None), []),
    "has_pending_block_frees": ((), False, []),
    "has_pending_push_work": ((), False, []),
    "reset_cache": ((), False, ["off"]),
    "take_events": ((), (), []),
    "get_kv_connector_stats": ((), None, []),
    "get_handshake_metadata": ((), None, []),
    "start_load_kv": ((None,), None, []),
    "wait_for_save": ((), None, []),
    "get_transfer_results": ((set(),), KVConnectorTransferResults(), []),
    "build_connector_worker_meta": ((), None, []),
    "shutdown": ((), None, []),
}
"""Hook -> arguments, what vLLM gets when the hook fails, and what is ended."""


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_fails_gives_vllm_what_leaves_it_right(name: str) -> None:
    arguments, expected, ended = HOOKS[name]
    side = Failing()
    connector: Any = object.__new__(KVPoolConnector)
    vars(connector).update(_scheduler=side, _worker=side, guard=side.guard, _connector_metadata=ConnectorMetadata())
    assert getattr(connector, name)(*arguments) == expected
    assert side.ended == ended


def test_every_hook_of_the_connector_is_guarded_and_in_the_table() -> None:
    hooks = {name for name, _ in inspect.getmembers(KVConnectorBase_V1) if not name.startswith("_")} | {"__init__"}
    own = {name for name in vars(KVPoolConnector) if name in hooks}
    assert len(own) > 20
    guarded = {name for name in vars(KVPoolConnector) if hasattr(getattr(KVPoolConnector, name), "__wrapped__")}
    assert own - guarded == REFUSES_AT_START | HAS_NO_CODE
    assert guarded == HOOKS.keys() | {"build_kv_connector_stats", "build_prom_metrics"}


def test_metrics_that_make_no_sense_end_no_api_server() -> None:
    stats = KVPoolStats({"lookup_seconds": [], "hit_tokens": 1})
    assert stats.reduce() == {}
    assert stats.aggregate(KVPoolStats({"hit_tokens": "many"})) is stats
    metrics = object.__new__(KVPoolPromMetrics)
    metrics.per_engine_labelvalues = {}
    metrics.observe({"hit_tokens": 1})
    assert KVPoolConnector.build_prom_metrics(SimpleNamespace(), {}, [], {}) is None  # type: ignore[arg-type]


# Engines


@pytest.mark.usefixtures("quiet")
@pytest.mark.timeout(3_600)
def test_whatever_raises_answers_are_right_and_nothing_is_left(config: Any) -> None:
    raised: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        sabotage = Sabotage.of(seed)
        try:
            play(make_schedule(seed), config, sabotage.apply, is_loud=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {sabotage}: {error!r}") from error
        raised += sabotage.raised
    assert len(raised) > sum(map(len, PLACES.values())) / 3 * min(1, NUM_SCHEDULES / 150), raised


WHOLE_HOOKS = {
    "matched_tokens": (False, True), "after_alloc": (False, True), "build_metadata": (False,), "reset": (False, True),
    "take_events": (False, True), "stats": (False, True), "has_pending_block_frees": (False, True),
}  # fmt: skip
"""Method of the scheduler's side -> whether it raises before its work or after it. Others are made of parts, of which
each may fail."""
RARE = {"has_pending_block_frees"}
"""vLLM calls it where blocks are lacking: few schedules come there."""


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("name", "is_late"),
    [
        pytest.param(name, late, marks=[pytest.mark.more] * (late is not lates[-1] or name in RARE))
        for name, lates in WHOLE_HOOKS.items()
        for late in lates
    ],
)
def test_a_hook_that_raises_now_and_then_leaves_nothing(name: str, is_late: bool, config: Any) -> None:
    raised = 0
    for seed in range(effort(100)):
        sabotage = Sabotage(((KVPoolScheduler, name),), RuntimeError, 0.3, is_late, seed)
        play(make_schedule(seed), config, sabotage.apply, is_loud=False)
        raised += sabotage.raised.total()
        if raised >= effort(1):
            break
    assert raised, "no schedule came here"
