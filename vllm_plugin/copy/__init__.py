"""Copies between the engine's KV cache and the pool's buffers, by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvpool.transport.base import Buffers


class Copier(Protocol):
    """Moves whole blocks. Called by one thread at a time for each direction."""

    batch_bytes: int
    """How much is best moved at once."""

    def mark(self) -> Any:
        """Remembers what the device has been given to do so far; for `gather` and `scatter` to wait for."""

    def gather(self, mark: Any, block_ids: Sequence[int], buffers: Buffers) -> None:
        """Copies blocks of the engine into buffers, uint8 [shards * chunk_bytes] each, once `mark` is reached."""

    def scatter(self, mark: Any, block_ids: Sequence[int], buffers: Buffers) -> None:
        """Copies buffers into blocks of the engine, once `mark` is reached; they are there when this returns."""


def make_copier(views: list[torch.Tensor]) -> Copier:
    """The copier for the device the KV cache is on."""
    if views[0].device.type == "cpu":
        from vllm_plugin.copy.cpu import CpuCopier

        return CpuCopier(views)
    from vllm_plugin.copy.cuda import CudaCopier

    return CudaCopier(views)
