"""Each cause of computed tokens that takes a fault, a slow pool or a busy engine to bring about, with real vLLM.

`test_causes.py` has the usual causes. Together they are all.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.handles import Namespace
from kvpool.protocol.hashing import DEFAULT_SEED, block_hashes
from kvpool.protocol.reports import Cause
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool.protocol.wire import decode_spec
from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, Prompt, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.computed import ask, causes_of
from tests.e2e.conftest import FLOAT32, PATIENT, clear, hit_tokens, prompt, running
from tests.support.faults import flip_arena, stopped
from tests.support.processes import ServerProcess, wait_for

pytestmark = pytest.mark.vllm

LENGTH = 400
FULL = hit_tokens(LENGTH)
LAST = {"last_block": LENGTH - FULL}
HASTY = {**PATIENT, "lookup_timeout_ms": 1_000, "promotion_wait_ms": 0, "decline_slow_loads": True}
NUM_WAITING = 900
"""Requests at once; the step's budget lets about 640 wait for their lookups."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = ServerProcess(tmp_path_factory.mktemp("server"), "--memory", "64MiB", "--grace-ms", "100")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that keeps in a tier what its memory has no room for."""
    tier = tmp_path_factory.mktemp("tier") / "files"
    flags = ("--memory", "8MiB", "--grace-ms", "100", "--tier", f"file:{tier},size=256MiB,name=files,create=yes")
    started = ServerProcess(tmp_path_factory.mktemp("tiered"), *flags)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, server: ServerProcess, tiered: ServerProcess
) -> Iterator[tuple[Engine, Engine]]:
    """A patient one, and a hasty one of a pool with a tier."""
    model = write("llama", shapes_dir)
    options = {**FLOAT32, "enable_lora": True, "max_lora_rank": 8}
    with running(
        tmp_path_factory.mktemp("rare"),
        EngineSpec(model, kvpool_transfer_config(server.endpoint, **PATIENT), FLOAT32, in_process=True),
        EngineSpec(model, kvpool_transfer_config(tiered.endpoint, **HASTY), options, in_process=True),
    ) as (patient, hasty):
        yield patient, hasty


@pytest.fixture
def patient(engines: tuple[Engine, Engine]) -> Engine:
    return engines[0]


@pytest.fixture
def hasty(engines: tuple[Engine, Engine], tiered: ServerProcess) -> Engine:
    """Its pool answers, and its breaker is closed."""
    tries = iter(range(1_000))
    wait_for(
        lambda: ask(engines[1], prompt(40, f"is it there? {next(tries)}")).keys() == {"never_stored", "last_block"},
        "the engine to use its pool",
        60,
    )
    return engines[1]


@contextmanager
def opened(server: ServerProcess) -> Iterator[tuple[Client, Namespace]]:
    """A client in the namespace of the only engine of a server."""
    with Client(ClientConfig(server.endpoint)) as client:
        (info,) = client.admin.namespaces()
        spec = dataclasses.replace(decode_spec(info.spec), hash_seed=DEFAULT_SEED, salt="")
        yield client, client.open_namespace(spec, info.fingerprint)


