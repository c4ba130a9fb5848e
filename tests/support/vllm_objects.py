"""vLLM's own objects for tests: configurations, KV-cache groups, requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm.config
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.request import Request

from testbed.engine import kvpool_transfer_config
from tests.support.toy.fixtures import BLOCK_TOKENS, TINY

init_none_hash(sha256_cbor)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
CONFIG_CLASSES: Mapping[str, Any] = {
    "model_config": vllm.config.ModelConfig,
    "multimodal_config": vllm.config.MultiModalConfig,
    "load_config": vllm.config.LoadConfig,
    "cache_config": vllm.config.CacheConfig,
    "attention_config": vllm.config.AttentionConfig,
    "mamba_config": type(vllm.config.VllmConfig().mamba_config),
    "kernel_config": vllm.config.KernelConfig,
    "speculative_config": vllm.config.SpeculativeConfig,
    "lora_config": vllm.config.LoRAConfig,
    "vllm_config": vllm.config.VllmConfig,
}
"""vLLM's classes of configuration, by the section of kvpool's table that has their fields."""
LAYERS = tuple(f"model.layers.{idx}.self_attn.attn" for idx in range(TINY.layers))


def make_config(
    model: Path, endpoint: str, role: str = "kv_both", extra: dict[str, Any] | None = None, **options: Any
) -> VllmConfig:
    """What vLLM makes of its command line.

    Args:
        extra: `kv_connector_extra_config` beside the endpoint.
        options: of `EngineArgs`.
    """
    transfer = KVTransferConfig(**kvpool_transfer_config(endpoint, role, **(extra or {})))
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    return EngineArgs(model=str(model), kv_transfer_config=transfer, **{**defaults, **options}).create_engine_config()


def full_attention(num_kv_heads: int = TINY.kv_heads, **fields: Any) -> FullAttentionSpec:
    defaults: dict[str, Any] = {"block_size": BLOCK_TOKENS, "head_size": TINY.head_dim, "dtype": torch.float32}
    return FullAttentionSpec(num_kv_heads=num_kv_heads, **{**defaults, **fields})


def cache_config(
    *specs: KVCacheSpec, num_blocks: int = 64, layer_names: Sequence[str] = LAYERS, layout: str = "LBHNC"
) -> KVCacheConfig:
    """The KV cache of a model with one group a spec; one full-attention group by default."""
    groups = [
        KVCacheGroupSpec([name if idx == 0 else f"{name}.{idx}" for name in layer_names], spec)
        for idx, spec in enumerate(specs or (full_attention(),))
    ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        kv_cache_layout=layout,
        hash_block_size=BLOCK_TOKENS,
    )


def of_rank(config: KVCacheConfig, tp_size: int) -> KVCacheConfig:
    """The same KV cache as one of `tp_size` ranks has it."""
    group = config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    mine = replace(spec, num_kv_heads=max(1, spec.num_kv_heads // tp_size))
    return replace(config, kv_cache_groups=[KVCacheGroupSpec(group.layer_names, mine)])


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    images: Mapping[str, tuple[int, int]] | None = None,
    resumable: bool = False,
    priority: int = 0,
    **options: Any,
) -> Request:
    """A request as EngineCore makes it; greedy, without an end-of-sequence token.

    Args:
        resumable: whether more of the prompt may follow (see vLLM's streaming input).
        images: hash of an image -> first token of its place in the prompt, and how many tokens it has.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **options)
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=first, length=count))
        for name, (first, count) in (images or {}).items()
    ]
    return Request(
        request_id,
        list(prompt),
        sampling,
        None,
        block_hasher=_hasher,
        mm_features=features,
        resumable=resumable,
        priority=priority,
    )


def tokens(count: int, seed: object = 0) -> list[int]:
    """A prompt that depends on its seed alone."""
    picks = random.Random(repr(seed))
    return [picks.randrange(3, TINY.vocab) for _ in range(count)]
