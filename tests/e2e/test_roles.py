"""A producer stores and never loads, a consumer loads and never stores. In bfloat16, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.conftest import FLOAT32, PATIENT, hit_tokens, pool_stats, prompt, running
from tests.support.faults import stopped
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

LENGTHS = (33, 320, 900)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engines(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shapes_dir: Path,
    e2e_server: ServerProcess,
) -> Iterator[list[Engine]]:
    """A producer and a consumer."""
    model = write(request.param, shapes_dir)
    specs = [
        EngineSpec(
            model,
            kvpool_transfer_config(e2e_server.endpoint, role=role, salt="roles", **PATIENT),
            {**FLOAT32, "dtype": "bfloat16"},
        )
        for role in ("kv_producer", "kv_consumer")
    ]
    with running(tmp_path_factory.mktemp("roles"), *specs) as started:
        yield started


def test_each_does_its_half_and_no_more(engines: list[Engine], e2e_server: ServerProcess) -> None:
    producer, consumer = engines
    prompts = [prompt(length, f"roles {length}") for length in LENGTHS]
    before = pool_stats(e2e_server).num_entries
    for text in prompts:
        producer.generate([text])
    own_cache = [producer.generate([text])[0] for text in prompts]
    drain(producer)
    stored = pool_stats(e2e_server).num_entries - before
    assert stored >= sum(length // BLOCK_TOKENS for length in LENGTHS)

    # The producer's own cache is empty now, and the pool is not: it computes all the same.
    assert [answer.cached_tokens for answer in producer.generate(prompts)] == [0, 0, 0]
    drain(producer)

    loaded = [consumer.generate([text])[0] for text in prompts]
    assert [answer.cached_tokens for answer in loaded] == [hit_tokens(length) for length in LENGTHS]
    # A prompt that the producer had whole was answered by the same kernels over the same bytes.
    for answer, own in zip(loaded, own_cache, strict=True):
        if own.cached_tokens == answer.cached_tokens:
            assert (answer.tokens, answer.logprobs) == (own.tokens, own.logprobs)
    assert own_cache[0].cached_tokens == loaded[0].cached_tokens
    consumer.generate([prompt(500, "the consumer's own")])
    drain(consumer)
    assert pool_stats(e2e_server).num_entries - before == stored


def test_they_end_though_the_pool_does_not_answer(engines: list[Engine], e2e_server: ServerProcess) -> None:
    """Last: the engines are gone afterwards."""
    with stopped(e2e_server):
        started = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Engine.stop, engines))
        assert time.monotonic() - started < 25, "the engines had to be killed"
    for engine in engines:
        assert "Traceback" not in engine.log().partition("[shutdown]")[2]
