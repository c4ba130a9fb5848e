"""The bytes of a put or get between the caller and the transport, with their checksums.

`Client.put` makes a `BlockWriter`, `Client.get` a `BlockReader`. Each hands a transfer to the transport, with the
caller's arrays or a callback that calls the caller's own with block indices, and has the checksums of all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvpool.client.sums import Checksums, ChunkSums
from kvpool.protocol.errors import InvalidRequestError
from kvpool.transport.base import Buffers, Bytes, Pieces, Sink, Source, Transfer, Transport


class InPlace:
    """Blocks in arrays of the caller's: a put sends from there, and a get receives into them, on several threads.

    Args:
        blocks: one a block of the runs: an array or several, uint8, contiguous each, together the bytes of the block's
            shards in order. They must keep their bytes until a put has ended. A get has filled them when it returns;
            no two of its blocks may share memory.

    Attributes:
        blocks: each as a sequence of arrays.
    """

    def __init__(self, blocks: Sequence[Bytes | Pieces]):
        self.blocks: list[Pieces] = [[block] if isinstance(block, np.ndarray) else block for block in blocks]

    def check(self, count: int, nbytes: int, is_get: bool = False) -> None:
        """Raises InvalidRequestError unless these are `count` blocks of `nbytes`, for a get in writable arrays."""
        if len(self.blocks) != count:
            raise InvalidRequestError(f"{len(self.blocks)} arrays for {count} blocks; give one a block")
        for idx, pieces in enumerate(self.blocks):
            for piece in pieces:
                if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.ndim != 1:
                    raise InvalidRequestError(
                        f"block {idx} is {type(piece).__name__}, not an array of uint8 with one axis"
                    )
                if not piece.flags.c_contiguous:
                    raise InvalidRequestError(f"the array of block {idx} is not contiguous; copy it")
                if is_get and not piece.flags.writeable:
                    raise InvalidRequestError(f"the array of block {idx} is read-only; a get writes there")
            if (found := sum(map(len, pieces))) != nbytes:
                raise InvalidRequestError(f"block {idx} has {found} bytes; it must have {nbytes}")


FillBlocks = Callable[[Sequence[int], Buffers], Checksums | None]
DrainBlocks = FillBlocks
"""The callback of a put, or of a get, with the arguments `indices` and `buffers`.

A put's writes block `indices[i]`, counted over all runs, into `buffers[i]`, uint8 [shards.count * chunk_bytes]; a get's
copies the block from there. Returns None: the bytes were copied. Or a callable, which any thread may call: it waits for
the copy, and returns one checksum a chunk; for callbacks that compute checksums while copying (a get: `drain_sums`).
"""


class BlockWriter:
    """The bytes of one put.

    Args:
        granted: indices of the blocks to write, one a region of the transfer.
        chunk_bytes: what each checksum covers.

    Attributes:
        fill_error: what the caller's callback raised. If `write` raises the same, no byte is in flight any more.
    """

    def __init__(
        self,
        transport: Transport,
        fill: FillBlocks | InPlace,
        granted: Sequence[int],
        region_bytes: int,
        chunk_bytes: int,
    ):
        self.fill_error: Exception | None = None
        self._transport = transport
        self._fill = fill
        self._granted = granted
        self._sums = ChunkSums(len(granted), region_bytes, chunk_bytes)

    def write(self, transfer: Transfer) -> list[int]:
        """Moves the blocks; returns one checksum a chunk, region-major. Raises as `Transport.write` and `fill`."""
        if isinstance(self._fill, InPlace):
            rows = [self._fill.blocks[idx] for idx in self._granted]
            self._transport.write(transfer, Source(rows=rows, sum=self._sums.add))
        else:
            self._transport.write(transfer, Source(self._fill_batch, sum=self._sums.add))
        return self._sums.all()

    def wait(self) -> None:
        """After a failure: waits until no callback's copy is in flight, so that the regions may be revoked."""
        self._sums.wait()

    def _fill_batch(self, first: int, buffers: Buffers) -> Checksums | None:
        assert not isinstance(self._fill, InPlace)
        try:
            filled = self._fill(self._granted[first : first + len(buffers)], buffers)
        except Exception as error:
            self.fill_error = error
            raise
        return self._sums.add_later(first, len(buffers), filled)


class BlockReader:
    """The bytes of one get, which may take several transfers.

    Args:
        drain_sums: `drain` returns the checksums.
    """

    def __init__(
        self, transport: Transport, drain: DrainBlocks | InPlace, drain_sums: bool, region_bytes: int, chunk_bytes: int
    ):
        self._transport = transport
        self._drain = drain
        self._drain_sums = drain_sums
        self._region_bytes = region_bytes
        self._chunk_bytes = chunk_bytes
        self._indices: Sequence[int] = ()
        self._parts: list[ChunkSums] = []

    def read(self, transfer: Transfer, indices: Sequence[int]) -> None:
        """Moves blocks `indices`, one a region of the transfer. Raises as `Transport.read` and `drain`."""
        self._indices = indices
        sums = ChunkSums(len(indices), self._region_bytes, self._chunk_bytes)
        self._parts.append(sums)
        if isinstance(self._drain, InPlace):
            self._transport.read(transfer, Sink(rows=[self._drain.blocks[idx] for idx in indices], sum=sums.add))
        elif self._drain_sums:
            self._transport.read(transfer, Sink(self._drain_batch))
        else:
            self._transport.read(transfer, Sink(self._drain_batch, sum=sums.add))

    def checksums(self) -> list[int]:
        """One checksum a chunk that was read, in order; waits for the callback's copies."""
        return [each for sums in self._parts for each in sums.all()]

    def _drain_batch(self, first: int, buffers: Buffers) -> Checksums | None:
        assert not isinstance(self._drain, InPlace)
        drained = self._drain(self._indices[first : first + len(buffers)], buffers)
        if (drained is not None) != self._drain_sums:
            raise InvalidRequestError(
                f"the drain callback returned {type(drained).__name__}, and drain_sums is {self._drain_sums}"
            )
        return self._parts[-1].add_later(first, len(buffers), drained)
