"""Every prompt token that an engine computes has one cause, and the causes add up to vLLM's own count.

Causes that a fault or a busy engine brings about: `tests/vllm_plugin/scheduler/test_telemetry.py`. What the
server says of blocks that it lacks: `tests/kvpool_server/cache/test_misses.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.reports import Cause
from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, Prompt, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, PATIENT, clear, hit_tokens, prompt, running
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

LENGTH = 400
FULL = hit_tokens(LENGTH)
LAST = LENGTH - FULL
COMPUTED = "vllm:kvpool_computed_tokens"
TESTS = ("e2e/test_causes.py", "vllm_plugin/scheduler/test_telemetry.py", "kvpool_server/cache/test_explanations.py")
"""Files that name each cause, by its label or by its name."""

Causes = dict[str, float]


def causes_of(engine: Engine, act: Callable[[], object]) -> Causes:
    """Tokens that the engine computes while `act` runs, by cause; vLLM has counted as many."""
    before = engine.metrics()
    act()
    after = engine.metrics()
    drain(engine)
    assert after[COMPUTED] == after["vllm:prompt_tokens_by_source:local_compute"], "since the engine's start"
    counted = {
        name.removeprefix(f"{COMPUTED}:"): value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith(f"{COMPUTED}:")
    }
    return {cause: tokens for cause, tokens in counted.items() if tokens}


def ask(engine: Engine, tokens: list[int] | Prompt, **options: object) -> Causes:
    return causes_of(engine, lambda: engine.generate([tokens], max_tokens=1, **options))


def test_each_cause_has_a_test() -> None:
    texts = "".join((Path(__file__).parents[1] / name).read_text() for name in TESTS)
    assert [cause for cause in Cause if not re.search(rf'"{cause.label}"|\b{cause.name}\b', texts)] == []


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


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that keeps in a tier what its memory has no room for."""
    tier = tmp_path_factory.mktemp("tier") / "files"
    flags = ("--memory", "8MiB", "--grace-ms", "100", "--tier", f"file:{tier},size=256MiB,name=files,create=yes")
    started = ServerProcess(tmp_path_factory.mktemp("tiered"), *flags)
    yield started
    started.stop()


def test_what_a_tier_has_and_what_belongs_to_an_adapter_that_is_not_shared(
    tmp_path: Path, shapes_dir: Path, tiered: ServerProcess
) -> None:
    hasty = {**PATIENT, "lookup_timeout_ms": 1_000, "promotion_wait_ms": 0, "decline_slow_loads": True}
    options = {**FLOAT32, "enable_lora": True, "max_lora_rank": 8}
    transfer = kvpool_transfer_config(tiered.endpoint, **hasty)
    tokens = prompt(LENGTH, "in the tier")
    with running(tmp_path, EngineSpec(write("llama", shapes_dir), transfer, options, in_process=True)) as (engine,):
        ask(engine, tokens)
        with Client(ClientConfig(tiered.endpoint)) as client:
            pushes = iter(range(1_000))

            def are_evicted() -> bool:
                ask(engine, prompt(LENGTH, f"pushes {next(pushes)}"))
                return client.admin.stats().counters["evicted_blocks"] > 100

            wait_for(are_evicted, "memory to evict the prompt", 60)
        assert ask(engine, tokens) == {"in_tier": FULL, "last_block": LAST}
        newer_than_the_engine = str(write("lora_a", tmp_path))
        found = ask(engine, Prompt(prompt(LENGTH, "adapter"), lora=newer_than_the_engine))
        assert found == {"adapter": FULL, "last_block": LAST}
