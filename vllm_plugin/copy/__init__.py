"""Copies between the engine's KV cache and the pool's buffers, by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpool.transport.base import Buffers


class Copier(Protocol):
    """Moves whole blocks. Each direction is used by one thread."""

    batch_bytes: int
    """How much is best moved at once."""

    def adopt(self, memory: npt.NDArray[np.uint8] | None) -> None:
        """Learns of memory in which buffers will lie for long (the pool's, if it is shared); cheap to repeat."""

    def mark(self) -> Any:
        """Remembers what the device has been given to do so far; for `gather` and `scatter` to wait for."""

    def gather(self, mark: Any, block_ids: Sequence[int], buffers: Buffers) -> None:
        """Copies blocks of the engine into buffers, uint8 [shards * chunk_bytes] each, once `mark` is reached."""

    def scatter(self, mark: Any, block_ids: Sequence[int], buffers: Buffers) -> None:
        """Begins to copy buffers into blocks of the engine, once `mark` is reached.

        Buffers in adopted memory must stay as they are until `settle`; others are free when this returns.
        """

    def settle(self) -> None:
        """Returns when all that was scattered is there."""


def make_copier(views: list[torch.Tensor]) -> Copier:
    """The copier for the device the KV cache is on."""
    if views[0].device.type == "cpu":
        from vllm_plugin.copy.cpu import CpuCopier

        return CpuCopier(views)
    from vllm_plugin.copy.cuda import CudaCopier

    return CudaCopier(views)
