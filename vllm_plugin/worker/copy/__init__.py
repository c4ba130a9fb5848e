"""Where blocks lie in the engine's KV cache, and copies between it and the pool's buffers: a GPU's are in `cuda.py`.

vLLM gives every layer as a logical view [B, H, N, C] (block, KV head, token, K and V) with strides of its own; the pool
wants shard, then layer, then head, then token. Both are views of the same bytes: no layout needs code of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpool.client.block_io import InPlace
from kvpool.transport.base import BATCH_BYTES, Buffers
from kvpool.transport.chunk_sums import Checksums

Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[Sequence[int]]
"""Where blocks lie in the engine: a row of block ids for each of a group's block tables."""

MIN_PIECE_BYTES = 16 << 10
"""Blocks in smaller pieces are copied by numpy: a copy or receive for each would cost more."""


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


class Copier:
    """Moves whole blocks of one group at a time. Each direction is used by one thread.

    What is not abstract here suits a device that has done its work when it is asked to copy, as a CPU has.
    """

    batch_bytes: int
    """Bytes that are best moved at once."""

    def adopt(self, memory: Bytes | None) -> None:
        """Adopts memory in which buffers will lie for long, as of a `Transport`, in place of what it adopted before.

        None: adopts none. Any thread may call it, also while others copy; cheap to repeat.
        """

    def mark(self) -> Any:
        """A mark of the work that the device has been given so far, for `gather` and `scatter` to wait for."""
        return None

    def now(self) -> Any:
        """A mark that is reached at once, for `seconds_between`; for the thread that scatters, between its jobs."""
        return None

    def seconds_between(self, earlier: Any, mark: Any) -> float:
        """By how many seconds the device reached `mark` after another one; 0 where it was before, or is still to be."""
        return 0.0

    def gather(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        """Copies blocks of the engine into buffers, uint8 [region bytes] each, once `mark` is reached.

        If it returns checksums, the buffers are full once these are computed; else they are full when it returns.
        """
        raise NotImplementedError

    def sums(self, group_idx: int) -> bool:
        """Whether `gather` and `scatter` return the checksums of this group's blocks."""
        return False

    def in_place(self, group_idx: int, block_ids: BlockIds) -> InPlace | None:
        """The blocks where they lie, if the transport can read and write them there."""
        return None

    def scatter(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        """Copies buffers into blocks of the engine, once `mark` is reached.

        If it returns checksums, the buffers must not change until these are computed; else they may change as soon as
        it returns.
        """
        raise NotImplementedError

    def wait_scattered(self) -> None:
        """Returns when every `scatter` so far has reached the engine's blocks, checksums used or not."""


class CpuCopier(Copier):
    """Copies in the thread that asks: in place by the transport where blocks lie in long pieces, else by numpy.

    A forward pass is over when its hooks are called, so nothing is waited for.
    """

    batch_bytes = BATCH_BYTES

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = layouts
        self._views = [[part.view.numpy() for part in layout.parts] for layout in layouts]
        self._in_pieces = [all(map(_lies_in_pieces, layout.parts)) for layout in layouts]

    def in_place(self, group_idx: int, block_ids: BlockIds) -> InPlace | None:
        if not self._in_pieces[group_idx]:
            return None
        layout, views = self._layouts[group_idx], self._views[group_idx]
        return InPlace(
            [
                [
                    layer.reshape(-1)
                    for shard in range(layout.num_shards)
                    for part, view in zip(layout.parts, views, strict=True)
                    for layer in view[block_ids[part.member][nth], shard]
                ]
                for nth in range(len(block_ids[0]))
            ]
        )

    def gather(self, mark: None, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        for block, part in self._parts(group_idx, block_ids, buffers):
            part[...] = block

    def scatter(self, mark: None, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        for block, part in self._parts(group_idx, block_ids, buffers):
            block[...] = part

    def _parts(self, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs of equal shape [S, L, H / S, r, N / r, C]: of the engine's block, of the pool's buffer."""
        layout = self._layouts[group_idx]
        for nth, buffer in enumerate(buffers):
            chunks = buffer.reshape(layout.num_shards, layout.chunk_bytes)
            for part, view in zip(layout.parts, self._views[group_idx], strict=True):
                block = view[block_ids[part.member][nth]]
                yield block, chunks[:, part.start : part.start + part.chunk_bytes].reshape(block.shape)


def _lies_in_pieces(part: Part) -> bool:
    """Whether each layer's bytes of a shard of a block are contiguous, and enough for a copy of their own."""
    piece = part.view[0, 0, 0]
    return piece.is_contiguous() and piece.numel() >= MIN_PIECE_BYTES


def make_copier(layouts: Sequence[Layout]) -> Copier:
    """The copier for the device that the KV cache is on; one layout a group."""
    if layouts[0].parts[0].view.device.type == "cpu":
        return CpuCopier(layouts)
    from vllm_plugin.worker.copy.cuda import CudaCopier

    return CudaCopier(layouts)
