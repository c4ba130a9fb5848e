"""Where a block's bytes are in the engine's KV cache, seen in the pool's canonical order.

vLLM gives every layer as a logical view [B, H, N, C] (block, KV head, token, K and V) with strides of its own; the pool
wants shard, then layer, then head, then token. Both are views of the same bytes: no layout needs code of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch


def canonical_view(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], num_blocks: int, num_shards: int
) -> list[torch.Tensor]:
    """Views of the layers' KV caches, by block and shard.

    Args:
        kv_caches: as vLLM registers them: layer -> [B * r, H, N / r, C], r kernel blocks in a block.
        layer_names: of the group, in the namespace's order.
        num_blocks: B.
        num_shards: of this rank; divides H.

    Returns:
        uint8 views [B, S, L, H / S, r, N / r, C bytes]: one with all layers where they lie evenly spaced, else one with
        L = 1 for each layer.

    Raises:
        ValueError: a layer is missing, or cut in a way the pool does not know.
    """
    layers = []
    for name in layer_names:
        if name not in kv_caches:
            raise ValueError(f"vLLM registered no KV cache for layer {name!r}")
        layers.append(_by_block(name, kv_caches[name], num_blocks, num_shards))
    first = layers[0]
    starts = [layer.data_ptr() for layer in layers]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    alike = all(layer.shape == first.shape and layer.stride() == first.stride() for layer in layers)
    same_storage = len({layer.untyped_storage().data_ptr() for layer in layers}) == 1
    if not (alike and same_storage and len(steps) <= 1 and all(step > 0 for step in steps)):
        return [layer.unsqueeze(2) for layer in layers]
    step = steps.pop() if steps else 0
    shape, strides = list(first.shape), list(first.stride())
    shape.insert(2, len(layers))
    strides.insert(2, step)
    return [first.as_strided(shape, strides)]


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
