"""Real vLLM configurations of a tiny model; no engine, no weights loaded."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.processes import ServerProcess
from tests.support.toy.fixtures import (
    MakeConfig,
    fleet,
    fleet_on,
    fresh_fleet,
    loud,
    one_thread,
    tiny_model,
    toy_engine,
    vllm_config,
)

__all__ = ["fleet", "fleet_on", "fresh_fleet", "loud", "one_thread", "tiny_model", "toy_engine", "vllm_config"]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine takes does not end a step's budget: what is asked for begins in the step that asks."""
    from vllm_plugin.scheduler import lookups

    monkeypatch.setattr(lookups, "MAX_BEGIN_S", 1.0)


@pytest.fixture
def answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lookup is sent and answered in one step: which requests share a step must not depend on the machine."""
    from vllm_plugin.scheduler import lookups

    for name in ("MAX_WAIT_SHARE", "ASYNC_WAIT_SHARE"):
        monkeypatch.setattr(lookups, name, 1e6)
    monkeypatch.setattr(lookups, "MAX_BEGIN_S", 10.0)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """With kvpool's loggers, which vLLM keeps from the root logger from the first engine of a process on."""
    logger = logging.getLogger("vllm.kvpool")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr("vllm.logger.dictConfig", lambda _: None)  # It drops handlers, with a process's first engine.
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """`interpreter(function, *args)`: its result by a process in which Triton plays the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # Read when Triton is imported.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield lambda function, *args: process.submit(function, *args).result(timeout=60)


@pytest.fixture
def keeps_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are not dropped where the engine lacks blocks."""
    from vllm_plugin.scheduler.store_jobs import StoreJobs

    monkeypatch.setattr(StoreJobs, "_drop_orphans", lambda _: False)


@pytest.fixture
def core(vllm_config: MakeConfig, shared_server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """`core(endpoint=..., role=..., cache=..., stages=2, store_decoded=False)`: in a namespace of its own."""
    from tests.support.vllm_objects import cache_config
    from tests.vllm_plugin.core import NUM_BLOCKS, Core, salts

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
def one(core: Callable[..., Any]) -> Any:
    """A core on the shared server."""
    return core().connected()


@pytest.fixture
def alone(core: Callable[..., Any], pool_server: StartServer) -> Any:
    """A core on a server of its own: every lease there is this core's."""
    # Leases that outlive the test: none ends by itself.
    return core(endpoint=pool_server().endpoint, load_timeout_ms=30_000).connected()


@pytest.fixture
def staged(core: Callable[..., Any], vllm_config: MakeConfig, pool_server: StartServer) -> Any:
    """A core of two stages, both connected to a server of their own."""
    from tests.support.vllm_objects import cache_config, make_request, tokens
    from tests.vllm_plugin.core import NUM_BLOCKS, shake_hands

    extra = {"endpoint": pool_server().endpoint, "load_timeout_ms": 30_000, "salt": "staged"}
    one = core(stages=2, **extra)
    assert one.side.matched_tokens(make_request("early", tokens(100)), 0) == (0, False), "no stage is known yet"
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    shake_hands(one, config, cache_config(num_blocks=NUM_BLOCKS), extra)
    return one.connected()
