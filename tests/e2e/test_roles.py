"""A producer stores and never loads, a consumer loads and never stores. In bfloat16, to the bit."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.engine import Engine, kvpool_transfer_config
from tests.e2e.conftest import PATIENT, StartEngines, drain, hit_tokens, pool_stats, prompt
from tests.support.processes import ServerProcess
from tests.vllm_plugin.faults import stopped

pytestmark = pytest.mark.vllm

LENGTHS = (33, 320, 900)


@pytest.fixture(scope="module")
def engines(start_engines: StartEngines, e2e_server: ServerProcess) -> list[Engine]:
    transfers = [
        kvpool_transfer_config(e2e_server.endpoint, role=role, salt="roles", **PATIENT)
        for role in ("kv_producer", "kv_consumer")
    ]
    return start_engines(*transfers, options=[{"dtype": "bfloat16"}] * 2)


def test_each_does_its_half_and_no_more(engines: list[Engine], e2e_server: ServerProcess) -> None:
    producer, consumer = engines
    prompts = [prompt(length, f"roles {length}") for length in LENGTHS]
    before = pool_stats(e2e_server).num_entries
    for text in prompts:
        producer.generate([text])
    own_cache = [producer.generate([text])[0] for text in prompts]
    drain(producer)
    stored = pool_stats(e2e_server).num_entries - before
    assert stored >= sum(length // 32 for length in LENGTHS)

    # The producer's own cache is empty now, and the pool is not: it computes all the same.
    assert [answer.cached_tokens for answer in producer.generate(prompts)] == [0, 0, 0]
    drain(producer)

    loaded = [consumer.generate([text])[0] for text in prompts]
    assert [answer.cached_tokens for answer in loaded] == [hit_tokens(length) for length in LENGTHS]
    assert [(answer.tokens, answer.logprobs) for answer in loaded] == [
        (answer.tokens, answer.logprobs) for answer in own_cache
    ]
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
