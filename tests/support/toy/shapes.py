"""Mixes of KV-cache groups as models have them, for the toy engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.support.vllm_objects import full_attention

FULL = full_attention()
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32, sliding_window=40)
CHUNK = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32, attention_chunk_size=48
)
STATE = MambaSpec(block_size=16, shapes=((24,),), dtypes=(torch.float32,), mamba_cache_mode="align")
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.float32, max_tp_shards=1)

SHAPES: dict[str, tuple[KVCacheSpec, ...]] = {
    "gemma3": (WINDOW, WINDOW, FULL),
    "gpt-oss": (FULL, WINDOW),
    "windows alone": (WINDOW,),
    "two windows": (WINDOW, replace(WINDOW, sliding_window=17), FULL),
    "llama4": (CHUNK, CHUNK, FULL),
    "deepseek": (LATENT,),
    "qwen3-next": (STATE, STATE, FULL),
    "states alone": (STATE,),
    "block sizes": (FULL, replace(WINDOW, block_size=32)),
    # As `prefix_match_unit` = 16 makes it: states that another request resumes inside a block are copied.
    "larger states": (replace(STATE, block_size=48), full_attention(block_size=48)),
}
