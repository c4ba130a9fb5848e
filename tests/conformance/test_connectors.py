"""Connectors through the suite; and each rule catches the connector that breaks it, under its name."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.conformance import scenarios
from tests.conformance.broken import BROKEN, SLOW_S
from tests.conformance.contract import RULES
from tests.conformance.scenarios import REACHED, SCENARIOS, run
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
STUCK_RULES = {"every-request-ends", "an-idle-engine-has-no-pending-push-work"}


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
    violations, reached = run(scenario, reference(), vllm_config)
    assert violations == []
    assert all(reached[what] for what in REACHED[scenario]), reached


@pytest.mark.parametrize(("transport", "shape"), [("shm", ""), ("tcp", "gemma3"), ("shm", "qwen3-next")])
@EVERY_SCENARIO
def test_kvpool(
    scenario: str, transport: str, shape: str, vllm_config: MakeConfig, conformance_server: ServerProcess
) -> None:
    subject = replace(kvpool(conformance_server, transport=transport), specs=SHAPES[shape] if shape else ())
    assert run(scenario, subject, vllm_config)[0] == []


@EVERY_SCENARIO
def test_kvpool_beside_another_connector(
    scenario: str, vllm_config: MakeConfig, conformance_server: ServerProcess
) -> None:
    assert run(scenario, multi(kvpool(conformance_server), reference()), vllm_config)[0] == []


@pytest.mark.parametrize("scenario", ["warm", "warm-ranks", "preemption", "abort-at-each-stage", "failed-loads"])
def test_kvpool_behind_another_connector(
    scenario: str, vllm_config: MakeConfig, conformance_server: ServerProcess
) -> None:
    assert run(scenario, multi(reference(), kvpool(conformance_server)), vllm_config)[0] == []


def test_every_rule_has_a_connector_that_breaks_it() -> None:
    assert BROKEN.keys() == RULES


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_connector_is_caught(rule: str, vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "THREADS_END_WITHIN_S", 0.1)
    broken = BROKEN[rule]
    one = reference(broken.connector, "tests.conformance.broken")
    if STUCK_RULES & ({rule} | broken.also):
        one = replace(one, drain_limit_s=0.5)
    if rule == "hooks-do-not-block":
        one = replace(one, hook_limit_s=SLOW_S / 2)
    violations, _ = run(broken.scenario, one, vllm_config)
    names = {violation.rule for violation in violations}
    assert rule in names
    assert names <= {rule} | broken.also, violations


_IMPORTS = """
import os, sys, threading, torch
import vllm.distributed.kv_transfer.kv_connector.v1.base
import vllm.v1.core.sched.scheduler

def seen():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # The listing's own.
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        processes = len(children.read().split())
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sockets": sum(link.startswith("socket:") for link in links),
        "child processes": processes,
        "CUDA": torch.cuda.is_initialized(),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
    }

for module in sys.argv[1:]:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            print(f"FOUND {module} cannot be imported")
        continue
    before = seen()
    __import__(module)
    for name, value in seen().items():
        if value != before[name]:
            print(f"FOUND {module} {name}")
    sys.stdout.flush()
    os._exit(0)
"""


def test_imports_have_no_side_effects() -> None:
    """A connector's module is imported in every process, before and after forks; here each one in a fork of its own."""
    modules = ["vllm_plugin.connector", "tests.conformance.reference", "tests.conformance.broken_import"]
    command = [sys.executable, "-c", _IMPORTS, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = {line for line in done.stdout.splitlines() if line.startswith("FOUND ")}
    assert found == {f"FOUND tests.conformance.broken_import {what}" for what in ("threads", "sockets")}
