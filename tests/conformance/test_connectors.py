"""Connectors through the suite: every scenario, every rule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.conformance.scenarios import SCENARIOS, run
from tests.conformance.subject import Subject, reference
from tests.support.faults import flip_arena, stopped
from tests.support.processes import ServerProcess
from tests.support.toy.fixtures import MakeConfig
from tests.support.toy.shapes import SHAPES

_numbers = itertools.count()
_PATIENT = {
    "lookup_timeout_ms": 5_000,
    "load_timeout_ms": 10_000,
    "store_timeout_ms": 10_000,
    "decline_slow_loads": False,
    "max_pinned_fraction": 1.0,  # On a busy machine stores are slow: what may not be pinned meanwhile is not stored.
}
EVERY_SCENARIO = pytest.mark.parametrize("scenario", SCENARIOS)


def kvpool(server: ServerProcess, **extra: Any) -> Subject:
    return Subject(
        "KVPoolConnector",
        "vllm_plugin.connector",
        {"endpoint": server.endpoint, "salt": f"conformance {next(_numbers)}", **_PATIENT, **extra},
        stall=lambda: stopped(server),
        spoil=lambda: flip_arena(server),
    )


def multi(*parts: Subject) -> Subject:
    """vLLM's `MultiConnector` around others: the first that has something loads it, all of them store."""
    children = [
        {
            "kv_connector": part.connector,
            "kv_connector_module_path": part.module or None,
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(part.extra),
        }
        for part in parts
    ]
    return Subject("MultiConnector", "", {"connectors": children}, stall=parts[0].stall, spoil=parts[0].spoil)


@EVERY_SCENARIO
def test_the_reference_connector(scenario: str, vllm_config: MakeConfig) -> None:
    assert run(scenario, reference(), vllm_config) == []


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@EVERY_SCENARIO
def test_kvpool(scenario: str, transport: str, vllm_config: MakeConfig, conformance_server: ServerProcess) -> None:
    assert run(scenario, kvpool(conformance_server, transport=transport), vllm_config) == []


@pytest.mark.parametrize("shape", ["gemma3", "qwen3-next"])
@EVERY_SCENARIO
def test_kvpool_with_several_groups(
    scenario: str, shape: str, vllm_config: MakeConfig, conformance_server: ServerProcess
) -> None:
    assert run(scenario, replace(kvpool(conformance_server), specs=SHAPES[shape]), vllm_config) == []


@EVERY_SCENARIO
def test_kvpool_beside_another_connector(
    scenario: str, vllm_config: MakeConfig, conformance_server: ServerProcess
) -> None:
    assert run(scenario, multi(kvpool(conformance_server), reference()), vllm_config) == []


@pytest.mark.parametrize("scenario", ["warm", "warm-ranks", "preemption", "abort-at-each-stage", "failed-loads"])
def test_kvpool_behind_another_connector(
    scenario: str, vllm_config: MakeConfig, conformance_server: ServerProcess
) -> None:
    assert run(scenario, multi(reference(), kvpool(conformance_server)), vllm_config) == []
