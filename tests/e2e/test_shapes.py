"""Every shape of model that vLLM's CPU build runs with a prefix cache: what one engine has computed another loads, and
answers as if it had computed it, also when some of it has gone bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.engine import EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, MORE, NEEDS_FP8_KV, PATIENT, assert_same, prompt, running
from tests.support.faults import flip_arena
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

BFLOAT16 = {"dtype": "bfloat16"}
SHORT_STEPS = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
"""Without them vLLM's Mamba2 kernel for CPUs fails: a step must not be longer than a block."""

SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "gemma3": (32, {}),
    "gpt_oss": (32, {}),
    "gemma4": (64, {}),
    "mistral": (32, {}),
    "llama4": (32, {}),
    "qwen3_next": (96, BFLOAT16),
    "granite_hybrid": (96, SHORT_STEPS),
    "falcon_h1": (96, SHORT_STEPS),
    "mamba2": (32, {**SHORT_STEPS, "max_num_batched_tokens": 32}),
    "llama": (32, {"kv_cache_dtype": "fp8"}),
}
"""Shape -> what a hit is a multiple of, and engine options."""

OFTEN_ENOUGH = ("gpt_oss", "gemma4", "mistral", "falcon_h1", "mamba2")
"""Their kinds of KV cache are in others, too; `make test-all` runs them."""
MARKS = {**dict.fromkeys(OFTEN_ENOUGH, MORE), "llama": NEEDS_FP8_KV}

LENGTHS = (31, 97, 400, 1000)


@pytest.mark.parametrize("shape", [pytest.param(name, marks=MARKS.get(name, ())) for name in SHAPES])
def test_what_one_engine_computed_another_loads(
    shape: str, tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, pool_server: StartServer
) -> None:
    _, options = SHAPES[shape]
    server = pool_server("--memory", "256MiB", "--grace-ms", "100")
    model = write(shape, shapes_dir)
    arguments = {**FLOAT32, "enable_prefix_caching": True, **options}
    specs = [
        EngineSpec(
            model, kvpool_transfer_config(server.endpoint, transport=each, **PATIENT), arguments, in_process=True
        )
        for each in ("shm", "tcp")
    ]
    prompts = [prompt(length, f"{shape} {length}") for length in LENGTHS]
    with running(tmp_path_factory.mktemp(shape), *specs) as (writer, reader):
        alignment = writer.call("tests.e2e.inside:alignment")  # Of states it depends on the CPU.
        full = [(length - 1) // alignment * alignment for length in LENGTHS]
        cold = one_by_one(writer, prompts)
        assert [answer.cached_tokens for answer in cold] == [0] * len(LENGTHS)
        own = one_by_one(writer, prompts)
        drain(writer)
        warm = one_by_one(reader, prompts)
        assert [answer.cached_tokens for answer in warm] == full
        assert_same(warm, cold, tolerance=1e-3)
        if [answer.cached_tokens for answer in own] == full:  # The same kernels over the same bytes.
            assert [answer.logprobs for answer in warm] == [answer.logprobs for answer in own]
        # A prompt that goes on after the end of another, and one that parts from it in the middle.
        longer = [prompts[3] + prompt(150, "more"), prompts[3][:700] + prompt(150, "other")]
        expected = one_by_one(writer, longer)
        drain(writer)
        drain(reader)
        loaded = one_by_one(reader, longer)
        assert_same(loaded, expected, tolerance=1e-3)
        assert loaded[0].cached_tokens >= 1000 // alignment * alignment
        flip_arena(server)
        drain(reader)
        assert_same(one_by_one(reader, prompts), cold, tolerance=1e-3)
        drain(reader)
