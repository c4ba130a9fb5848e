"""The sizes of an engine that the scheduler's side counts with, and how its blocks are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_plugin.model.adapters import Adapters
from vllm_plugin.model.block_names import BlockNames
from vllm_plugin.model.groups import PoolGroup, alignment_tokens, hash_tokens, make_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Geometry:
    """One engine's.

    Args:
        groups: of the pool.
        alignment: hits end at multiples of this many tokens: a whole block of every group.
        names: of blocks in the pool.
        num_blocks: of the engine's KV cache.
        step_tokens: the most tokens that one step computes.
        tp_size: tensor-parallel ranks of a pipeline stage.
        num_stages: pipeline stages.
        num_ranks: of all stages; each of them reports every store job.
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
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, adapters: Adapters) -> Geometry:
        parallel = vllm_config.parallel_config
        return cls(
            make_groups(vllm_config, kv_cache_config),
            alignment_tokens(kv_cache_config),
            BlockNames(hash_tokens(vllm_config, kv_cache_config), adapters),
            kv_cache_config.num_blocks,
            vllm_config.scheduler_config.max_num_batched_tokens,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.world_size,
        )

    def blocks_to_compute(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens needs at once if all of it is computed, step by step."""
        return sum(
            -(-group.kind.most_live_tokens(num_tokens, self.step_tokens) // group.kind.block_tokens)
            * len(group.members)
            for group in self.groups
        )
