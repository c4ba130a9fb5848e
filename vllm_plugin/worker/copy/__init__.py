"""Copies between the engine's KV cache and the pool's buffers, by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.sums import Checksums
from kvpool.transport.base import Buffers
from vllm_plugin.worker.layout import Layout

BlockIds = Sequence[Sequence[int]]
"""Where blocks lie in the engine: a row of block ids for each of a group's block tables."""


class Copier(Protocol):
    """Moves whole blocks of one group at a time. Each direction is used by one thread."""

    batch_bytes: int
    """Bytes that are best moved at once."""

    head_blocks: int
    """How many blocks keep the copier busy while others are being located; 0: copies run on the caller's thread."""

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Adopts memory in which buffers will lie for long (the pool's shared memory); cheap to repeat."""

    def mark(self) -> Any:
        """A mark of the work that the device has been given so far, for `gather` and `scatter` to wait for."""

    def gather(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        """Copies blocks of the engine into buffers, uint8 [region bytes] each, once `mark` is reached.

        If it returns checksums, buffers in adopted memory are full once the checksums are computed. All other buffers
        are full when it returns.
        """

    def scatter(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        """Copies buffers into blocks of the engine, once `mark` is reached.

        If it returns checksums, buffers in adopted memory must not change until the checksums are computed. All other
        buffers may change as soon as it returns.
        """

    def wait_scattered(self) -> None:
        """Returns when every `scatter` so far has reached the engine's blocks, checksums used or not."""


def make_copier(layouts: Sequence[Layout]) -> Copier:
    """The copier for the device that the KV cache is on; one layout a group."""
    if layouts[0].parts[0].view.device.type == "cpu":
        from vllm_plugin.worker.copy.cpu import CpuCopier

        return CpuCopier(layouts)
    from vllm_plugin.worker.copy.cuda import CudaCopier

    return CudaCopier(layouts)
