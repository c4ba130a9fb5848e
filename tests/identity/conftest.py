"""The base engine of the oracle, once for all its tests; engines are forked (`testbed.fork_server`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.identity.oracle import Observation, observe, write_base
from tests.identity.variants import BASE_VARIANT, Variant
from tests.support.real_engines import small_processes

INDEX = "file model.safetensors.index.json"
PREPROCESSOR = "file preprocessor_config.json"
ROUTING = "environment.VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
RULES = (INDEX, PREPROCESSOR, ROUTING, "class")

Observe = Callable[[Variant], Observation]


@pytest.fixture(scope="session", autouse=True)
def _forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with small_processes(tmp_path_factory.mktemp("forks")):
        yield


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("identity") / "base")


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Observe:
    """Runs an engine of a variant, with every rule of `RULES` also taken out of its namespace."""
    numbers = itertools.count()

    def run(variant: Variant) -> Observation:
        return observe(base_model, variant, tmp_path_factory.mktemp(f"variant-{next(numbers)}"), RULES)

    return run


@pytest.fixture(scope="session")
def base(observed: Observe) -> Observation:
    return observed(BASE_VARIANT)
