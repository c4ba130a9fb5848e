"""The table of memory in docs/how-to/size.md says what the connector stores for layers as vLLM describes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, SlidingWindowSpec

from benchmarks.cases.kv_bytes import BLOCK_TOKENS, SHAPES, Shape
from tests.support.toy.fixtures import MakeConfig
from vllm_plugin.model.groups import group_spec, make_groups
from vllm_plugin.model.kinds import FullAttention, SlidingWindow


def test_a_prompt_takes_its_blocks_and_the_windows_that_are_stored():
    full, mixed = Shape(2, 4, 8), Shape(2, 4, 8, window_layers=3, window_tokens=64)
    assert full.prompt_bytes(8192 + 15) == 8192 * 2 * 4 * 8 * 2
    # Four blocks before 4,096; four before 8,192, and one more for the same prompt again, which resumes at 8,176.
    assert mixed.prompt_bytes(8192) == full.prompt_bytes(8192) + (4 + 4 + 1) * BLOCK_TOKENS * 3 * 4 * 8 * 2


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_takes_what_the_connector_gives_a_block(
    name: str, vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    latent = shape.kv_heads == 1
    fields: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": shape.kv_heads, "dtype": torch.bfloat16}
    if latent:
        full: Any = MLAAttentionSpec(**fields, head_size=shape.head_values, max_tp_shards=1)
    else:
        full = FullAttentionSpec(**fields, head_size=shape.head_values // 2)
    layers: dict[str, Any] = {f"full.{nth}": full for nth in range(shape.full_layers)}
    if shape.window_layers:
        window = SlidingWindowSpec(**fields, head_size=shape.head_values // 2, sliding_window=shape.window_tokens)
        layers |= {f"window.{nth}": window for nth in range(shape.window_layers)}
    config = vllm_config()
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", "LBHNC")
    monkeypatch.setattr(config.model_config, "get_total_num_kv_heads", lambda: shape.kv_heads)
    groups = get_kv_cache_groups(config, layers)
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC")
    token_bytes = {
        type(group.kind): group_spec(group, config, cache, 0).slot_bytes / BLOCK_TOKENS
        for group in make_groups(config, cache)
    }
    assert token_bytes.pop(FullAttention) == shape.full_bytes
    assert token_bytes == ({SlidingWindow: shape.window_bytes} if shape.window_layers else {})
