"""Fixtures of tests with vLLM's own objects: configurations of a tiny model, and toy engines on kvpool servers.

Each conftest imports those that its tests need. Nothing here imports vLLM before a fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testbed.tiny_llama import Shape, write
from tests.support.processes import ServerProcess

os.environ["HF_HUB_OFFLINE"] = "1"  # Before vLLM is imported: it reads it once.
BLOCK_TOKENS = 16
TINY = Shape(layers=2, hidden=64, intermediate=64, heads=16, kv_heads=4, head_dim=8, vocab=256, max_tokens=1024)

MakeConfig = Callable[..., Any]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: torch's threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that the connector did not foresee fails the test, where it would be a miss in an engine.

    The transfer threads log it, and go on.
    """
    import threading

    from vllm_plugin.metrics import Guard
    from vllm_plugin.worker.transfer import TransferThread

    quiet = Guard.failed

    def failed(self: Guard, what: str, error: BaseException) -> None:
        if isinstance(threading.current_thread(), TransferThread):
            quiet(self, what, error)
        else:
            raise error

    monkeypatch.setattr(Guard, "failed", failed)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def vllm_config(tiny_model: Path) -> MakeConfig:
    """`vllm_config(endpoint, extra={...}, role="kv_both", model=path, **EngineArgs)` -> VllmConfig."""
    from tests.support.vllm_objects import make_config

    def make(endpoint: str = "127.0.0.1:1", **options: Any) -> Any:
        return make_config(options.pop("model", tiny_model), endpoint, **options)

    return make


@pytest.fixture
def toy_engine() -> Iterator[Callable[..., Any]]:
    """Makes toy engines that are shut down afterwards: `toy_engine(vllm_config, num_blocks=64)`."""
    from tests.support.toy.engine import ToyEngine

    with ExitStack() as stack:

        def make(config: Any, kind: type[ToyEngine] = ToyEngine, **options: Any) -> ToyEngine:
            engine = kind(config, **options)
            stack.callback(engine.shutdown)
            return engine

        yield make


@pytest.fixture
def fleet(toy_engine: Callable[..., Any], vllm_config: MakeConfig, shared_server: ServerProcess) -> Any:
    """Toy engines on the shared server, in a namespace of their own."""
    from tests.support.toy.fleet import Fleet

    return Fleet(toy_engine, vllm_config, shared_server.endpoint)


@pytest.fixture
def fleet_on(toy_engine: Callable[..., Any], vllm_config: MakeConfig) -> Callable[[str], Any]:
    """The same on another server: `fleet_on(endpoint)`."""
    from tests.support.toy.fleet import Fleet

    return lambda endpoint: Fleet(toy_engine, vllm_config, endpoint)


@pytest.fixture
def fresh_fleet(fleet_on: Callable[[str], Any], shared_server: ServerProcess) -> Callable[[], Any]:
    """Fleets on the shared server, each in a namespace of its own: `fresh_fleet()`."""
    return lambda: fleet_on(shared_server.endpoint)
