"""A reset of an engine whose weights stay what they were: it reads on. `test_weights.py` has new weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.ports import free_endpoint
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import (
    FLOAT32,
    MORE,
    PATIENT,
    assert_same,
    hit_tokens,
    prompt,
    running,
    wait_until_nothing_is_held,
)
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

LENGTH = 300
FULL = hit_tokens(LENGTH)
SERVER = ("--memory", "64MiB", "--grace-ms", "100")


@pytest.fixture(scope="module")
def endpoint() -> str:
    return free_endpoint()


@pytest.fixture(
    scope="module", params=["scheduler in this process", pytest.param("scheduler in a process of its own", marks=MORE)]
)
def engines(
    request: pytest.FixtureRequest, endpoint: str, tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path
) -> Iterator[tuple[Engine, Engine]]:
    """Two of one namespace."""
    model, in_process = write("llama", shapes_dir), request.param == "scheduler in this process"
    spec = EngineSpec(model, kvpool_transfer_config(endpoint, **PATIENT), FLOAT32, in_process=in_process)
    with running(tmp_path_factory.mktemp("reset"), spec, spec) as (resetting, other):
        yield resetting, other


@pytest.fixture
def server(pool_server: StartServer, endpoint: str, engines: tuple[Engine, Engine]) -> Iterator[ServerProcess]:
    """Found by both engines. Nothing is held afterwards."""
    started = pool_server("--listen", endpoint, *SERVER)
    for engine in engines:
        wait_until_pooled(engine)
    yield started
    for engine in engines:
        drain(engine)
    if Path(f"/proc/{started.pid}").exists():
        wait_until_nothing_is_held(started)


def cached(engine: Engine, text: list[int]) -> int:
    """Tokens of the text that the engine finds in the pool."""
    drain(engine)
    return engine.generate([text])[0].cached_tokens


def wait_until_pooled(engine: Engine) -> None:
    """Waits until the engine loads what it stores."""
    tries = iter(range(1_000))

    def loads() -> bool:
        text = prompt(100, f"found {next(tries)}")
        engine.generate([text])
        return cached(engine, text) > 0

    wait_for(loads, "the engine to find the pool", 30)


@pytest.mark.parametrize("how", ["reset", "sleep"])
def test_an_engine_with_the_same_weights_reads_on_and_so_do_the_others(
    how: str, engines: tuple[Engine, Engine], server: ServerProcess
) -> None:
    resetting, other = engines
    text, later = prompt(LENGTH, f"before {how}"), prompt(LENGTH, f"after {how}")
    (expected,) = resetting.generate([text])
    assert cached(resetting, text) == cached(other, text) == FULL
    if how == "sleep":
        resetting.generate([prompt(2000, "on its way")], max_tokens=1)
        resetting.sleep()  # At once: its blocks are still on their way into the pool.
        resetting.wake_up()
    else:
        drain(resetting)
        assert resetting.reset_prefix_cache(external=True)
    (again,) = resetting.generate([text])
    assert again.cached_tokens == FULL
    assert_same([again], [expected])
    resetting.generate([later])
    drain(resetting)
    assert cached(other, later) == FULL


def test_both_work_while_the_pool_is_away(
    engines: tuple[Engine, Engine], pool_server: StartServer, endpoint: str
) -> None:
    text = prompt(LENGTH, "away")
    for engine in engines:
        (expected,) = engine.generate([text])
        engine.sleep()
        engine.wake_up()
        drain(engine)
        assert engine.reset_prefix_cache(external=True)
        (again,) = engine.generate([text])
        assert again.cached_tokens == 0  # It has no pool.
        assert_same([again], [expected])
    pool_server("--listen", endpoint, *SERVER)
    for engine in engines:
        wait_until_pooled(engine)
        drain(engine)
