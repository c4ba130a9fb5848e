"""Beside another connector, vLLM asks all of them, loads from the first that has something, and stores with all.

The other one is a second kvpool, or vLLM's own ExampleConnector, which keeps files. The counters tell who loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.config import ClientConfig
from testbed.engine import BLOCK_TOKENS, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import (
    FLOAT32,
    MORE,
    PATIENT,
    assert_same,
    hit_tokens,
    pool_stats,
    prompt,
    running,
    wait_until_nothing_is_held,
)
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain, one_by_one

pytestmark = [pytest.mark.vllm, MORE]

LENGTHS = (150, 400)
FULL = [hit_tokens(length) for length in LENGTHS]


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def loaded_blocks(server: ServerProcess) -> int:
    return pool_stats(server).counters.get("get_blocks", 0)


def clear(server: ServerProcess) -> None:
    with Client(ClientConfig(server.endpoint, timeout_ms=60_000)) as client:
        assert client.admin.clear() > 0


@pytest.fixture
def servers(pool_server: StartServer) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Nothing is held in them afterwards."""
    started = tuple(pool_server("--memory", "64MiB", "--grace-ms", "100") for _ in range(2))
    yield started[0], started[1]
    for server in started:
        wait_until_nothing_is_held(server)


@pytest.mark.parametrize("shape", ["gemma3", "llama"])
def test_two_pools(shape: str, servers: tuple[ServerProcess, ServerProcess], tmp_path: Path, shapes_dir: Path) -> None:
    first, second = servers
    transfer = multi(*(kvpool_transfer_config(server.endpoint, **PATIENT) for server in servers))
    spec = EngineSpec(write(shape, shapes_dir), transfer, FLOAT32, in_process=True)
    prompts = [prompt(length, f"{shape} {length} in two pools") for length in LENGTHS]
    with running(tmp_path, spec, spec) as (writer, reader):
        cold = one_by_one(writer, prompts)
        drain(writer)
        entries = [pool_stats(server).num_entries for server in servers]
        assert entries[0] == entries[1] >= sum(FULL) // BLOCK_TOKENS
        assert (loaded_blocks(first), loaded_blocks(second)) == (0, 0)

        warm = one_by_one(reader, prompts)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert_same(warm, cold)
        drain(reader)
        before = loaded_blocks(first)
        assert before > 0 and loaded_blocks(second) == 0, "the one that was not chosen has loaded"

        clear(first)
        warm = one_by_one(reader, prompts)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert_same(warm, cold)
        drain(reader)
        assert loaded_blocks(first) == before and loaded_blocks(second) > 0
        # What the second had, the first has not: it was loaded, not computed.
        drain(writer)


@pytest.mark.parametrize("ours", ["first", "second"])
def test_beside_another_connector(ours: str, pool_server: StartServer, tmp_path: Path, shapes_dir: Path) -> None:
    server = pool_server("--memory", "64MiB", "--grace-ms", "100")
    kvpool = kvpool_transfer_config(server.endpoint, **PATIENT)
    files = tmp_path / "files"
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    order = [kvpool, example] if ours == "first" else [example, kvpool]
    spec = EngineSpec(write("llama", shapes_dir), multi(*order), FLOAT32, in_process=True)
    prompts = [prompt(length, f"beside {length}") for length in LENGTHS]
    with running(tmp_path, spec) as (engine,):
        cold = one_by_one(engine, prompts)
        drain(engine)
        assert pool_stats(server).num_entries >= sum(FULL) // BLOCK_TOKENS and any(files.iterdir())
        warm = one_by_one(engine, prompts)
        assert_same(warm, cold)
        assert [answer.cached_tokens for answer in warm] == FULL
        drain(engine)
        assert (loaded_blocks(server) > 0) == (ours == "first")
        # Without the first, the second.
        before = loaded_blocks(server)
        if ours == "first":
            clear(server)
        else:
            shutil.rmtree(files)
            files.mkdir()
        warm = one_by_one(engine, prompts)
        assert_same(warm, cold)
        assert [answer.cached_tokens for answer in warm] == FULL
        drain(engine)
        assert (loaded_blocks(server) > before) == (ours == "second")
        wait_until_nothing_is_held(server)


def test_what_a_peer_has_failed_to_load_synchronously_is_not_stored(
    pool_server: StartServer, tmp_path: Path, shapes_dir: Path
) -> None:
    server = pool_server("--memory", "64MiB", "--grace-ms", "100")
    kvpool = kvpool_transfer_config(server.endpoint, **PATIENT)
    length = LENGTHS[1]
    peer = {
        "kv_connector": "FailingPeer",
        "kv_connector_module_path": "tests.support.failing_peer",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tokens": hit_tokens(length)},
    }
    model, text = write("llama", shapes_dir), prompt(length, "spoiled")
    beside = EngineSpec(model, multi(peer, kvpool), FLOAT32, in_process=True)
    alone = EngineSpec(model, kvpool, FLOAT32, in_process=True)
    with running(tmp_path, beside, alone) as (engine, reader):
        (expected,) = reader.generate([text])
        drain(reader)
        clear(server)
        (given,) = engine.generate([text])
        assert given.cached_tokens == hit_tokens(length), "the peer has promised nothing"
        assert_same([given], [expected])
        drain(engine)
        assert "Recovered from KV load failure" in engine.log()
        (read,) = reader.generate([text])
        assert_same([read], [expected])
        drain(reader)
    wait_until_nothing_is_held(server)