def run_of(tokens: list[int], group: int = 0) -> BlockRun:
    return BlockRun(group, block_hashes(tokens, BLOCK_TOKENS)[: FULL // BLOCK_TOKENS])


def test_what_is_being_written_and_what_its_writer_gives_up(patient: Engine, server: ServerProcess) -> None:
    tokens = prompt(LENGTH, "written by another")
    with opened(server) as (client, namespace):
        shards = ShardRange(0, namespace.spec.groups[0].num_shards)
        grant = client.rpc.put_start(namespace, [run_of(tokens)], shards)
        assert ask(patient, tokens) == {"being_written": FULL, **LAST}
        assert client.rpc.put_revoke(grant.ticket_id)
    assert ask(patient, tokens) == {"put_failed": FULL, **LAST}
    assert ask(patient, tokens) == LAST


def test_what_fails_to_load_and_what_was_found_corrupt(patient: Engine, server: ServerProcess) -> None:
    tokens = prompt(LENGTH, "changes")
    ask(patient, tokens)
    flip_arena(server)
    assert ask(patient, tokens) == {"load_failed": FULL, **LAST}
    assert ask(patient, tokens) == LAST, "it was stored again"
    flip_arena(server)
    with opened(server) as (client, namespace):
        checked, dropped = client.admin.verify(namespace, [run_of(tokens)])
    assert checked == dropped == FULL // BLOCK_TOKENS
    assert ask(patient, tokens) == {"corrupt": FULL, **LAST}


def test_what_an_engine_does_not_share_during_a_reset(patient: Engine) -> None:
    running, later = prompt(LENGTH, "runs"), prompt(LENGTH, "comes later")
    ask(patient, later)
    found = causes_of(
        patient, lambda: patient.call("tests.e2e.inside:reset_while_running", running, later, timeout_s=60)
    )
    assert found == {"never_stored": FULL, "sharing_off": FULL, "last_block": 2 * LAST["last_block"]}


def test_what_cannot_be_used_without_its_window(
    tmp_path: Path, shapes_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokens = prompt(LENGTH, "window")
    with ExitStack() as stack:
        own = ServerProcess(tmp_path_factory.mktemp("own"), "--memory", "64MiB")
        stack.callback(own.stop)
        spec = EngineSpec(
            write("gemma3", shapes_dir), kvpool_transfer_config(own.endpoint, **PATIENT), FLOAT32, in_process=True
        )
        (engine,) = stack.enter_context(running(tmp_path, spec))
        ask(engine, tokens)
        assert ask(engine, tokens) == LAST
        with opened(own) as (client, namespace):
            windows = [idx for idx, group in enumerate(namespace.spec.groups) if group.window_tokens]
            for group in windows:
                client.admin.remove(namespace, [run_of(tokens, group)])
        assert ask(engine, tokens) == {"window_or_state": FULL, **LAST}


def test_what_a_tier_has(hasty: Engine, tiered: ServerProcess) -> None:
    tokens = prompt(LENGTH, "in the tier")
    ask(hasty, tokens)
    nth = 0

    def are_evicted() -> bool:
        nonlocal nth
        nth += 1
        ask(hasty, prompt(LENGTH, f"pushes {nth}"))
        with opened(tiered) as (client, namespace):
            lookup = client.lookup(namespace, [run_of(tokens)], lease=False)
            return lookup.hits[0].num_leading == 0

    wait_for(are_evicted, "memory to evict the prompt", 60)
    assert ask(hasty, tokens) == {"in_tier": FULL, **LAST}


def test_what_belongs_to_an_adapter_that_is_not_shared(hasty: Engine, tmp_path: Path) -> None:
    newer_than_the_engine = str(write("lora_a", tmp_path))
    assert ask(hasty, Prompt(prompt(LENGTH, "adapter"), lora=newer_than_the_engine)) == {"adapter": FULL, **LAST}


def test_what_would_be_slower_to_load(hasty: Engine) -> None:
    for nth in range(6):
        ask(hasty, prompt(LENGTH, f"computing is measured {nth}"))
    tokens = prompt(LENGTH, "declined")
    ask(hasty, tokens)
    assert ask(hasty, tokens) == LAST, "over a connection that is not new, on which no probe is free"
    hasty.call("tests.e2e.inside:slow_loads", 1 << 30, 100_000.0)
    assert ask(hasty, tokens) == {"declined": FULL, **LAST}


def test_what_a_lookup_did_not_find_out_in_time(hasty: Engine, tiered: ServerProcess) -> None:
    with stopped(tiered):
        assert ask(hasty, prompt(LENGTH, "late")) == {"lookup_failed": FULL, **LAST}


def test_too_many_that_wait(hasty: Engine, tiered: ServerProcess) -> None:
    prompts = [prompt(40, f"many {nth}") for nth in range(NUM_WAITING)]
    with stopped(tiered):
        found = causes_of(hasty, lambda: hasty.generate(prompts, max_tokens=1))
    assert found["too_many_waiting"] > 0
    assert found.keys() <= {"too_many_waiting", "lookup_failed", "pool_away", "last_block"}
    assert sum(found.values()) == 40 * NUM_WAITING


def test_two_ranks_count_each_token_once(server: ServerProcess, shapes_dir: Path, tmp_path: Path) -> None:
    transfer = kvpool_transfer_config(server.endpoint, salt="two ranks", **PATIENT)
    spec = EngineSpec(write("llama", shapes_dir), transfer, {**FLOAT32, "tensor_parallel_size": 2})
    tokens = prompt(LENGTH, "two ranks")
    with running(tmp_path, spec) as (engine,):
        assert ask(engine, tokens) == {"never_stored": FULL, **LAST}
        assert ask(engine, tokens) == LAST
        clear(server)
        assert ask(engine, tokens) == {"removed": FULL, **LAST}


def test_each_cause_has_a_test() -> None:
    """In this file, test_causes.py or test_reports.py, by its label."""
    here = Path(__file__)
    texts = {
        node.value
        for path in (here, here.with_name("test_causes.py"), here.with_name("test_reports.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {cause.label for cause in Cause} <= texts
