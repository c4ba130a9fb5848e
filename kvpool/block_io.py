"""The bytes of a put or get between the caller's callback and the transport, with their checksums.

`Client.put` makes a `BlockWriter`, `Client.get` a `BlockReader`. Each is the callback of the transport's transfer: it
calls the caller's own with block indices, and starts the checksums of each batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvpool.errors import InvalidRequestError
from kvpool.sums import Checksums, Summer
from kvpool.transport.base import Buffers, Transfer, Transport


@dataclass(frozen=True, slots=True)
class InPlace:
    """Returned by a fill callback to send existing arrays instead of copying.

    Args:
        buffers: one a block, uint8 [bytes of the block], contiguous. They must keep their bytes until the put has
            ended. A transport that cannot send from there copies them.
    """

    buffers: Buffers


class FillBlocks(Protocol):
    """The callback of a put."""

    def __call__(self, indices: Sequence[int], buffers: Buffers, /) -> Checksums | InPlace | None:
        """Writes block `indices[i]`, counted over all runs, into `buffers[i]`: uint8 [shards.count * chunk_bytes].

        Returns:
            None: the bytes are there. A callable: it waits for the bytes, and returns one checksum a chunk; for
            callbacks that compute checksums while copying. `InPlace`: where the bytes are instead.
        """


class DrainBlocks(Protocol):
    """The callback of a get."""

    def __call__(self, indices: Sequence[int], buffers: Buffers, /) -> Checksums | None:
        """Copies block `indices[i]`, counted over all runs, from `buffers[i]`: uint8 [shards.count * chunk_bytes].

        Returns:
            None: the bytes were copied. A callable: it waits for the copy, and returns one checksum a chunk.
        """


@dataclass(slots=True)
class BlockWriter:
    """The bytes of one put.

    Args:
        granted: indices of the blocks to write, one a region of the transfer.
        chunk_bytes: what each checksum covers.

    Attributes:
        fill_error: what the caller's callback raised. If `write` raises the same, no byte is in flight any more.
    """

    transport: Transport
    summer: Summer
    fill: FillBlocks
    granted: Sequence[int]
    chunk_bytes: int
    fill_error: Exception | None = None
    _sums: list[Checksums] = field(default_factory=list)

    def write(self, transfer: Transfer) -> list[int]:
        """Moves the blocks; returns one checksum a chunk, region-major. Raises as `Transport.write` and `fill`."""
        self.transport.write(transfer, self._fill_batch)
        return _all_of(self._sums)

    def wait(self) -> None:
        """After a failure: waits until no callback's copy is in flight, so that the regions may be revoked."""
        for sums in self._sums:
            with contextlib.suppress(Exception):
                sums()

    def _fill_batch(self, first: int, buffers: Buffers) -> Buffers | None:
        try:
            filled = self.fill(self.granted[first : first + len(buffers)], buffers)
            if isinstance(filled, InPlace):
                check_blocks(filled.buffers, len(buffers), len(buffers[0]))
        except Exception as error:
            self.fill_error = error
            raise
        if isinstance(filled, InPlace):
            if self.transport.in_place:
                self._sums.append(self.summer.begin(filled.buffers, self.chunk_bytes))
                return filled.buffers
            for buffer, block in zip(buffers, filled.buffers, strict=True):
                buffer[:] = block
            filled = None
        self._sums.append(filled or self.summer.begin(buffers, self.chunk_bytes))
        if not filled and self.transport.memory is None:
            self._sums[-1]()  # The transport reuses its buffers.
        return None


@dataclass(slots=True)
class BlockReader:
    """The bytes of one get, which may take several transfers; `chunk_bytes` is what each checksum covers."""

    transport: Transport
    summer: Summer
    drain: DrainBlocks
    chunk_bytes: int
    _indices: Sequence[int] = ()
    _sums: list[Checksums] = field(default_factory=list)

    def read(self, transfer: Transfer, indices: Sequence[int]) -> None:
        """Moves blocks `indices`, one a region of the transfer. Raises as `Transport.read` and `drain`."""
        self._indices = indices
        self.transport.read(transfer, self._drain_batch)

    def checksums(self) -> list[int]:
        """One checksum a chunk that was read, in order; waits for the callback's copies."""
        return _all_of(self._sums)

    def _drain_batch(self, first: int, buffers: Buffers) -> Checksums | None:
        drained = self.drain(self._indices[first : first + len(buffers)], buffers)
        if drained is not None:
            self._sums.append(drained)
            return None
        self._sums.append(self.summer.begin(buffers, self.chunk_bytes))
        return self._sums[-1]


def check_blocks(blocks: Buffers, count: int, nbytes: int) -> None:
    """Raises InvalidRequestError unless `blocks` are `count` contiguous arrays, uint8 [nbytes]."""
    if len(blocks) != count:
        raise InvalidRequestError(f"the fill callback returned {len(blocks)} arrays for {count} blocks")
    for block in blocks:
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or not block.flags.c_contiguous:
            raise InvalidRequestError(f"a block to send is {type(block).__name__}, not a contiguous array of uint8")
        if block.shape != (nbytes,):
            raise InvalidRequestError(f"a block to send has shape {block.shape}; it must be ({nbytes},)")


def _all_of(parts: Sequence[Checksums]) -> list[int]:
    return [each for part in parts for each in part()]
