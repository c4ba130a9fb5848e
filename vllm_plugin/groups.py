"""Which models the connector serves, and how a block of each KV-cache group is cut into shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.namespace import GroupSpec
from kvpool.types import ShardRange

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

MAX_DEFAULT_SHARDS = 16


@dataclass(frozen=True, slots=True)
class RankShards:
    """What one tensor-parallel rank holds of every block.

    Args:
        shards: the shards whose KV heads this rank holds.
        writes: whether this rank stores them; replicas of a head do not.
    """

    shards: ShardRange
    writes: bool


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError, naming the model's groups or the setting, for what the connector cannot serve yet."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    described = ", ".join(
        f"group {idx}: {type(group.kv_cache_spec).__name__} ({len(group.layer_names)} layers)"
        for idx, group in enumerate(groups)
    )
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        raise ConfigError(
            "KVPoolConnector serves models with one full-attention KV-cache group; "
            f"{vllm_config.model_config.model} has {described or 'no KV-cache group'}. Serve it without kvpool."
        )
    spec = groups[0].kv_cache_spec
    if spec.num_heads != spec.num_kv_heads or spec.sliding_window is not None:
        raise ConfigError(
            f"KVPoolConnector cannot cut {described} into KV heads ({spec.num_heads} head slots for "
            f"{spec.num_kv_heads} KV heads, sliding window {spec.sliding_window}). Serve the model without kvpool."
        )
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "KVPoolConnector needs one scheduler for all ranks; distributed_executor_backend = 'external_launcher' has "
            "one for each: use 'mp' or 'ray'"
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"KVPoolConnector does not support {name} = {getattr(parallel, name)}; set it to 1")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales makes KV values depend on an engine's first request; set it to false, or take scales "
            "from the checkpoint"
        )


def group_spec(group: KVCacheGroupSpec, total_kv_heads: int, tp_size: int, num_shards: int) -> GroupSpec:
    """The group as the pool sees it: of the whole model, whatever the tensor-parallel size.

    Args:
        num_shards: as configured; 0 for the default.

    Raises:
        ConfigError: the shards do not divide over the heads or the ranks.
    """
    spec = group.kv_cache_spec
    num_shards = num_shards or math.gcd(total_kv_heads, MAX_DEFAULT_SHARDS)
    if total_kv_heads % num_shards:
        raise ConfigError(f"num_shards = {num_shards} does not divide the model's {total_kv_heads} KV heads")
    if num_shards % tp_size and (tp_size % num_shards or num_shards != total_kv_heads):
        raise ConfigError(
            f"num_shards = {num_shards} cannot be spread over tensor_parallel_size = {tp_size} with {total_kv_heads} "
            f"KV heads; set kv_connector_extra_config num_shards to {math.lcm(tp_size, num_shards)} on every engine"
        )
    page_bytes = spec.num_states * spec.state_content_size_bytes
    heads_per_shard = total_kv_heads // num_shards
    return GroupSpec(
        kind="full_attention",
        block_tokens=spec.block_size,
        num_kv_heads=total_kv_heads,
        head_size_k=spec.head_size,
        head_size_v=spec.head_size_v,
        num_shards=num_shards,
        chunk_bytes=len(group.layer_names) * heads_per_shard * page_bytes,
        layer_names=tuple(group.layer_names),
    )


def rank_shards(group: GroupSpec, tp_rank: int, tp_size: int) -> RankShards:
    """Which shards a rank holds. With more ranks than KV heads, neighbouring ranks hold the same head."""
    replicas = max(1, tp_size // group.num_kv_heads)
    per_rank = max(1, group.num_shards * replicas // tp_size)
    first = (tp_rank // replicas) * per_rank
    return RankShards(ShardRange(first, per_rank), writes=tp_rank % replicas == 0)
