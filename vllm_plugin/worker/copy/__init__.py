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
    """How much is best moved at once."""

    head_blocks: int
    """How many blocks keep it busy while others are being located; 0: it moves nothing by itself."""

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Learns of memory in which buffers will lie for long (the pool's, if it is shared); cheap to repeat."""

    def mark(self) -> Any:
        """Remembers what the device has been given to do so far; for `gather` and `scatter` to wait for."""

    def gather(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        """Copies blocks of the engine into buffers, uint8 [region bytes] each, once `mark` is reached.

        With checksums, those in adopted memory are full when the checksums are there; without, and all others, now.
        """

    def scatter(self, mark: Any, group_idx: int, block_ids: BlockIds, buffers: Buffers) -> Checksums | None:
        """Copies buffers into blocks of the engine, once `mark` is reached.

        With checksums, those in adopted memory must stay as they are until the checksums are there; others need not.
        """

    def wait_scattered(self) -> None:
        """Returns when all that was scattered is there, whatever became of its checksums."""


def make_copier(layouts: Sequence[Layout]) -> Copier:
    """The copier for the device that the KV cache is on; one layout a group."""
    if layouts[0].parts[0].view.device.type == "cpu":
        from vllm_plugin.worker.copy.cpu import CpuCopier

        return CpuCopier(layouts)
    from vllm_plugin.worker.copy.cuda import CudaCopier

    return CudaCopier(layouts)
