"""The bytes of a put or get between the caller and the transport, with their checksums.

`Client.put` and `Client.get` make a `BlockMover`, which hands each transfer to the transport, with the caller's arrays
or a callback that calls the caller's own with block indices. The thread that has moved bytes computes their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvpool.protocol.errors import InvalidRequestError
from kvpool.transport.base import Buffers, Bytes, Local, Pieces, Transfer, Transport, no_sum
from kvpool.transport.chunk_sums import Checksums, ChunkSums
from kvpool.transport.mover import Movers


class InPlace:
    """Blocks in arrays of the caller's: a put sends from there, and a get receives into them, on several threads.

    Args:
        blocks: one a block of the runs: an array or several, uint8, contiguous each, together the bytes of the block's
            shards in order. They must keep their bytes until a put has ended. A get has filled them when it returns;
            no two of its blocks may share memory.
        movers: processes that move the blocks out of process, where the transport can: each an array of their arena.

    Attributes:
        blocks: each as a sequence of arrays.
    """

    def __init__(self, blocks: Sequence[Bytes | Pieces], movers: Movers | None = None):
        self.blocks: list[Pieces] = [[block] if isinstance(block, np.ndarray) else block for block in blocks]
        self.movers = movers

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
copies the block from there. Returns None: the bytes were copied. With `fill_sums` or `drain_sums`, returns a callable
that any thread may call: it waits for the copy, and returns one checksum a chunk. A put's checksums are of the caller's
own bytes, and not of the buffers: with shared memory, another process that is late may write there.
"""


@dataclass(eq=False)
class BlockMover:
    """The bytes of one put or get, which may take several transfers.

    Args:
        blocks: the caller's arrays, or its callback.
        returns_sums: whether the callback returns the checksums; else the transport computes them.
        chunk_bytes: what each checksum covers.

    Attributes:
        callback_error: what the caller's callback raised. If `move` raises the same, no byte is in flight any more.
    """

    transport: Transport
    blocks: FillBlocks | InPlace
    returns_sums: bool
    region_bytes: int
    chunk_bytes: int
    is_write: bool
    callback_error: Exception | None = field(default=None, init=False)
    _indices: Sequence[int] = field(default=(), init=False)
    _parts: list[ChunkSums] = field(default_factory=list, init=False)

    def move(self, transfer: Transfer, indices: Sequence[int]) -> None:
        """Moves blocks `indices`, one a region of the transfer. Raises as the transport and the callback."""
        self._indices = indices
        self._parts.append(sums := ChunkSums(len(indices), self.region_bytes, self.chunk_bytes))
        act, rows, apart = None, None, None
        if isinstance(self.blocks, InPlace):
            rows = [self.blocks.blocks[idx] for idx in indices]
            apart = None if self.blocks.movers is None else partial(self.blocks.movers.move, sums=sums)
        else:
            act = partial(self._call_back, self.blocks)
        add = no_sum if act is not None and self.returns_sums else sums.add
        move = self.transport.write if self.is_write else self.transport.read
        move(transfer, Local(act, rows, add, apart))

    def checksums(self) -> list[int]:
        """One checksum a chunk that was moved, in order; waits for the callback's copies."""
        return [each for sums in self._parts for each in sums.all()]

    def wait(self) -> None:
        """After a failure: waits until no callback's copy is in flight, so that the regions may be revoked."""
        for sums in self._parts:
            sums.wait()

    def _call_back(self, act: FillBlocks, first: int, buffers: Buffers) -> Checksums | None:
        try:
            sums = self._parts[-1].add_later(first, act(self._indices[first : first + len(buffers)], buffers))
            if (sums is not None) != self.returns_sums:
                name, found = "fill" if self.is_write else "drain", "None" if sums is None else "checksums"
                raise InvalidRequestError(
                    f"the {name} callback returned {found}, and {name}_sums is {self.returns_sums}"
                )
        except Exception as error:
            self.callback_error = error
            raise
        return sums
