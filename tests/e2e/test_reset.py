"""What an engine may no longer read after a reset, and what that leaves to others."""

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
    """One that leaves at a reset, one that keeps."""
    model, in_process = write("llama", shapes_dir), request.param == "scheduler in this process"
    specs = [
        EngineSpec(
            model, kvpool_transfer_config(endpoint, on_reset=on_reset, **PATIENT), FLOAT32, in_process=in_process
        )
        for on_reset in ("connector", "keep")
    ]
    with running(tmp_path_factory.mktemp("reset"), *specs) as (leaving, keeping):
        yield leaving, keeping


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
def test_who_leaves_reads_nothing_that_was_stored_before_and_the_others_read_on(
    how: str, engines: tuple[Engine, Engine], server: ServerProcess
) -> None:
    leaving, keeping = engines
    text, later = prompt(LENGTH, f"before {how}"), prompt(LENGTH, f"after {how}")
    # Both are in one namespace only until the first of these tests: each stores its own.
    (expected,) = leaving.generate([text])
    keeping.generate([text])
    assert cached(leaving, text) == cached(keeping, text) == FULL
    for engine in engines:
        if how == "sleep":
            engine.generate([prompt(2000, "on its way")], max_tokens=1)
            engine.sleep()  # At once: its blocks are still on their way into the pool.
            engine.wake_up()
        else:
            drain(engine)
            assert engine.reset_prefix_cache(external=True)
    wait_until_pooled(leaving)
    (again,) = leaving.generate([text])
    assert again.cached_tokens == 0
    assert_same([again], [expected])
    assert cached(leaving, text) == FULL  # What it has computed since.
    assert cached(keeping, text) == FULL
    # What the one stores now the other does not read.
    leaving.generate([later])
    drain(leaving)
    assert cached(keeping, later) == 0


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
        assert again.cached_tokens == 0
        assert_same([again], [expected])
    pool_server("--listen", endpoint, *SERVER)
    for engine in engines:
        wait_until_pooled(engine)
        drain(engine)


def test_a_new_engine_reads_what_was_stored_before_another_left(
    pool_server: StartServer, tmp_path: Path, shapes_dir: Path
) -> None:
    model, server, text = write("gemma3", shapes_dir), pool_server(*SERVER), prompt(LENGTH, "gemma")
    specs = [
        EngineSpec(
            model, kvpool_transfer_config(server.endpoint, on_reset=on_reset, **PATIENT), FLOAT32, in_process=True
        )
        for on_reset in ("leave", "connector")
    ]
    with running(tmp_path, *specs) as (leaving, other):
        (expected,) = leaving.generate([text])
        # As after an update of the weights by a framework that does not know of connectors.
        drain(leaving)
        (again,) = leaving.generate([text])
        assert again.cached_tokens == 0
        assert_same([again], [expected])
        (loaded,) = other.generate([text])
        assert loaded.cached_tokens == FULL
        assert_same([loaded], [expected])
        leaving.generate([text])
        leaving.sleep()
        leaving.wake_up()
        (again,) = leaving.generate([text])
        assert_same([again], [expected])
        drain(other)
