"""What cannot work fails at the start, in one sentence that says what to do."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.engine import Engine, EngineError, EngineSpec, kvpool_transfer_config
from tests.vllm_plugin.faults import free_endpoint

pytestmark = pytest.mark.vllm

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "torch_dtype": "bfloat16",
}
REFUSED = {
    "hybrid model": r"serves models with one full-attention KV-cache group; \S*hybrid has group 0: .*SlidingWindowSpec",
    "unknown key": r"kv_connector_extra_config: unknown key 'transprt'; did you mean 'transport'\?",
    "hash algorithm": r"prefix_caching_hash_algo = 'sha256' may name .* start vLLM with "
    r"--prefix-caching-hash-algo sha256_cbor",
}


@pytest.fixture(scope="module")
def logs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the engines logged before they gave up; all of them start at once."""
    directory = tmp_path_factory.mktemp("refusals")
    hybrid = directory / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text(json.dumps(GEMMA))
    transfer = kvpool_transfer_config(free_endpoint())
    options = {"max_model_len": 1024}
    specs = {
        "hybrid model": EngineSpec(hybrid, transfer, {**options, "load_format": "dummy"}),
        "unknown key": EngineSpec(model, kvpool_transfer_config(free_endpoint(), transprt="shm"), options),
        "hash algorithm": EngineSpec(model, transfer, {**options, "prefix_caching_hash_algo": "sha256"}),
    }

    def refused(name: str) -> str:
        log_path = directory / f"{name}.log"
        with pytest.raises(EngineError):
            Engine(specs[name], log_path).stop()
        return log_path.read_text(errors="replace")

    with ThreadPoolExecutor(len(specs)) as threads:
        return dict(zip(specs, threads.map(refused, specs), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_the_log_says_why(name: str, logs: dict[str, str]) -> None:
    assert re.search(f"kvpool.errors.ConfigError: .*{REFUSED[name]}", logs[name]), logs[name][-4_000:]
