"""The proxy stands for the connector in everything that vLLM asks of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.conformance.recorder import SCHEDULER, Recorder, Recording
from tests.conformance.reference import ReferenceConnector
from tests.support.toy.fixtures import MakeConfig
from tests.support.vllm_objects import cache_config


@pytest.fixture
def config(vllm_config: MakeConfig) -> VllmConfig:
    return vllm_config()


def _wrapped(connector: type[KVConnectorBase_V1], config: VllmConfig) -> tuple[Any, Recording]:
    config.kv_transfer_config.kv_connector_extra_config = {}
    recording = Recording()
    inner = connector(config, KVConnectorRole.SCHEDULER, cache_config())
    return Recorder(recording).wrap(inner, SCHEDULER), recording


def test_every_hook_of_the_interface_is_forwarded(config: VllmConfig) -> None:
    proxy, _ = _wrapped(ReferenceConnector, config)
    hooks = [name for name, _ in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction) if name[0] != "_"]
    assert len(hooks) > 30
    assert set(hooks) <= type(proxy).__dict__.keys()


def test_what_the_connector_says_of_itself_is_kept(config: VllmConfig) -> None:
    proxy, _ = _wrapped(ReferenceConnector, config)
    assert proxy.requires_kv_delivery is False and proxy.role is KVConnectorRole.SCHEDULER
    assert supports_hma(proxy) and not supports_hma(_wrapped(ExampleConnector, config)[0])
    assert proxy.block_tokens == 16


def test_answers_and_errors_are_written_down(config: VllmConfig) -> None:
    proxy, recording = _wrapped(ReferenceConnector, config)
    assert proxy.has_pending_push_work() is False
    with pytest.raises(AttributeError):
        proxy.update_connector_output(None)
    first, second = recording.calls()
    assert (first.hook, first.answer, first.error) == ("has_pending_push_work", False, None)
    assert second.hook == "update_connector_output" and str(second.error).startswith("AttributeError")
