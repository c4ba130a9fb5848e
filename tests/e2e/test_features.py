"""What a request or an engine may bring besides tokens: never shared where it differs, shared where it agrees.

Every test has a reader that has computed nothing, and compares it with the engine that computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from testbed.engine import Engine, EngineSpec, Prompt, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.conftest import FLOAT32, MORE, NEEDS_FP8_KV, PATIENT, assert_same, hit_tokens, prompt, running
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

LENGTH = 400
TEXT = prompt(LENGTH, "features")


def specs(model: Path, server: ServerProcess, *options: dict[str, Any]) -> list[EngineSpec]:
    """Engines of one process each, one an `options`."""
    transfer = kvpool_transfer_config(server.endpoint, **PATIENT)
    return [EngineSpec(model, transfer, {**FLOAT32, **each}, in_process=True) for each in options]


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, e2e_server: ServerProcess
) -> Iterator[tuple[Engine, Engine]]:
    """A writer and a reader that take adapters and embeddings."""
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prompt_embeds": True}
    logs = tmp_path_factory.mktemp("features")
    for name in ("lora_a", "lora_b"):
        write(name, shapes_dir)  # Adapters that are newer than an engine would not be shared.
    with running(logs, *specs(write("llama", shapes_dir), e2e_server, options, options)) as (writer, reader):
        yield writer, reader


@pytest.fixture
def kinds(request: pytest.FixtureRequest, shapes_dir: Path) -> list[Prompt]:
    """One text, three ways to mean it."""
    lora_a, lora_b = (str(write(name, shapes_dir)) for name in ("lora_a", "lora_b"))
    kinds: dict[str, list[Prompt]] = {
        "adapters": [Prompt(TEXT), Prompt(TEXT, lora=lora_a), Prompt(TEXT, lora=lora_b)],
        "salts": [Prompt(prompt(LENGTH, "salted"), cache_salt=salt) for salt in ("", "one", "other")],
        "embeddings": [Prompt(prompt(LENGTH, "embedded"), embeds_seed=seed) for seed in (None, 1, 2)],
        "adapter and salt": [
            Prompt(prompt(LENGTH, "both"), lora=lora, cache_salt=salt)
            for lora, salt in (("", ""), (lora_a, "one"), (lora_a, "other"))
        ],
    }
    return kinds[request.param]


# An answer of one token ends before anybody can have looked at its adapter's files.
@pytest.mark.parametrize(
    ("kinds", "max_tokens"),
    [("adapters", 1), ("salts", 8), ("embeddings", 8), ("adapter and salt", 8)],
    indirect=["kinds"],
)
def test_one_text_is_shared_by_those_who_mean_the_same(
    kinds: list[Prompt], max_tokens: int, pair: tuple[Engine, Engine]
) -> None:
    writer, reader = pair
    full = hit_tokens(LENGTH)
    # One after the other: what the first two have stored is there when the third asks.
    cold = []
    for each in kinds:
        cold += writer.generate([each], max_tokens)
        drain(writer)
    assert [answer.cached_tokens for answer in cold] == [0, 0, 0]
    drain(reader)
    warm = one_by_one(reader, kinds, max_tokens)
    assert [answer.cached_tokens for answer in warm] == [full] * 3
    assert_same(warm, cold)
    if not any(each.cache_salt for each in kinds):
        assert cold[0].logprobs != cold[1].logprobs != cold[2].logprobs, "a mix-up would not show"
    drain(reader)


SPECULATIVE: dict[str, tuple[str, dict[str, Any], int]] = {
    "ngram": ("llama", {"num_speculative_tokens": 3, "prompt_lookup_max": 4}, 0),
    "eagle": ("llama", {"num_speculative_tokens": 3}, 1),
    "eagle3": ("llama", {"num_speculative_tokens": 3}, 1),
    "mtp": ("glm4_moe", {"num_speculative_tokens": 1}, 1),
}
"""Method -> model, settings, and blocks that the core drops of every hit."""


@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name == "eagle" else MORE) for name in SPECULATIVE])
def test_speculative_decoding(
    method: str, tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, e2e_server: ServerProcess
) -> None:
    shape, settings, dropped = SPECULATIVE[method]
    if method.startswith("eagle"):
        settings = {**settings, "model": str(write(method, shapes_dir))}
    options = {"speculative_config": {"method": method, **settings}}
    pair = specs(write(shape, shapes_dir), e2e_server, options, options)
    repeating = prompt(20, "repeating") * 13
    prompts = [prompt(97, f"{method} 97"), prompt(LENGTH, method), repeating]
    hits = [max(0, hit_tokens(len(each)) - 32 * dropped) for each in prompts]
    with running(tmp_path_factory.mktemp(method), *pair) as (writer, reader):
        cold = one_by_one(writer, prompts, max_tokens=40)
        own = one_by_one(writer, prompts, max_tokens=40)
        drain(writer)
        warm = one_by_one(reader, prompts, max_tokens=40)
        assert [answer.cached_tokens for answer in cold] == [0, 0, 0]
        assert [answer.cached_tokens for answer in own] == [answer.cached_tokens for answer in warm] == hits
        assert_same(warm, cold)
        # What was decoded is shared, too, though some of it had been guessed wrongly before.
        drain(reader)
        next_turn = prompts[1] + cold[1].tokens + prompt(20, "next turn")
        loaded = reader.generate([next_turn])
        assert loaded[0].cached_tokens == (LENGTH + 39 - 32 * dropped) // 32 * 32
        drain(reader)
        drain(writer)
        assert_same(loaded, writer.generate([next_turn]))
        drain(writer)
        drain(reader)


TYPES_OF_KV: dict[str, dict[str, dict[str, Any]]] = {
    "of the model": {"float32": {}, "bfloat16": {"dtype": "bfloat16"}},
    "fp8": {"float32": {}, "fp8": {"kv_cache_dtype": "fp8"}, "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"}},
}


@pytest.mark.parametrize("types", ["of the model", pytest.param("fp8", marks=(MORE, NEEDS_FP8_KV))])
def test_each_type_of_kv_has_blocks_of_its_own(
    types: str, tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, e2e_server: ServerProcess
) -> None:
    """One engine after the other, each with all of what the others stored in the pool."""
    model, text = write("llama", shapes_dir), prompt(300, f"types {types}")
    logs = {}
    for name, options in TYPES_OF_KV[types].items():
        (spec,) = specs(model, e2e_server, options)
        with running(tmp_path_factory.mktemp(name), spec) as (engine,):
            (cold,) = engine.generate([text])
            assert cold.cached_tokens == 0, name
            drain(engine)
            (warm,) = engine.generate([text])
            assert warm.cached_tokens == hit_tokens(300), name
            assert_same([warm], [cold], tolerance=1e-2 if name != "float32" else 1e-4)
            drain(engine)
            logs[name] = engine.log()
    with Client(ClientConfig(e2e_server.endpoint, timeout_ms=60_000)) as client:
        mine = [
            info.spec for info in client.admin.namespaces() if info.fingerprint.hex()[:12] in "".join(logs.values())
        ]
    # Why they do not share is in the log of the one that came later.
    why = r"another namespace of llama, of which nothing can be read in \w+, because .*"
    if types == "fp8":
        assert {spec.kv_cache_dtype for spec in mine} == {"auto", "fp8", "fp8_e5m2"}
        assert re.search(why + "kv_cache_dtype: 'fp8_e5m2' here, 'fp8' in", logs["fp8_e5m2"])
    else:
        assert {spec.model_dtype for spec in mine} == {"torch.float32", "torch.bfloat16"}
        assert re.search(why + "model_dtype: 'torch.bfloat16' here, 'torch.float32' in", logs["bfloat16"])
