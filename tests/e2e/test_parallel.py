"""Engines of several ranks share blocks whatever their number: each rank reads and writes its own shards.

Pipeline stages are tested on GPUs (`tests/gpu/test_parallel.py`) and on the toy engine: with two stages vLLM's CPU
build dies in its first step, with a pool or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import (
    FLOAT32,
    MORE,
    NEEDS_FP8_KV,
    PATIENT,
    assert_same,
    hit_tokens,
    prompt,
    running,
    wait_until_nothing_is_held,
)
from tests.e2e.test_shapes import SHAPES
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain, one_by_one

# With other engines beside them, two ranks on two cores take minutes to start.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

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


@pytest.mark.more
def test_layers_with_more_heads_than_the_model_names_come_back_whole(
    tmp_path: Path, shapes_dir: Path, pool_server: StartServer
) -> None:
    """With two ranks, each layer of MiMo V2 has one KV head on each: the same one, or two."""
    server = pool_server("--memory", "256MiB", "--grace-ms", "100")
    options = {**FLOAT32, "tensor_parallel_size": 2}
    spec = EngineSpec(write("mimo_v2", shapes_dir), kvpool_transfer_config(server.endpoint, **PATIENT), options)
    prompts = [prompt(length, f"heads {length}") for length in LENGTHS]
    with running(tmp_path, spec) as (engine,):
        cold = one_by_one(engine, prompts)
        drain(engine)
        warm = one_by_one(engine, prompts)
        assert [answer.cached_tokens for answer in warm] == FULL
        assert_same(warm, cold, tolerance=1e-3)
        drain(engine)
    wait_until_nothing_is_held(server)


STATES = ("qwen3_next", "granite_hybrid", "falcon_h1", "mamba2")
"""A rank's part of their states is opaque: other sizes do not share it."""


@pytest.mark.more
@pytest.mark.parametrize(
    # Gemma 3 is above; the one key head of Qwen3-Next's linear attention cannot be cut in two.
    "shape",
    [
        pytest.param(name, marks=NEEDS_FP8_KV if name == "llama" else ())
        for name in SHAPES
        if name not in ("gemma3", "qwen3_next")
    ],
)
def test_two_ranks_of_every_shape(shape: str, tmp_path: Path, shapes_dir: Path, pool_server: StartServer) -> None:
    """What two ranks store they load, and one rank of a model without states loads, too."""
    alignment, options = SHAPES[shape]
    server = pool_server("--memory", "256MiB", "--grace-ms", "100")
    model, transfer = write(shape, shapes_dir), kvpool_transfer_config(server.endpoint, **PATIENT)
    options = {**FLOAT32, "enable_prefix_caching": True, **options}
    specs = [EngineSpec(model, transfer, {**options, "tensor_parallel_size": 2})]
    if shape not in STATES:
        specs.append(EngineSpec(model, transfer, options, in_process=True))
    prompts = [prompt(length, f"{shape} on two ranks: {length}") for length in (97, 400)]
    full = [(len(each) - 1) // alignment * alignment for each in prompts]
    tolerance = 2e-2 if options["dtype"] == "bfloat16" else 1e-3
    with running(tmp_path, *specs) as engines:
        cold = one_by_one(engines[0], prompts)
        assert [answer.cached_tokens for answer in cold] == [0, 0]
        drain(engines[0])
        for engine in engines:
            warm = one_by_one(engine, prompts)
            assert [answer.cached_tokens for answer in warm] == full
            assert_same(warm, cold, tolerance)
            drain(engine)
    wait_until_nothing_is_held(server)
