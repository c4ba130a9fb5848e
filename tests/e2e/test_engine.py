"""The engines of `testbed`: warmed up, and forked ones answer as executed ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.forked_process import FORK_SERVER
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, PATIENT, pool_stats, prompt, running
from tests.support.real_engines import one_by_one

pytestmark = pytest.mark.vllm


def test_an_engine_has_computed_many_tokens_in_a_step_and_its_pool_knows_none(
    pool_server: StartServer, model: Path, tmp_path: Path
) -> None:
    server = pool_server()
    spec = EngineSpec(model, kvpool_transfer_config(server.endpoint, **PATIENT), FLOAT32, in_process=True)
    with running(tmp_path, spec) as (engine,):
        metrics = engine.metrics()
        assert metrics["vllm:prompt_tokens"] >= 64
        assert metrics["vllm:generation_tokens"] > metrics["vllm:iteration_tokens_total_count"], "one after the other"
        assert metrics["vllm:kvpool_lookups"] == metrics["vllm:kvpool_stored_blocks"] == 0
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        stats = pool_stats(server)
        assert stats.num_entries == stats.num_incomplete == 0
        (answer,) = engine.generate([[5] * 100])
        assert answer.cached_tokens == 0


def test_a_forked_engine_answers_as_an_executed_one(
    plain_engine: Engine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(length, f"executed {length}") for length in (1, 40, 500)]
    forked = one_by_one(plain_engine, prompts)
    monkeypatch.delenv(FORK_SERVER)
    with Engine(EngineSpec(model, None, FLOAT32, in_process=True), tmp_path / "engine.log") as engine:
        executed = one_by_one(engine, prompts)
    assert [(answer.tokens, answer.logprobs) for answer in forked] == [
        (answer.tokens, answer.logprobs) for answer in executed
    ]
