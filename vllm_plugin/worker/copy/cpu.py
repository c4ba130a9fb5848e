"""Copies on the CPU: the transport's own where blocks lie in long pieces, else strided ones by numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.client.block_io import InPlace
from kvpool.transport.base import BATCH_BYTES, Buffers
from vllm_plugin.worker.copy import BlockIds, Copier
from vllm_plugin.worker.layout import Layout, Part

Bytes = npt.NDArray[np.uint8]

MIN_PIECE_BYTES = 16 << 10
"""Blocks in smaller pieces are copied by numpy: a copy or receive for each would cost more."""


class CpuCopier(Copier):
    """Copies in the thread that asks. A forward pass is over when its hooks are called, so nothing is waited for."""

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
