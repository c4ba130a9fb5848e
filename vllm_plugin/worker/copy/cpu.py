"""Copies on the CPU: numpy strided copies, which release the GIL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.transport.base import BATCH_BYTES, Buffers
from vllm_plugin.worker.copy import BlockIds
from vllm_plugin.worker.layout import Layout

Bytes = npt.NDArray[np.uint8]


class CpuCopier:
    """See `Copier`. On the CPU a forward pass is over when its hooks are called, so there is nothing to wait for."""

    batch_bytes = BATCH_BYTES
    head_blocks = 0

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = layouts
        self._views = [[part.view.numpy() for part in layout.parts] for layout in layouts]

    def adopt(self, memory: Bytes | None) -> None:
        """Nothing to do: all memory is copied alike."""

    def mark(self) -> None:
        return None

    def gather(self, mark: None, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        for block, part in self._parts(group_idx, block_ids, buffers):
            part[...] = block

    def scatter(self, mark: None, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> None:
        for block, part in self._parts(group_idx, block_ids, buffers):
            block[...] = part

    def wait_scattered(self) -> None:
        """Nothing to do: `scatter` returns when its copy is done."""

    def _parts(self, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs of equal shape [S, L, H / S, r, N / r, C]: of the engine's block, of the pool's buffer."""
        layout = self._layouts[group_idx]
        for nth, buffer in enumerate(buffers):
            chunks = buffer.reshape(layout.num_shards, layout.chunk_bytes)
            for part, view in zip(layout.parts, self._views[group_idx], strict=True):
                block = view[block_ids[part.member][nth]]
                yield block, chunks[:, part.start : part.start + part.chunk_bytes].reshape(block.shape)
