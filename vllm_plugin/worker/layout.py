"""Where a block's bytes lie in the engine's KV cache, as views in the pool's canonical order.

vLLM gives every layer as a logical view [B, H, N, C] (block, KV head, token, K and V) with strides of its own; the pool
wants shard, then layer, then head, then token. Both are views of the same bytes: no layout needs code of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring layers of a group.

    Args:
        view: uint8 [B, S, L, H / S, r, N / r, C bytes] of the engine's memory: block, shard, layer, head, kernel block.
        member: index of the block table that locates the part's blocks.
        start: offset of the part's bytes in each chunk.
    """

    view: torch.Tensor
    member: int
    start: int

    @property
    def chunk_bytes(self) -> int:
        return self.view[0, 0].numel()


@dataclass(frozen=True, slots=True)
class Layout:
    """One group on one rank, which holds `num_shards` shards of each block, of `chunk_bytes` each."""

    parts: tuple[Part, ...]
    num_shards: int
    chunk_bytes: int

    @property
    def region_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.num_shards * self.chunk_bytes

    @property
    def num_tables(self) -> int:
        """Block tables that locate one block."""
        return 1 + max(part.member for part in self.parts)


def make_layout(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[Sequence[str]], num_blocks: int, num_shards: int
) -> Layout:
    """The layout of one group. Raises ValueError if a layer is missing, or has a KV cache of an unexpected shape.

    Args:
        kv_caches: as vLLM registers them: layer -> [B * r, H, N / r, C], r kernel blocks in a block.
        layer_names: of each member of the group, in the order of the namespace.
        num_blocks: B.
        num_shards: of this rank; divides every H.
    """
    parts: list[Part] = []
    at = 0
    for member, names in enumerate(layer_names):
        layers = []
        for name in names:
            if name not in kv_caches:
                raise ValueError(f"layer {name!r} has no KV cache: vLLM registered only {sorted(kv_caches)}")
            layers.append(_by_block(name, kv_caches[name], num_blocks, num_shards))
        for view in _join(layers):
            parts.append(Part(view, member, at))
            at += parts[-1].chunk_bytes
    return Layout(tuple(parts), num_shards, at)


def _join(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views [B, S, H / S, ...] of layers -> views [B, S, L, H / S, ...]: neighbours that lie evenly spaced as one."""
    joined: list[torch.Tensor] = []
    for _, alike in itertools.groupby(layers, lambda one: (one.shape, one.stride(), one.untyped_storage().data_ptr())):
        run = list(alike)
        steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(run)}
        if len(steps) > 1 or any(step <= 0 for step in steps):
            joined += [layer.unsqueeze(2) for layer in run]
            continue
        first = run[0]
        shape, strides = list(first.shape), list(first.stride())
        shape.insert(2, len(run))
        strides.insert(2, steps.pop() if steps else 0)
        joined.append(first.as_strided(shape, strides))
    return joined


def _by_block(name: str, cache: torch.Tensor, num_blocks: int, num_shards: int) -> torch.Tensor:
    """[B * r, H, N / r, C] -> uint8 [B, S, H / S, r, N / r, C bytes]."""
    if cache.dim() != 4 or cache.shape[0] % num_blocks or cache.shape[1] % num_shards or cache.stride(3) != 1:
        raise ValueError(
            f"KV cache of layer {name!r} has shape {tuple(cache.shape)} and strides {cache.stride()}; expected "
            f"[{num_blocks} * r, {num_shards} * h, N, C] with C contiguous"
        )
    return (
        cache.view(torch.uint8)
        .unflatten(0, (num_blocks, -1))  # [B, r, H, N / r, C]
        .transpose(1, 2)
        .unflatten(1, (num_shards, -1))  # [B, S, H / S, r, N / r, C]
    )
