"""Connectors through the suite: every scenario, every rule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
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

# vLLM's own example connector says of itself that it is for debugging. What it does wrong, by scenario:
_LOADS_ANOTHER_KEY = {"no-hook-raises", "engine-survives"}
_NEGATIVE_MATCH = {"match-is-well-formed"}
EXAMPLE_DEVIATIONS: dict[str, set[str]] = {
    # Its files are not named by rank: the last rank's part is what all of them load.
    "warm-ranks": {"loads-bring-the-right-bytes"},
    # It stores the first chunk under the name of the whole prompt, and the shape is another one when it is loaded.
    "chunked-prefill": {"no-hook-raises", "engine-survives"},
    "small-cache": {"no-hook-raises", "engine-survives"},
    # A request that comes back is loaded by the tokens it has by then, which nobody has stored; and when the engine's
    # own hit is longer than the stored prefix, the match is negative.
    "preemption": _LOADS_ANOTHER_KEY | _NEGATIVE_MATCH,
    "preemption-ahead": _LOADS_ANOTHER_KEY | _NEGATIVE_MATCH,
    "stalled-storage": _LOADS_ANOTHER_KEY | _NEGATIVE_MATCH,
    "reset-of-own-cache": _LOADS_ANOTHER_KEY,
}
# It fills blocks with invented values, to measure decoding: wherever something is loaded, the bytes are not right.
BENCH_DEVIATION = {"loads-bring-the-right-bytes"}


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


@EVERY_SCENARIO
def test_the_example_connector_deviates_where_it_is_known_to(
    scenario: str, vllm_config: MakeConfig, tmp_path: Path
) -> None:
    subject = Subject("ExampleConnector", "", {"shared_storage_path": str(tmp_path)}, grouped=False)
    found = {violation.rule for violation in run(scenario, subject, vllm_config)}
    assert found == EXAMPLE_DEVIATIONS.get(scenario, set())


@pytest.mark.parametrize("scenario", ["warm", "chunked-prefill", "preemption-ahead", "abort-at-each-stage"])
def test_the_decode_bench_connector_deviates_where_it_is_meant_to(scenario: str, vllm_config: MakeConfig) -> None:
    found = {violation.rule for violation in run(scenario, Subject("DecodeBenchConnector", ""), vllm_config)}
    assert found == BENCH_DEVIATION
