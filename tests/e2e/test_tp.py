"""Engines of different tensor-parallel sizes share blocks: each rank reads and writes its own shards."""

from __future__ import annotations

import pytest

from benchmarks.engine import Engine, kvpool_transfer_config
from tests.e2e.conftest import PATIENT, StartEngines, assert_same, drain, hit_tokens, prompt
from tests.support.processes import ServerProcess

pytestmark = pytest.mark.vllm

LENGTHS = (33, 500, 1024)


@pytest.fixture(scope="module")
def parallel_engine(start_engines: StartEngines, e2e_server: ServerProcess) -> Engine:
    """Two ranks."""
    transfer = kvpool_transfer_config(e2e_server.endpoint, **PATIENT)
    return start_engines(transfer, options=[{"tensor_parallel_size": 2}])[0]


@pytest.mark.parametrize("writer", ["one rank", "two ranks"])
def test_what_one_size_stores_the_other_loads(
    writer: str, engine: Engine, parallel_engine: Engine, plain_engine: Engine
) -> None:
    store, load = (engine, parallel_engine) if writer == "one rank" else (parallel_engine, engine)
    prompts = [prompt(length, f"{writer} {length}") for length in LENGTHS]
    expected = plain_engine.generate(prompts)
    assert_same(store.generate(prompts), expected, tolerance=1e-3)
    drain(store)
    loaded = load.generate(prompts)
    assert [answer.cached_tokens for answer in loaded] == [hit_tokens(length) for length in LENGTHS]
    assert_same(loaded, expected, tolerance=1e-3)
    drain(load)


def test_two_ranks_load_bit_for_bit_what_they_stored(parallel_engine: Engine) -> None:
    text = prompt(700, "two ranks, twice")
    parallel_engine.generate([text])
    own_cache = parallel_engine.generate([text])[0]
    drain(parallel_engine)
    loaded = parallel_engine.generate([text])[0]
    assert own_cache.cached_tokens == loaded.cached_tokens == hit_tokens(700)
    assert (loaded.tokens, loaded.logprobs) == (own_cache.tokens, own_cache.logprobs)
    drain(parallel_engine)
