"""Several GPUs: tensor-parallel sizes share blocks, pipeline stages have their own, MLA is written once."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.support.real_engines import drain, one_by_one, wait_until_connected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COMMON: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,
    "enable_prefix_caching": True,
}
FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "windows, one rank to two": ("gemma3", FLOAT32, {}, TP2),
    "windows, two ranks to one": ("gemma3", FLOAT32, TP2, {}),
    "windows, two stages": ("gemma2", FLOAT32, PP2, PP2),
    "MLA, two ranks": ("deepseek_v2", {"block_size": 64}, TP2, TP2),
    "MLA, two ranks to one": ("deepseek_v2", {"block_size": 64}, TP2, {}),
    "states, two ranks": ("granite_hybrid", {}, TP2, TP2),
}
LENGTHS = (700, 3000)


@pytest.mark.parametrize("pair", PAIRS)
def test_what_some_ranks_store_others_load(pool_server, pair: str, tmp_path: Path):
    name, options, writers, readers = PAIRS[pair]
    model, server = write(name, tmp_path), pool_server("--memory", "2GiB")
    extra = {"lookup_timeout_ms": 5_000, "load_timeout_ms": 20_000, "decline_slow_loads": False}
    transfer = kvpool_transfer_config(server.endpoint, **extra)
    picks = random.Random(pair)
    prompts = [[picks.randrange(10, 2000) for _ in range(length)] for length in LENGTHS]
    with Engine(EngineSpec(model, transfer, {**COMMON, **options, **writers}), tmp_path / "writer.log") as writer:
        writer.generate([prompts[0][:100]])
        wait_until_connected(writer, transfer)
        one_by_one(writer, prompts)
        own = one_by_one(writer, prompts)
        drain(writer)
    with Engine(EngineSpec(model, transfer, {**COMMON, **options, **readers}), tmp_path / "reader.log") as reader:
        reader.generate([prompts[0][:15]])
        wait_until_connected(reader, transfer)
        pooled = one_by_one(reader, prompts)
    assert [answer.cached_tokens for answer in pooled] == [answer.cached_tokens for answer in own]
    assert min(answer.cached_tokens for answer in pooled) >= 640
    for mine, theirs in zip(own, pooled, strict=True):
        if writers == readers:
            assert (theirs.tokens, theirs.logprobs) == (mine.tokens, mine.logprobs)
        elif options == FLOAT32:  # Ranks add up in another order.
            assert theirs.tokens == mine.tokens
            assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-3)
        else:
            assert theirs.tokens[0] == mine.tokens[0]
            assert theirs.logprobs[0] == pytest.approx(mine.logprobs[0], abs=0.05)
