"""Fixtures of the simulations: the configuration of a tiny model, and quiet."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.tiny_llama import write
from tests.support.toy.fixtures import TINY

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_connector_machine.py"]


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A VllmConfig that simulated engines copy and change."""
    from tests.support.vllm_objects import make_config

    return make_config(write(tmp_path_factory.mktemp("models") / "tiny", TINY), "127.0.0.1:1")


@pytest.fixture
def quiet_engine() -> Iterator[None]:
    """One torch thread, and no log, because faults are simulated."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)
