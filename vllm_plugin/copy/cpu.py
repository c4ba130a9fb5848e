"""Copies on the CPU: numpy strided copies, which release the GIL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpool.transport.base import BATCH_BYTES, Buffers


class CpuCopier:
    """See `Copier`. On the CPU a forward pass is over when its hooks are called, so there is nothing to wait for.

    Args:
        views: as `canonical_view` makes them.
    """

    batch_bytes = BATCH_BYTES

    def __init__(self, views: list[torch.Tensor]):
        self._views = [view.numpy() for view in views]

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Any memory is as good as any other."""

    def mark(self) -> None:
        return None

    def gather(self, mark: None, block_ids: Sequence[int], buffers: Buffers) -> None:
        for block_id, buffer in zip(block_ids, buffers, strict=True):
            for block, part in self._parts(block_id, buffer):
                part[...] = block

    def scatter(self, mark: None, block_ids: Sequence[int], buffers: Buffers) -> None:
        for block_id, buffer in zip(block_ids, buffers, strict=True):
            for block, part in self._parts(block_id, buffer):
                block[...] = part

    def settle(self) -> None:
        """What was scattered is there already."""

    def _parts(self, block_id: int, buffer):  # type: ignore[no-untyped-def]
        """Pairs of equal shape [S, l, h, r, N / r, C]: the engine's block, the pool's buffer; one a view."""
        num_layers = sum(view.shape[2] for view in self._views)
        whole = buffer.reshape(self._views[0].shape[1], num_layers, *self._views[0].shape[3:])
        layer = 0
        for view in self._views:
            yield view[block_id], whole[:, layer : layer + view.shape[2]]
            layer += view.shape[2]
