"""Copies between the engine's KV cache and the pool's buffers, by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.block_io import InPlace
from kvpool.transport.base import Buffers
from kvpool.transport.chunk_sums import Checksums
from vllm_plugin.worker.layout import Layout

BlockIds = Sequence[Sequence[int]]
"""Where blocks lie in the engine: a row of block ids for each of a group's block tables."""


class Copier:
    """Moves whole blocks of one group at a time. Each direction is used by one thread.

    What is not abstract here suits a device that has done its work when it is asked to copy, as a CPU has.
    """

    batch_bytes: int
    """Bytes that are best moved at once."""

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
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


def make_copier(layouts: Sequence[Layout]) -> Copier:
    """The copier for the device that the KV cache is on; one layout a group."""
    if layouts[0].parts[0].view.device.type == "cpu":
        from vllm_plugin.worker.copy.cpu import CpuCopier

        return CpuCopier(layouts)
    from vllm_plugin.worker.copy.cuda import CudaCopier

    return CudaCopier(layouts)
