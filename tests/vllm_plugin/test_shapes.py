"""Every shape of model through vLLM's real scheduler and both sides of the connector, on the toy engine: cold and warm
answers are right, and every byte that a token attends to is checked before each forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
)

from tests.support.toy.engine import ToyEngine
from tests.support.toy.fleet import Fleet, assert_nothing_is_left
from tests.support.toy.model import answer
from tests.support.toy.shapes import FULL, SHAPES, STATE
from tests.support.vllm_objects import tokens
from tests.vllm_plugin.bugs import WRONG_KV

ALL = pytest.mark.parametrize("shape", SHAPES)


def hits(engine: ToyEngine) -> list[int]:
    return [engine.cached_tokens[f"prompt-{idx}"] for idx in range(len(engine.cached_tokens))]


def full_hit(specs: Sequence[KVCacheSpec], num_tokens: int) -> int:
    """Tokens of a prompt that are loaded where all of its blocks are in the pool."""
    alignment = math.lcm(*(spec.block_size for spec in specs))
    return (num_tokens - 1) // alignment * alignment


@ALL
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["synchronous", "asynchronous"])
def test_what_one_engine_computed_another_loads(shape: str, steps_ahead: int, fleet: Fleet) -> None:
    specs = SHAPES[shape]
    prompts = [tokens(count, count) for count in (15, 16, 17, 64, 65, 100, 200)]
    expected = [answer(prompt, 8) for prompt in prompts]
    first = fleet.start(specs=specs, steps_ahead=steps_ahead, num_blocks=128)
    assert first.generate(*prompts) == expected
    assert_nothing_is_left(first)
    second = fleet.start(specs=specs, steps_ahead=steps_ahead, num_blocks=128)
    assert second.generate(*prompts) == expected
    assert hits(second) == [full_hit(specs, len(prompt)) for prompt in prompts]
    assert_nothing_is_left(second)


@ALL
@pytest.mark.parametrize(("writers", "readers"), [(1, 8), (8, 1), (2, 2)])
def test_tensor_parallel_sizes_share_blocks(shape: str, writers: int, readers: int, fleet: Fleet) -> None:
    # The models have four KV heads, so that eight ranks hold each of them twice.
    first = fleet.start(specs=SHAPES[shape], tp_size=writers, num_blocks=128)
    second = fleet.start(specs=SHAPES[shape], tp_size=readers, num_blocks=128)
    prompt = tokens(200)
    assert first.generate(prompt) == second.generate(prompt) == [answer(prompt, 8)]
    shared = writers == readers or not any(isinstance(spec, MambaSpec) for spec in SHAPES[shape])
    assert hits(second) == [192 if shared else 0]
    assert_nothing_is_left(second)


@ALL
def test_pipeline_stages(shape: str, fleet: Fleet) -> None:
    first, second = (fleet.start(specs=SHAPES[shape], tp_size=2, num_stages=2, num_blocks=128) for _ in range(2))
    prompt = tokens(200)
    assert first.generate(prompt) == second.generate(prompt) == [answer(prompt, 8)]
    assert hits(second) == [192]
    assert_nothing_is_left(second)


def test_vllm_misnames_states_where_chunks_end_inside_their_blocks(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why such models are refused. A chunk leaves the state of token 64 where that of token 96 is looked for."""
    monkeypatch.setattr("vllm_plugin.model.groups.check_supported", lambda *_: None)
    specs, prompt = (replace(STATE, block_size=48), FULL), tokens(113)
    engine = fleet.start("kv_producer", specs=specs, options={"max_num_batched_tokens": 64})
    engine.generate(prompt)
    with pytest.raises(AssertionError, match=WRONG_KV):
        engine.generate(prompt[:97])
