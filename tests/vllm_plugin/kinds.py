"""KV-cache specs of every kind, and KV caches of several groups."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.support.toy.fixtures import BLOCK_TOKENS, TINY


def window(sliding_window: int = 64, num_kv_heads: int = TINY.kv_heads, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(sliding_window=sliding_window, **_attention(num_kv_heads, fields))


def chunked(attention_chunk_size: int = 64, num_kv_heads: int = TINY.kv_heads, **fields: Any) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(attention_chunk_size=attention_chunk_size, **_attention(num_kv_heads, fields))


def mla(head_size: int = 72, **fields: Any) -> MLAAttentionSpec:
    """As vLLM's layers describe themselves: one latent a token, on every rank."""
    return MLAAttentionSpec(**_attention(1, {"head_size": head_size, "max_tp_shards": 1, **fields}))


def state(*shape: int, block_size: int = BLOCK_TOKENS, mode: str = "align", **fields: Any) -> MambaSpec:
    return MambaSpec(block_size, shapes=(shape or (6,),), dtypes=(torch.float32,), mamba_cache_mode=mode, **fields)


def uniform(**layers: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    """Layers of several shapes in one group, by name."""
    return UniformTypeKVCacheSpecs(next(iter(layers.values())).block_size, kv_cache_specs=layers)


def kv_cache(*groups: KVCacheSpec, layers: int = 2, num_blocks: int = 64, eagle: set[int] | None = None) -> Any:
    """A KV cache of one group a spec; group g has the layers "g.0", "g.1", ..., or those that its spec names."""
    made = []
    for idx, spec in enumerate(groups):
        mixed = getattr(spec, "kv_cache_specs", None)
        names = list(mixed) if mixed else [f"{idx}.{nth}" for nth in range(layers)]
        made.append(KVCacheGroupSpec(names, spec, is_eagle_group=idx in (eagle or set())))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=made, kv_cache_layout="LBHNC")


def _attention(num_kv_heads: int, fields: dict[str, Any]) -> dict[str, Any]:
    defaults = {"block_size": BLOCK_TOKENS, "head_size": TINY.head_dim, "dtype": torch.float32}
    return {"num_kv_heads": num_kv_heads, **defaults, **fields}
