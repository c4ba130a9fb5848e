"""What cannot work fails at the start, in one sentence that says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from testbed.engine import Engine, EngineError, EngineSpec, kvpool_transfer_config
from testbed.ports import free_endpoint
from testbed.tiny_models import write
from tests.e2e.conftest import FLOAT32, MORE

pytestmark = pytest.mark.vllm

SHORT_STEPS = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "unknown key": (
        "llama",
        {"transprt": "shm"},
        {},
        r"kv_connector_extra_config: unknown key 'transprt'; did you mean 'transport'\?",
    ),
    "neither prefix caching nor chunked prefill": (
        "deepseek_v2",
        {},
        {"attention_backend": "CPU_MLA"},  # With AMX vLLM prefers another one, for which it enables both.
        r"cannot resume \S*deepseek_v2 from a loaded prefix: neither prefix caching nor chunked prefill is enabled; "
        r"enable one, or, where the platform supports neither, serve without kvpool",
    ),
    "states that are not kept": (
        "granite_hybrid",
        {},
        {**SHORT_STEPS, "enable_prefix_caching": False},
        r"does not serve \S*granite_hybrid: its KV-cache group 0 \(MambaSpec, \d layers\) keeps states with "
        r"mamba_cache_mode = 'none'; start vLLM with --enable-prefix-caching --mamba-cache-mode align",
    ),
    "images named by a counter": (
        "idefics3",
        {},
        {"skip_tokenizer_init": False, "enable_prefix_caching": False, "mm_processor_cache_gb": 0},
        r"vLLM names images by a counter, .* with prefix caching off and mm_processor_cache_gb = 0, so that two images "
        r"would share blocks; leave one of the two on",
    ),
    "stage without a layer of a group": (
        "gemma3",
        {},
        {"pipeline_parallel_size": 2},
        r"a pipeline stage has no layer of KV-cache group \(5,\) \(full_attention\); KVPoolConnector needs at least "
        r"one in each: use fewer stages, or set VLLM_PP_LAYER_PARTITION",
    ),
}
"""What -> shape, settings of the connector, options of vLLM, and what is said."""
OFTEN = ("unknown key", "states that are not kept")
"""Each needs an engine: `make test-all` tries the others."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else MORE) for name in REFUSED])
def test_the_log_says_why(name: str, tmp_path: Path, shapes_dir: Path) -> None:
    shape, extra, options, sentence = REFUSED[name]
    transfer = kvpool_transfer_config(free_endpoint(), **extra)
    options = {**FLOAT32, "max_model_len": 1024, **options}
    log_path = tmp_path / "engine.log"
    spec = EngineSpec(write(shape, shapes_dir), transfer, options, in_process="pipeline_parallel_size" not in options)
    with pytest.raises(EngineError):
        Engine(spec, log_path).stop()
    log = log_path.read_text(errors="replace")
    assert re.search(f"kvpool.protocol.errors.ConfigError: .*{sentence}", log), log[-4_000:]
