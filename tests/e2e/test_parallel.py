"""Engines of several ranks share blocks whatever their number: each rank reads and writes its own shards, and each
pipeline stage its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import Engine, EngineSpec, kvpool_transfer_config
from benchmarks.tiny_models import write
from tests.e2e.conftest import (
    FLOAT32,
    PATIENT,
    assert_same,
    drain,
    hit_tokens,
    one_by_one,
    prompt,
    running,
)
from tests.support.processes import ServerProcess

pytestmark = pytest.mark.vllm

LENGTHS = (33, 500, 1024)
FULL = [hit_tokens(length) for length in LENGTHS]


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.more), "gemma3"])
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shapes_dir: Path,
    e2e_server: ServerProcess,
) -> Iterator[tuple[Engine, Engine]]:
    """One rank, and two."""
    model = write(request.param, shapes_dir)
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="parallel", **PATIENT)
    one = EngineSpec(model, transfer, FLOAT32, in_process=True)
    two = EngineSpec(model, transfer, {**FLOAT32, "tensor_parallel_size": 2})
    with running(tmp_path_factory.mktemp("parallel"), one, two) as (single, parallel):
        yield single, parallel


@pytest.mark.parametrize("writer", ["one rank", "two ranks"])
def test_what_one_size_stores_the_other_loads(writer: str, pair: tuple[Engine, Engine]) -> None:
    store, load = pair if writer == "one rank" else pair[::-1]
    prompts = [prompt(length, f"{writer} {length}") for length in LENGTHS]
    cold = one_by_one(store, prompts)
    assert [answer.cached_tokens for answer in cold] == [0, 0, 0]
    drain(store)
    warm = one_by_one(load, prompts)
    assert [answer.cached_tokens for answer in warm] == FULL
    assert_same(warm, cold, tolerance=1e-3)
    drain(load)


def test_two_ranks_load_bit_for_bit_what_they_stored(pair: tuple[Engine, Engine]) -> None:
    assert_loads_what_it_stored(pair[1])


def test_two_stages_load_bit_for_bit_what_they_stored(
    tmp_path: Path, shapes_dir: Path, e2e_server: ServerProcess
) -> None:
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="stages", **PATIENT)
    spec = EngineSpec(write("llama", shapes_dir), transfer, {**FLOAT32, "pipeline_parallel_size": 2})
    with running(tmp_path, spec) as (staged,):
        assert_loads_what_it_stored(staged)


def assert_loads_what_it_stored(engine: Engine) -> None:
    text = prompt(700, "stored and loaded")
    engine.generate([text])
    own_cache = engine.generate([text])[0]
    drain(engine)
    loaded = engine.generate([text])[0]
    assert own_cache.cached_tokens == loaded.cached_tokens == hit_tokens(700)
    assert (loaded.tokens, loaded.logprobs) == (own_cache.tokens, own_cache.logprobs)
    drain(engine)
