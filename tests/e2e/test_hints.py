"""A request of real vLLM pins its prompt. Expiry and prefetches: `tests/vllm_plugin/scheduler/test_hints.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from testbed.engine import BLOCK_TOKENS, EngineSpec, kvpool_transfer_config
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, PATIENT, assert_same, hit_tokens, pool_stats, prompt, running
from tests.support.processes import wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

TOKENS = 500


def test_a_request_pins_its_prompt(model: Path, tmp_path: Path, pool_server: StartServer) -> None:
    """The pool's memory has room for four prompts with their answers."""
    flags = ("--memory", "8MiB", "--policy", "lru", "--pin-budget", "50%", "--grace-ms", "100")
    server, pinned = pool_server(*flags), prompt(TOKENS, "a system prompt")
    spec = EngineSpec(model, kvpool_transfer_config(server.endpoint, **PATIENT), FLOAT32, in_process=True)
    with running(tmp_path, spec) as (engine,):
        hints = {"kvpool": {"pin_s": 600, "colour": "red"}}
        (right,) = engine.generate([pinned], extra_args={"kv_transfer_params": hints})
        drain(engine)
        assert "unknown key 'colour'; give pin_s, expire or prefetch" in engine.log()
        with Client(ClientConfig(server.endpoint, timeout_ms=60_000)) as client:
            group = client.admin.namespaces()[0].spec.groups[0]
        nbytes = TOKENS // BLOCK_TOKENS * group.num_shards * group.chunk_bytes
        wait_for(lambda: pool_stats(server).pinned_bytes == nbytes, "the prompt's blocks to be pinned", 60)
        for nth in range(6):
            engine.generate([prompt(TOKENS, f"not pinned {nth}")])
            drain(engine)
        assert pool_stats(server).counters["evicted_blocks"] > 0
        (answer,) = engine.generate([pinned])
        drain(engine)
    assert_same([answer], [right])
    assert answer.cached_tokens == hit_tokens(TOKENS), "the prompt was evicted"
    assert pool_stats(server).counters["pin_given_back_blocks"] == 0
