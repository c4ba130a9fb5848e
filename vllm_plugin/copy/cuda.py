"""Copies on a GPU: blocks are gathered on the device, then cross the bus in one piece through pinned memory.

Each direction has a stream and staging buffers of its own, so that neither waits for the other nor for the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpool.transport.base import Buffers

STAGING_BYTES = 64 << 20


class CudaCopier:
    """See `Copier`.

    Args:
        views: as `canonical_view` makes them.
    """

    batch_bytes = STAGING_BYTES

    def __init__(self, views: list[torch.Tensor]):
        # Eight bytes at a time where that is possible: indexing kernels work element by element.
        self._views = [view.view(torch.int64) if view.shape[-1] % 8 == 0 else view for view in views]
        self._device = views[0].device
        self._num_layers = sum(view.shape[2] for view in views)
        self._block_bytes = sum(view[0].numel() for view in views)
        self._out = _Lane(self._device, self._block_bytes)
        self._in = _Lane(self._device, self._block_bytes)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, mark: torch.cuda.Event, block_ids: Sequence[int], buffers: Buffers) -> None:
        with self._out.after(mark):
            host, device, ids = self._out.stage(block_ids)
            for view, part in self._parts(device, len(ids)):
                part.copy_(view.index_select(0, ids))
            host.copy_(device, non_blocking=True)
            self._out.finish()
        for row, buffer in zip(host.numpy(), buffers, strict=True):
            buffer[:] = row

    def scatter(self, mark: torch.cuda.Event, block_ids: Sequence[int], buffers: Buffers) -> None:
        with self._in.after(mark):
            host, device, ids = self._in.stage(block_ids)
            for row, buffer in zip(host.numpy(), buffers, strict=True):
                row[:] = buffer
            device.copy_(host, non_blocking=True)
            for view, part in self._parts(device, len(ids)):
                view.index_copy_(0, ids, part)
            self._in.finish()

    def _parts(self, staged: torch.Tensor, count: int):  # type: ignore[no-untyped-def]
        """Pairs: a view [B, S, l, ...] and its part of the staged blocks [count, S, l, ...]."""
        first = self._views[0]
        whole = staged.view(first.dtype).view(count, first.shape[1], self._num_layers, *first.shape[3:])
        layer = 0
        for view in self._views:
            yield view, whole[:, :, layer : layer + view.shape[2]]
            layer += view.shape[2]


class _Lane:
    """One direction: a stream, pinned memory and device memory for one batch."""

    def __init__(self, device: torch.device, block_bytes: int):
        self._device = device
        self._block_bytes = block_bytes
        self._blocks = max(1, STAGING_BYTES // block_bytes)
        self._stream = torch.cuda.Stream(device)
        self._host = torch.empty((self._blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
        self._staged = torch.empty((self._blocks, block_bytes), dtype=torch.uint8, device=device)

    def after(self, mark: torch.cuda.Event) -> torch.cuda.StreamContext:
        torch.cuda.set_device(self._device)  # Threads start on device 0.
        self._stream.wait_event(mark)
        return torch.cuda.stream(self._stream)

    def stage(self, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Host and device buffers [count, block bytes], and the block ids on the device."""
        count = len(block_ids)
        assert count <= self._blocks, f"{count} blocks in a batch of at most {self._blocks}"
        ids = torch.from_numpy(np.asarray(block_ids, np.int64)).to(self._device)
        return self._host[:count], self._staged[:count], ids

    def finish(self) -> None:
        self._stream.synchronize()
