"""Every prompt token that an engine computes has one cause, and the causes add up to vLLM's own count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.computed import ask
from tests.e2e.conftest import FLOAT32, PATIENT, clear, hit_tokens, prompt, running
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

LENGTH = 400
FULL = hit_tokens(LENGTH)
LAST = LENGTH - FULL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with_little_memory = ServerProcess(tmp_path_factory.mktemp("server"), "--memory", "16MiB")
    yield with_little_memory
    with_little_memory.stop()


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, server: ServerProcess
) -> Iterator[tuple[Engine, Engine]]:
    """Two whose namespaces differ."""
    transfers = [kvpool_transfer_config(server.endpoint, weights_epoch=epoch, **PATIENT) for epoch in ("one", "other")]
    specs = [EngineSpec(write("llama", shapes_dir), each, FLOAT32, in_process=True) for each in transfers]
    with running(tmp_path_factory.mktemp("causes"), *specs) as (engine, other):
        yield engine, other


def test_what_nobody_has_stored_and_what_is_loaded(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    tokens = prompt(LENGTH, "causes")
    assert ask(engine, tokens) == {"never_stored": FULL, "last_block": LAST}
    assert ask(engine, tokens) == {"last_block": LAST}
    assert ask(engine, tokens + prompt(LENGTH, "behind")) == {
        "never_stored": hit_tokens(2 * LENGTH) - FULL,
        "last_block": 2 * LENGTH - hit_tokens(2 * LENGTH),
    }
    assert ask(engine, tokens[:20]) == {"last_block": 20}


def test_what_was_cleared(engines: tuple[Engine, Engine], server: ServerProcess) -> None:
    engine, _ = engines
    tokens = prompt(LENGTH, "cleared")
    ask(engine, tokens)
    clear(server)
    assert ask(engine, tokens) == {"removed": FULL, "last_block": LAST}


def test_what_was_evicted(engines: tuple[Engine, Engine], server: ServerProcess) -> None:
    engine, _ = engines
    tokens = prompt(LENGTH, "evicted")
    ask(engine, tokens)
    for nth in range(200):
        engine.generate([prompt(LENGTH, f"more {nth}")], max_tokens=1)
        drain(engine)
        with Client(ClientConfig(server.endpoint)) as client:
            if client.admin.stats().counters["evicted_blocks"] > 100:
                break
    found = ask(engine, tokens)
    assert found["evicted"] > 0
    assert sum(found.values()) <= LENGTH and set(found) == {"evicted", "last_block"}


def explain(server: ServerProcess, *arguments: str) -> Any:
    """What `kvpool explain` says."""
    done = CliRunner().invoke(app, ["explain", *arguments, "--endpoint", server.endpoint, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_kvpool_explain_says_what_the_engine_will_compute_and_why(
    engines: tuple[Engine, Engine], server: ServerProcess, tmp_path: Path
) -> None:
    engine, _ = engines
    clear(server)
    tokens = prompt(LENGTH, "explained")
    with Client(ClientConfig(server.endpoint)) as client:
        (namespace,) = (
            info.fingerprint.hex() for info in client.admin.namespaces() if info.spec.weights_epoch == "one"
        )
    (tmp_path / "prompt").write_text(json.dumps([*tokens, *prompt(100, "new")]))
    asked = ("--prompt", str(tmp_path / "prompt"), "--namespace", namespace)
    ask(engine, tokens)
    found = explain(server, *asked)
    assert found["stored_tokens"] == found["loadable_tokens"] == LENGTH // BLOCK_TOKENS * BLOCK_TOKENS
    for nth in range(1_000):
        engine.generate([prompt(3 * BLOCK_TOKENS, f"small {nth}")], max_tokens=1)
        drain(engine)
        found = explain(server, *asked)
        if found["stored_tokens"] < LENGTH // BLOCK_TOKENS * BLOCK_TOKENS:
            break
    (group,) = found["groups"]
    causes = {part["cause"]: part["stop"] - part["start"] for part in group["ranges"]}
    assert set(causes) - {None} == {"evicted", "never_stored"}
    (evicted,) = (part for part in group["ranges"] if part["cause"] == "evicted")
    assert evicted["newest_left_seconds"] < 60 and evicted["evicted_for"]["model"]
    computed = ask(engine, [*tokens, *prompt(100, "new")])
    assert computed["evicted"] == causes["evicted"]
    assert sum(computed.values()) == LENGTH + 100 - found["loadable_tokens"]


def test_what_another_namespace_has(engines: tuple[Engine, Engine], server: ServerProcess) -> None:
    engine, other = engines
    clear(server)
    tokens = prompt(LENGTH, "elsewhere")
    ask(engine, tokens)
    assert ask(other, tokens) == {"other_namespace": FULL, "last_block": LAST}


def test_what_must_not_be_loaded(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    tokens = prompt(LENGTH, "not asked")
    ask(engine, tokens)
    assert ask(engine, tokens, prompt_logprobs=0) == {"not_asked": FULL, "last_block": LAST}


def test_what_was_asked_of_a_pool_that_is_away(tmp_path: Path, shapes_dir: Path, pool_server: StartServer) -> None:
    gone = pool_server("--memory", "64MiB")
    transfer = kvpool_transfer_config(gone.endpoint, **PATIENT)
    tokens = prompt(LENGTH, "away")
    with running(tmp_path, EngineSpec(write("llama", shapes_dir), transfer, FLOAT32, in_process=True)) as (engine,):
        ask(engine, tokens)
        gone.kill()
        first, second = ask(engine, tokens), ask(engine, prompt(LENGTH, "away, too"))
    assert set(first) <= {"lookup_failed", "pool_away", "last_block"} and sum(first.values()) == LENGTH
    assert second == {"pool_away": FULL, "last_block": LAST}
