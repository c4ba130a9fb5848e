"""Models as vLLM can be told to run them: pooling, Transformers' own modelling code, blocks matched in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.engine import EngineSpec, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.conftest import FLOAT32, PATIENT, assert_same, hit_tokens, prompt, running, write_tokenizer
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

LENGTHS = (97, 400)
FULL = [hit_tokens(length) for length in LENGTHS]


def test_embeddings_of_a_pooling_model(tmp_path: Path, e2e_server: ServerProcess) -> None:
    """A prompt's KV is the same whether it is embedded or answered; only the last token's hidden state is wanted."""
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="embeddings", **PATIENT)
    options: dict[str, Any] = {
        **FLOAT32,
        "skip_tokenizer_init": False,
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"pooling_type": "LAST"},
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    model = write("llama", tmp_path)
    write_tokenizer(model)
    spec = EngineSpec(model, transfer, options, in_process=True)
    prompts = [prompt(length, f"embedded {length}") for length in LENGTHS]
    with running(tmp_path, spec, spec) as (writer, reader):
        cold = writer.call("tests.e2e.inside:embed", prompts)
        drain(writer)
        warm = reader.call("tests.e2e.inside:embed", prompts)
        drain(reader)
    assert [each["cached"] for each in cold] == [0, 0]
    assert [each["cached"] for each in warm] == FULL
    for each, other in zip(warm, cold, strict=True):
        assert each["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
    assert cold[0]["embedding"] != pytest.approx(cold[1]["embedding"], abs=1e-2)


def test_transformers_modelling_code(shapes_dir: Path, tmp_path: Path, e2e_server: ServerProcess) -> None:
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="transformers", **PATIENT)
    options = {**FLOAT32, "model_impl": "transformers"}
    # In processes of their own, as served: the model's constructor changes its configuration in the worker's alone.
    spec = EngineSpec(write("llama", shapes_dir), transfer, options)
    prompts = [prompt(length, f"transformers {length}") for length in LENGTHS]
    with running(tmp_path, spec, spec) as (writer, reader):
        cold = one_by_one(writer, prompts)
        own = one_by_one(writer, prompts)
        drain(writer)
        warm = one_by_one(reader, prompts)
        drain(reader)
    assert [each.cached_tokens for each in warm] == FULL
    assert_same(warm, cold)
    assert [each.logprobs for each in warm] == [each.logprobs for each in own]


@pytest.mark.parametrize(("shape", "unit"), [("gemma3", 8), ("gemma4", 16)])
def test_blocks_that_the_engine_matches_in_part(
    shape: str, unit: int, shapes_dir: Path, tmp_path: Path, e2e_server: ServerProcess
) -> None:
    """Names every `prefix_match_unit` tokens: the pool's blocks are named by their last one."""
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt=f"unit {unit}", **PATIENT)
    options = {**FLOAT32, "prefix_match_unit": unit}
    spec = EngineSpec(write(shape, shapes_dir), transfer, options, in_process=True)
    alignment = 64 if shape == "gemma4" else 32
    full = [(length - 1) // alignment * alignment for length in LENGTHS]
    prompts = [prompt(length, f"{shape} in units of {unit}: {length}") for length in LENGTHS]
    with running(tmp_path, spec, spec) as (writer, reader):
        cold = one_by_one(writer, prompts)
        drain(writer)
        warm = one_by_one(reader, prompts)
        assert [each.cached_tokens for each in warm] == full
        assert_same(warm, cold, tolerance=1e-3)
        # The engine's own hit may end where no block of the pool does.
        longer = [text[: length // 2 + 5] + prompt(100, "parts") for text, length in zip(prompts, LENGTHS, strict=True)]
        computed = one_by_one(writer, longer)
        drain(writer)
        assert_same(one_by_one(reader, longer), computed, tolerance=1e-3)
        drain(reader)
        assert_same(one_by_one(reader, longer), computed, tolerance=1e-3)
        drain(reader)
