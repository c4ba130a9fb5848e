"""Every shape of model on a GPU: what the CPU build of vLLM cannot run (MLA, Mamba1), and what it runs otherwise: the
V2 model runner, asynchronous scheduling, layouts with tokens before heads, states in CUDA kernels, draft models."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from testbed.engine import Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.support.real_engines import drain, one_by_one, wait_until_connected

pytestmark = pytest.mark.gpu

COMMON: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,  # Others may be using the GPU: nothing is inferred from what is free.
    "enable_prefix_caching": True,
}
TRITON = {"attention_backend": "TRITON_ATTN"}
FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", TRITON),
    "gemma4": ("gemma4", TRITON),
    "gpt-oss": ("gpt_oss", {}),
    "mistral": ("mistral", {}),
    "llama4": ("llama4", {}),
    "deepseek": ("deepseek_v2", {"block_size": 64}),
    "qwen3-next": ("qwen3_next", {"gdn_prefill_backend": "triton"}),
    "granite": ("granite_hybrid", {}),
    "jamba": ("jamba", {}),
    "mamba2": ("mamba2", {}),
    "fp8 cache": ("llama", {"kv_cache_dtype": "fp8"}),
    "fp8 weights": ("llama", {"quantization": "fp8"}),
    "mtp": ("glm4_moe", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
    "eagle": ("llama", {**FLOAT32, "speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}),
    "eagle3": ("llama", {**FLOAT32, "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}),
}
OVER_TCP = ("gemma3", "llama4", "deepseek", "qwen3-next", "fp8 cache")
"""One shape of each kind of group: full attention, windows, chunks, MLA, states; and elements of one byte."""

LENGTHS = (100, 700, 1500, 3000)


def prompts_of(shape: str) -> list[list[int]]:
    picks = random.Random(shape)
    return [[picks.randrange(10, 2000) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(
    ("shape", "transport"), [(shape, "shm") for shape in SHAPES] + [(shape, "tcp") for shape in OVER_TCP]
)
def test_a_load_is_what_the_engine_would_have_had(pool_server, shape: str, transport: str, tmp_path: Path):
    name, options = SHAPES[shape]
    model = write(name, tmp_path)
    options = {**COMMON, **options}
    if options.get("speculative_config", {}).get("method", "").startswith("eagle"):
        head = str(write(options["speculative_config"]["method"], tmp_path))
        options["speculative_config"] = {**options["speculative_config"], "model": head}
    server = pool_server("--memory", "2GiB")
    extra = {"lookup_timeout_ms": 5_000, "load_timeout_ms": 20_000, "decline_slow_loads": False}
    extra["transport"] = transport
    transfer = kvpool_transfer_config(server.endpoint, **extra)
    spec = EngineSpec(model, transfer, options, in_process=True)
    prompts = prompts_of(shape)
    with Engine(spec, tmp_path / "writer.log") as writer:
        wait_until_connected(writer, transfer)
        cold = one_by_one(writer, prompts)
        own = one_by_one(writer, prompts)
        drain(writer)
    with Engine(spec, tmp_path / "reader.log") as reader:
        wait_until_connected(reader, transfer)
        pooled = one_by_one(reader, prompts)
    told = {
        "cold": [answer.cached_tokens for answer in cold],
        "own": [answer.cached_tokens for answer in own],
        "pooled": [answer.cached_tokens for answer in pooled],
    }
    print(shape, json.dumps(told))
    assert told["cold"] == [0] * len(LENGTHS)
    assert told["pooled"] == told["own"] and min(told["pooled"][1:]) > 0
    # The same kernels over the same bytes: not a bit may differ, unless drafts make batches of other shapes.
    tolerance = 1e-3 if "speculative_config" in options else 0.0
    for mine, theirs in zip(own, pooled, strict=True):
        assert theirs.tokens == mine.tokens
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=tolerance)
