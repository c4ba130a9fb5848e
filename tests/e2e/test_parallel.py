"""Engines of several ranks share blocks whatever their number: each rank reads and writes its own shards.

Pipeline stages are tested on GPUs (`tests/gpu/test_parallel.py`) and on the toy engine: with two stages vLLM's CPU
build dies in its first step, with a pool or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import Engine, EngineSpec, kvpool_transfer_config
from benchmarks.tiny_models import write
from tests.e2e.conftest import (
    FLOAT32,
    MORE,
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


@pytest.fixture(
    scope="module",
    # Llama 4's constructor writes into the configuration of the processes that build the model: the ranks', not the
    # scheduler's.
    params=["llama4", *(pytest.param(shape, marks=MORE) for shape in ("llama", "gemma3"))],
)
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
    _, parallel = pair
    text = prompt(700, "two ranks, twice")
    parallel.generate([text])
    own_cache = parallel.generate([text])[0]
    drain(parallel)
    loaded = parallel.generate([text])[0]
    assert own_cache.cached_tokens == loaded.cached_tokens == hit_tokens(700)
    assert (loaded.tokens, loaded.logprobs) == (own_cache.tokens, own_cache.logprobs)
    drain(parallel)
