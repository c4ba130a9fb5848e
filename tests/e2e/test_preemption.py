"""An engine with too few blocks for its requests: they are preempted, come back, and load what they had stored."""

from __future__ import annotations

import pytest

from testbed.engine import Engine, kvpool_transfer_config
from tests.e2e.conftest import PATIENT, StartEngines, assert_same, prompt, wait_until_nothing_is_held
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

SHARED = prompt(200, "preemption")
PROMPTS = [SHARED[: 50 * (nth % 5)] + prompt(60 + 10 * nth, f"preempted {nth}") for nth in range(16)]
MAX_TOKENS = 70


@pytest.fixture(scope="module")
def cramped(start_engines: StartEngines, e2e_server: ServerProcess) -> Engine:
    """39 blocks of 32 tokens, for sixteen requests that want about 140."""
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="preemption", **PATIENT)
    options = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_seqs": 16}
    return start_engines(transfer, options=[options])[0]


def test_preempted_requests_answer_as_without_kvpool(
    cramped: Engine, plain_engine: Engine, e2e_server: ServerProcess
) -> None:
    expected = plain_engine.generate(PROMPTS, MAX_TOKENS)
    cold = cramped.generate(PROMPTS, MAX_TOKENS)
    assert_same(cold, expected)
    drain(cramped)
    warm = cramped.generate(PROMPTS, MAX_TOKENS)
    assert_same(warm, expected)
    drain(cramped)
    assert sum(answer.cached_tokens for answer in warm) > sum(answer.cached_tokens for answer in cold)
    assert cramped.metrics()["vllm:num_preemptions"] > 0, "the test wants preemption"
    wait_until_nothing_is_held(e2e_server)
