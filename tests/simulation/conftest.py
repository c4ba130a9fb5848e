"""Fixtures of the simulations: the configuration of a tiny model, and quiet."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.tiny_llama import write
from tests.support.quiet_engine import quiet_engine
from tests.support.toy.fixtures import TINY

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_connector_machine.py"]


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A VllmConfig that simulated engines copy and change."""
    from tests.support.vllm_objects import make_config

    return make_config(write(tmp_path_factory.mktemp("models") / "tiny", TINY), "127.0.0.1:1")


@pytest.fixture(name="quiet_engine")
def _quiet_engine() -> Iterator[None]:
    with quiet_engine():
        yield
