"""Copies between the engine's KV cache and the pool's buffers: on the CPU here, on a GPU in `cuda.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.block_io import InPlace
from kvpool.transport.base import BATCH_BYTES, Buffers
from kvpool.transport.chunk_sums import Checksums
from vllm_plugin.worker.layout import Layout, Part

Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[Sequence[int]]
"""Where blocks lie in the engine: a row of block ids for each of a group's block tables."""

MIN_PIECE_BYTES = 16 << 10
"""Blocks in smaller pieces are copied by numpy: a copy or receive for each would cost more."""


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
