"""Beside another connector, vLLM asks all of them, loads from the first that has something, and stores with all.

The other one is a second kvpool, or vLLM's own ExampleConnector, which keeps files. The engine counts what it loads
from kvpool, from all of its pools together; each server counts the bytes that it sends over TCP.
"""

from __future__ import annotations

import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import (
    FLOAT32,
    PATIENT,
    assert_same,
    clear,
    example_connector,
    hit_tokens,
    multi,
    pool_stats,
    prompt,
    running,
    wait_until_nothing_is_held,
)
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

LENGTHS = (150, 400)
FULL = [hit_tokens(length) for length in LENGTHS]
FROM_POOL = sum(FULL), sum(FULL) // BLOCK_TOKENS
"""Tokens and blocks of full hits on every prompt, in a model with one group."""


class Loaded(NamedTuple):
    """What an engine has loaded from kvpool: tokens by its scheduler's count, blocks and bytes by its worker's."""

    tokens: int
    blocks: int
    nbytes: int


def loaded(engine: Engine) -> Loaded:
    """Since the engine's start, from all of its pools together."""
    metrics = engine.metrics()
    assert not metrics["vllm:kvpool_load_failures"]
    return Loaded(*(int(metrics[f"vllm:kvpool_{name}"]) for name in ("hit_tokens", "loaded_blocks", "loaded_bytes")))


def sent_bytes(server: ServerProcess) -> int:
    """Payload bytes that readers have received from the server over TCP."""
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=60) as page:
        series = r'^kvpool_transferred_bytes_total{direction="read",transport="tcp"} (\S+)$'
        (value,) = re.findall(series, page.read().decode(), re.MULTILINE)
        return int(float(value))


def assert_sent(nbytes: int, server: ServerProcess) -> None:
    wait_for(lambda: sent_bytes(server) >= nbytes, f"{nbytes} bytes to be sent")
    assert sent_bytes(server) == nbytes


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
    # Over shared memory a server would not know what is read.
    transfer = multi(*(kvpool_transfer_config(server.endpoint, transport="tcp", **PATIENT) for server in servers))
    spec = EngineSpec(write(shape, shapes_dir), transfer, FLOAT32, in_process=True)
    prompts = [prompt(length, f"{shape} {length} in two pools") for length in LENGTHS]
    with running(tmp_path, spec, spec) as (writer, reader):
        cold = one_by_one(writer, prompts)
        drain(writer)
        entries = [pool_stats(server).num_entries for server in servers]
        assert entries[0] == entries[1] >= sum(FULL) // BLOCK_TOKENS
        assert loaded(writer) == (0, 0, 0)

        warm = one_by_one(reader, prompts)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert_same(warm, cold)
        once = loaded(reader)
        assert once.tokens == sum(FULL) and once.blocks >= sum(FULL) // BLOCK_TOKENS and once.nbytes > 0
        # The engine's count is of both pools: bytes that the second had sent would be missing from the first's.
        assert_sent(once.nbytes, first)
        assert not sent_bytes(second), "the pool that was not chosen has been read"
        drain(reader)

        assert clear(first) > 0
        warm = one_by_one(reader, prompts)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert_same(warm, cold)
        assert loaded(reader) == tuple(2 * each for each in once)
        assert_sent(once.nbytes, second)
        assert sent_bytes(first) == once.nbytes
        drain(reader)


@pytest.mark.parametrize("ours", ["first", "second"])
def test_beside_another_connector(ours: str, pool_server: StartServer, tmp_path: Path, shapes_dir: Path) -> None:
    server = pool_server("--memory", "64MiB", "--grace-ms", "100")
    kvpool = kvpool_transfer_config(server.endpoint, **PATIENT)
    files = tmp_path / "files"
    example = example_connector(files)
    order = [kvpool, example] if ours == "first" else [example, kvpool]
    spec = EngineSpec(write("llama", shapes_dir), multi(*order), FLOAT32, in_process=True)
    prompts = [prompt(length, f"beside {length}") for length in LENGTHS]
    with running(tmp_path, spec) as (engine,):
        cold = one_by_one(engine, prompts)
        drain(engine)
        assert pool_stats(server).num_entries >= sum(FULL) // BLOCK_TOKENS and any(files.iterdir())
        assert loaded(engine) == (0, 0, 0)
        warm = one_by_one(engine, prompts)
        assert_same(warm, cold)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert loaded(engine)[:2] == (FROM_POOL if ours == "first" else (0, 0))
        drain(engine)
        # Without the first, the second.
        if ours == "first":
            assert clear(server) > 0
        else:
            shutil.rmtree(files)
            files.mkdir()
        warm = one_by_one(engine, prompts)
        assert_same(warm, cold)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert loaded(engine)[:2] == FROM_POOL
        drain(engine)
        wait_until_nothing_is_held(server)
