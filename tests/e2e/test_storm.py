"""Far too many requests at once, with far too few blocks, on full attention alone and with sliding windows.

They are preempted, their loads and stores cross each other, and what comes out is what comes out without a pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.engine import EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, MORE, PATIENT, assert_same, prompt, running, wait_until_nothing_is_held
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

SHARED = prompt(300, "storm")
PROMPTS = [SHARED[: 60 * (nth % 6)] + prompt(20 + 5 * (nth % 16), f"storm {nth}") for nth in range(64)]
MAX_TOKENS = 24
STORMS: dict[str, dict[str, Any]] = {
    "llama": {"num_gpu_blocks_override": 48},
    "gemma3": {"num_gpu_blocks_override": 240},
}
"""Shape -> options; the blocks are a third of what the requests want together."""


@pytest.mark.parametrize("shape", ["llama", pytest.param("gemma3", marks=MORE)])
def test_storm(shape: str, pool_server: StartServer, tmp_path: Path, shapes_dir: Path) -> None:
    options = {**FLOAT32, "max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    options |= {"enable_prefix_caching": True, **STORMS[shape]}
    # A pool that cannot hold all of it, either.
    server = pool_server("--memory", "8MiB", "--grace-ms", "100")
    model = write(shape, shapes_dir)
    pooled = EngineSpec(model, kvpool_transfer_config(server.endpoint, **PATIENT), options, in_process=True)
    plain = EngineSpec(model, None, options, in_process=True)
    with running(tmp_path, plain, pooled) as (without, engine):
        expected = without.generate(PROMPTS, MAX_TOKENS)
        for _ in range(2):
            answers = engine.generate(PROMPTS, MAX_TOKENS)
            assert_same(answers, expected, tolerance=1e-3)
            drain(engine)  # Succeeds only once every block is free again.
        metrics = engine.metrics()
        assert metrics["vllm:num_preemptions"] > 0, "the test wants preemption"
        assert metrics["vllm:kvpool_loaded_blocks"] > 0, "the test wants loads"
        wait_until_nothing_is_held(server)
