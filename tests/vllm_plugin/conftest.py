"""Real vLLM configurations of a tiny model; no engine, no weights loaded."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.tiny_model import Shape, write
from tests.conftest import StartServer
from tests.support.processes import ServerProcess

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ["HF_HUB_OFFLINE"] = "1"  # Before vLLM is imported: it reads it once.
BLOCK_TOKENS = 16
TINY = Shape(layers=2, hidden=64, intermediate=64, heads=8, kv_heads=4, head_dim=8, vocab=256, max_tokens=1024)

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
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine takes does not end a step's budget: what is asked for begins in the step that asks."""
    from vllm_plugin.scheduler import step_budget

    monkeypatch.setattr(step_budget, "MAX_BEGIN_S", 1.0)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """With vLLM's loggers, which vLLM keeps from the root logger once it has configured them."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def vllm_config(tiny_model: Path) -> MakeConfig:
    """`vllm_config(endpoint, extra={...}, role="kv_both", model=path, **EngineArgs)` -> VllmConfig."""
    from tests.vllm_plugin.support import make_config

    def make(endpoint: str = "127.0.0.1:1", **options: Any) -> Any:
        return make_config(options.pop("model", tiny_model), endpoint, **options)

    return make


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """`interpreter(function, *args)`: its result by a process in which Triton plays the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # Read when Triton is imported.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield lambda function, *args: process.submit(function, *args).result(timeout=60)


@pytest.fixture
def toy_engine() -> Iterator[Callable[..., Any]]:
    """Makes toy engines that are shut down afterwards: `toy_engine(vllm_config, num_blocks=64)`."""
    from tests.vllm_plugin.toy import ToyEngine

    with ExitStack() as stack:

        def make(config: Any, kind: type[ToyEngine] = ToyEngine, **options: Any) -> ToyEngine:
            engine = kind(config, **options)
            stack.callback(engine.shutdown)
            return engine

        yield make


@pytest.fixture
def keeps_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are not dropped where the engine lacks blocks."""
    from vllm_plugin.scheduler.store_jobs import StoreJobs

    monkeypatch.setattr(StoreJobs, "_drop_orphans", lambda _: False)


@pytest.fixture
def fleet(toy_engine: Callable[..., Any], vllm_config: MakeConfig, shared_server: ServerProcess) -> Any:
    """Toy engines on the shared server, in a namespace of their own."""
    from tests.vllm_plugin.fleet import Fleet

    return Fleet(toy_engine, vllm_config, shared_server.endpoint)


@pytest.fixture
def fleet_on(toy_engine: Callable[..., Any], vllm_config: MakeConfig) -> Callable[[str], Any]:
    """The same on another server: `fleet_on(endpoint)`."""
    from tests.vllm_plugin.fleet import Fleet

    return lambda endpoint: Fleet(toy_engine, vllm_config, endpoint)


@pytest.fixture
def fresh_fleet(fleet_on: Callable[[str], Any], shared_server: ServerProcess) -> Callable[[], Any]:
    """Fleets on the shared server, each in a namespace of its own: `fresh_fleet()`."""
    return lambda: fleet_on(shared_server.endpoint)


@pytest.fixture
def core(vllm_config: MakeConfig, shared_server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """`core(endpoint=..., role=..., cache=..., stages=2, store_decoded=False)`: in a namespace of its own."""
    from tests.vllm_plugin.core import NUM_BLOCKS, Core, salts
    from tests.vllm_plugin.support import cache_config

    with ExitStack() as stack:

        def make(
            endpoint: str = shared_server.endpoint,
            role: str = "kv_both",
            cache: Any = None,
            stages: int = 1,
            world_size: int = 1,
            **extra: Any,
        ) -> Core:
            extra = {"salt": f"{next(salts)}", "lookup_timeout_ms": 5_000, **extra, "endpoint": endpoint}
            config = vllm_config(endpoint, role=role)
            config.parallel_config.pipeline_parallel_size = stages
            config.parallel_config.world_size = world_size
            made = Core(config, extra, cache or cache_config(num_blocks=NUM_BLOCKS))
            stack.callback(made.side.shutdown)
            return made

        yield make


@pytest.fixture
def alone(core: Callable[..., Any], pool_server: StartServer) -> Any:
    """A core on a server of its own: every lease there is this core's."""
    # Leases that outlive the test: none ends by itself.
    return core(endpoint=pool_server().endpoint, load_timeout_ms=30_000).connected()


@pytest.fixture
def staged(core: Callable[..., Any], vllm_config: MakeConfig, pool_server: StartServer) -> Any:
    """A core of two stages, both connected to a server of their own."""
    from tests.vllm_plugin.core import NUM_BLOCKS, shake_hands
    from tests.vllm_plugin.support import cache_config, make_request, tokens

    extra = {"endpoint": pool_server().endpoint, "load_timeout_ms": 30_000, "salt": "staged"}
    one = core(stages=2, **extra)
    assert one.side.matched_tokens(make_request("early", tokens(100)), 0) == (0, False), "no stage is known yet"
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    shake_hands(one, config, cache_config(num_blocks=NUM_BLOCKS), extra)
    return one.connected()
