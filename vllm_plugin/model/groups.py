"""The model's KV-cache groups as the pool sees them.

vLLM splits a model's layers into groups of equal size, so that several groups may be of one kind (Gemma 3 has five with
one sliding window); the blocks of such groups are always in the pool together. The pool keeps them as one group: one
lookup, one entry. Both sides of the connector make the same groups, from different knowledge: a worker knows the layers
of its own pipeline stage only, the scheduler only the first layer's spec of a group whose layers differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.namespace import GroupSpec
from kvpool.protocol.types import ShardRange
from vllm_plugin.model.adapters import BlockNames
from vllm_plugin.model.kinds import Cut, Kind, kind_of
from vllm_plugin.releases import hash_block_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

MAX_DEFAULT_SHARDS = 16


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """One group of the pool.

    Args:
        members: indices of the engine's groups that it stands for; their layers follow each other in a chunk.
    """

    kind: Kind
    members: tuple[int, ...]


def make_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[PoolGroup]:
    """The pool's groups, in the order of their first members. Raises ConfigError as `check_supported`."""
    check_supported(vllm_config, kv_cache_config)
    eagle = _eagle_groups(vllm_config, kv_cache_config)
    merged: dict[Kind, list[int]] = {}
    for idx, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = next(iter(kv_cache_interface.iter_layer_specs(group.kv_cache_spec)))
        kind = kind_of(spec)
        assert kind is not None, f"check_supported let {type(spec).__name__} pass"
        merged.setdefault(kind.of(spec), []).append(idx)
    return [
        PoolGroup(replace(kind, proves=kind.is_positional and not eagle.isdisjoint(members)), tuple(members))
        for kind, members in merged.items()
    ]


def _eagle_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """Indices of the engine's groups whose last slots a draft model writes; all groups where vLLM does not tell."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return set()
    groups = kv_cache_config.kv_cache_groups
    return {idx for idx, group in enumerate(groups) if group.is_eagle_group} or set(range(len(groups)))


def alignment_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Hits end at multiples of this many tokens: a whole block of every group."""
    return math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))


def hash_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one of the engine's block hashes covers."""
    return hash_block_tokens(kv_cache_config) or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]


