"""The sizes of an engine that the scheduler's side counts with, and how its blocks are named."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.protocol.types import BlockRun
from vllm_plugin.model.adapters import NO_ADAPTER, Adapters, named
from vllm_plugin.model.groups import PoolGroup, alignment_tokens, hash_tokens, make_groups
from vllm_plugin.model.kinds import Kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class BlockNames:
    """How an engine's blocks are named in the pool: by vLLM's block hash and the content of the request's adapter.

    Args:
        hash_tokens: tokens that one of vLLM's block hashes covers.
    """

    def __init__(self, hash_tokens: int, adapters: Adapters):
        self.hash_tokens = hash_tokens
        self._adapters = adapters
        self._asked_at: dict[str, float] = {}  # Request -> first question since it last had blocks, `time.time`.

    def are_known(self, request: Request) -> bool:
        """Whether a request's blocks can be shared: it has no adapter, or one whose content is known."""
        return request.lora_request is None or self._adapters.digest(request.lora_request) is not None

    def are_current(self, request: Request) -> bool:
        """Whether they are known, and the adapter's files were checked since the request first asked to be admitted.

        While it did not run, ranks may have dropped its adapter, and load what the files hold now.
        """
        if request.lora_request is None:
            return True
        since = self._asked_at.setdefault(request.request_id, time.time())
        return self.are_known(request) and self.are_checked(request, since)

    def are_checked(self, request: Request, since: float) -> bool:
        """Whether the files of a request's adapter were checked after `since` (`time.time`)."""
        return request.lora_request is None or self._adapters.is_checked(request.lora_request, since)

    def admitted(self, request_id: str) -> None:
        """A request was given blocks, or has ended."""
        self._asked_at.pop(request_id, None)

    def are_coming(self, request: Request) -> bool:
        """Whether blocks that are not current will soon be: the adapter's files are being read or checked."""
        return request.lora_request is not None and self._adapters.is_busy(request.lora_request)

    def adapter(self, request: Request) -> bytes:
        """The digest of a request's adapter, which must be known."""
        digest = self._adapters.digest(request.lora_request)
        assert digest is not None, "the digest of the request's LoRA adapter is not known"
        return digest

    def run(self, request: Request, group_idx: int, kind: Kind, first: int, stop: int) -> BlockRun:
        """Blocks [first, stop) of a request. A block of several hash units is named by the last of them."""
        ratio = kind.block_tokens // self.hash_tokens
        hashes, adapter = request.block_hashes, self.adapter(request)
        units = hashes[first:stop] if ratio == 1 else [hashes[(idx + 1) * ratio - 1] for idx in range(first, stop)]
        parent = [hashes[first * ratio - 1]] if first else []
        if adapter == NO_ADAPTER:
            return BlockRun(group_idx, units, parent[0] if parent else b"")
        return BlockRun(group_idx, named(units, adapter), named(parent, adapter)[0] if parent else b"")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of an engine's KV cache, and the names of its blocks.

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
