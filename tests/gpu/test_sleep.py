"""Sleep mode: the engine's memory is given back and comes back empty; the pool's blocks are there all the time."""

import random
from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.support.real_engines import drain, wait_until_connected

pytestmark = pytest.mark.gpu

OPTIONS = {
    "block_size": 16,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,
    "enable_sleep_mode": True,
}


def test_an_engine_that_wakes_with_the_same_weights_reads_on(pool_server, tmp_path: Path):
    server = pool_server("--memory", "1GiB")
    transfer = kvpool_transfer_config(server.endpoint, lookup_timeout_ms=5_000, decline_slow_loads=False)
    picks = random.Random("sleep")
    prompt = [picks.randrange(10, 2000) for _ in range(1500)]
    with Engine(EngineSpec(write("gemma2", tmp_path), transfer, OPTIONS), tmp_path / "engine.log") as engine:
        wait_until_connected(engine, transfer)
        cold = engine.generate([prompt])[0]
        own = engine.generate([prompt])[0]
        drain(engine)
        for _ in range(2):
            engine.sleep()
            engine.wake_up()
            again = engine.generate([prompt])[0]
            assert again.cached_tokens == 1488
            assert again.tokens == cold.tokens
            assert again.logprobs == own.logprobs