def group_spec(group: PoolGroup, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, num_shards: int) -> GroupSpec:
    """The group of one pipeline stage, for all of its tensor-parallel ranks; `num_shards` = 0: the default number.

    Raises ConfigError if the stage has no such layer, or if the shards do not divide over the heads or the ranks.
    """
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    layers = stage_layers(group, kv_cache_config)
    if not layers:
        raise ConfigError(
            f"a pipeline stage has no layer of KV-cache group {group.members} ({group.kind.name}); KVPoolConnector "
            "needs at least one in each: use fewer stages, or set VLLM_PP_LAYER_PARTITION"
        )
    cuts = [group.kind.cut(spec, vllm_config) for _, spec in layers]
    heads, shards = _shards(cuts, tp_size, num_shards)
    first = layers[0][1]
    return GroupSpec(
        kind=group.kind.name,
        block_tokens=group.kind.block_tokens,
        num_kv_heads=heads,
        head_size_k=getattr(first, "head_size", 0),
        head_size_v=getattr(first, "head_size_v", 0),
        num_shards=shards,
        chunk_bytes=sum(max(1, each.heads // shards) * each.head_bytes for each in cuts),
        layer_names=tuple(name for name, _ in layers),
        layer_formats=tuple(group.kind.format(spec, each) for (_, spec), each in zip(layers, cuts, strict=True)),
        window_tokens=group.kind.window_tokens,
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of an engine's KV cache, and the names of its blocks.

    Args:
        alignment: hits end at multiples of this many tokens.
        num_blocks: of the engine's KV cache.
        step_tokens: the most tokens that one step computes.
        num_ranks: of all pipeline stages; each of them reports every store job.
    """

    groups: Sequence[PoolGroup]
    alignment: int
    names: BlockNames
    num_blocks: int
    step_tokens: int
    tp_size: int = 1
    num_stages: int = 1
    num_ranks: int = 1

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, share_adapters: str) -> Geometry:
        parallel = vllm_config.parallel_config
        return cls(
            make_groups(vllm_config, kv_cache_config),
            alignment_tokens(kv_cache_config),
            BlockNames(hash_tokens(vllm_config, kv_cache_config), vllm_config, share_adapters),
            kv_cache_config.num_blocks,
            vllm_config.scheduler_config.max_num_batched_tokens,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.world_size,
        )

    def hit_limit(self, num_tokens: int) -> int:
        """The longest hit of a prompt: its last token is always computed, for the logits that the request waits for."""
        return (num_tokens - 1) // self.alignment * self.alignment

    def blocks_to_compute(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens needs at once if all of it is computed, step by step."""
        return sum(
            -(-group.kind.most_live_tokens(num_tokens, self.step_tokens) // group.kind.block_tokens)
            * len(group.members)
            for group in self.groups
        )


def packs_its_own(kv_cache_config: KVCacheConfig) -> bool:
    """Whether the attention backend packs pages in an order that only the backend knows."""
    return any(
        getattr(spec, "num_head_slots", None) is not None
        for group in kv_cache_config.kv_cache_groups
        for spec in kv_cache_interface.iter_layer_specs(group.kv_cache_spec)
    )


def scheduler_knows(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether the scheduler's side can derive a worker's KV-cache layout from its own configuration."""
    return vllm_config.parallel_config.pipeline_parallel_size == 1 and not any(
        hasattr(group.kv_cache_spec, "kv_cache_specs") for group in kv_cache_config.kv_cache_groups
    )


def stage_layers(group: PoolGroup, kv_cache_config: KVCacheConfig) -> list[tuple[str, KVCacheSpec]]:
    """This stage's layers of a group with their specs, in the order that their bytes have in a chunk."""
    layers = []
    for member in group.members:
        engine_group = kv_cache_config.kv_cache_groups[member]
        mixed = getattr(engine_group.kv_cache_spec, "kv_cache_specs", None)
        layers += [(name, mixed[name] if mixed else engine_group.kv_cache_spec) for name in engine_group.layer_names]
    return layers


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards whose KV heads a tensor-parallel rank holds, and whether it stores them: replicas of a head do not."""

    shards: ShardRange
    writes: bool


def rank_shards(group: GroupSpec, tp_rank: int, tp_size: int) -> RankShards:
    """Which shards a rank holds. With more ranks than KV heads, neighbouring ranks hold the same head."""
    heads = group.num_kv_heads or group.num_shards
    replicas = max(1, tp_size // heads)
    per_rank = max(1, group.num_shards * replicas // tp_size)
    first = (tp_rank // replicas) * per_rank
    return RankShards(ShardRange(first, per_rank), writes=tp_rank % replicas == 0)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError, naming the group or the setting and what to change, for what the connector cannot serve."""
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError(
            f"{vllm_config.model_config.model} has no KV cache, so there is nothing to share; serve it without kvpool"
        )
    smallest = min(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    for idx, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in kv_cache_interface.iter_layer_specs(group.kv_cache_spec):
            kind = kind_of(spec)
            reason = (kind or Kind).why_not_shared(spec)
            if reason is None and kind is not None and not kind.is_positional and spec.block_size > smallest:
                # `Scheduler._mamba_block_aligned_split` ends chunks at multiples of the smallest block, and a state is
                # that of the end of a chunk. What is computed from a state under a wrong name is wrong itself.
                reason = (
                    f"keeps states in blocks of {spec.block_size} tokens beside blocks of {smallest}: vLLM then names "
                    "states by prefixes that they are not of (vllm-project/vllm#54076), in its own cache too; serve it "
                    "without kvpool, or without the draft model that has the small blocks"
                )
            if reason is None and kind is None:
                reason = "is of a kind that it does not know; serve it without kvpool"
            if reason is None and not (group.enable_kv_transfer and spec.prefix_cacheable):
                reason = "is scratch memory that vLLM does not share"
            if reason is not None:
                raise ConfigError(
                    f"KVPoolConnector does not serve {vllm_config.model_config.model}: its KV-cache group {idx} "
                    f"({type(spec).__name__}, {len(group.layer_names)} layers) {reason}"
                )
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not (cache.enable_prefix_caching or scheduler.enable_chunked_prefill):
        raise ConfigError(
            f"vLLM cannot resume {vllm_config.model_config.model} from a loaded prefix: neither prefix caching nor "
            "chunked prefill is enabled; enable one, or, where the platform supports neither, serve without kvpool"
        )
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "KVPoolConnector needs one scheduler for all ranks; distributed_executor_backend = 'external_launcher' has "
            "one for each: use 'mp' or 'ray'"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"KVPoolConnector does not support {name} = {getattr(parallel, name)}; set it to 1")
    if getattr(parallel, "enable_fault_tolerance", False):
        raise ConfigError(
            "KVPoolConnector does not support enable_fault_tolerance = True: vLLM may find a step faulty after its "
            "blocks are shared; serve without --enable-fault-tolerance"
        )
    encoders = getattr(vllm_config, "ec_transfer_config", None)
    if encoders is not None and encoders.is_ec_consumer:
        raise ConfigError(
            "KVPoolConnector does not support an ec_transfer_config that reads: encoded images are named by the image "
            "and the model's path, not by the weights that encoded them; set ec_role = 'ec_producer', or serve without"
        )
    images = vllm_config.model_config.multimodal_config
    if images is not None and not (cache.enable_prefix_caching or images.mm_processor_cache_gb):
        raise ConfigError(
            "vLLM names images by a counter, not by their content, with prefix caching off and mm_processor_cache_gb = "
            "0, so that two images would share blocks; leave one of the two on"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "KVPoolConnector does not support calculate_kv_scales = True, which makes KV values depend on an engine's "
            "first request; set it to False, or use scales from the checkpoint"
        )


def _shards(cuts: Sequence[Cut], tp_size: int, configured: int) -> tuple[int, int]:
    """(KV heads that all layers of a group can be cut along, or 0 if there are none; number of shards)."""
    heads = math.gcd(*(each.heads for each in cuts))
    if any(each.heads == 0 or (tp_size > heads and each.heads != heads) for each in cuts):
        return 0, tp_size  # One opaque part a rank.
    if heads == 1:
        return 1, 1
    shards = configured or math.gcd(heads, MAX_DEFAULT_SHARDS)
    if heads % shards:
        raise ConfigError(f"num_shards = {shards} does not divide the {heads} KV heads of a KV-cache group")
    if shards % tp_size and (tp_size % shards or shards != heads):
        raise ConfigError(
            f"num_shards = {shards} cannot be spread over tensor_parallel_size = {tp_size} with {heads} KV heads; set "
            f"kv_connector_extra_config num_shards to {math.lcm(tp_size, shards)} on every engine"
        )
    return heads, shards
