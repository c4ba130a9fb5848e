"""The bytes of a put or get between the caller and the transport, with their checksums.

`Client.put` and `Client.get` make a `BlockMover`, which hands each transfer to the transport, with the caller's arrays
or a callback that calls the caller's own with block indices. The thread that has moved bytes computes their checksums.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import MAX_LOCKED_BYTES, checksum
from kvpool.transport.base import Buffers, Bytes, Local, Pieces, Transfer, Transport, no_sum

Checksums = Callable[[], Sequence[int]]
"""Returns one checksum a chunk of some buffers, in order. May wait until the bytes of all of them have been moved."""


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
        act, rows = None, None
        if isinstance(self.blocks, InPlace):
            rows = [self.blocks.blocks[idx] for idx in indices]
        else:
            act = partial(self._call_back, self.blocks)
        add = no_sum if act is not None and self.returns_sums else sums.add
        move = self.transport.write if self.is_write else self.transport.read
        move(transfer, Local(act, rows, add))

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


class _Once:
    """Checksums that are asked for once, and told to everyone who asks, on any thread."""

    def __init__(self, sums: Checksums):
        self._sums = sums
        self._asking = threading.Lock()
        self._found: Sequence[int] | None = None

    def __call__(self) -> Sequence[int]:
        with self._asking:
            if self._found is None:
                self._found = self._sums()
            return self._found


class ChunkSums:
    """One checksum for every chunk of some regions of whole chunks. Threads may add different regions at once."""

    def __init__(self, num_regions: int, region_bytes: int, chunk_bytes: int):
        self._values = np.zeros((num_regions, region_bytes // chunk_bytes), np.uint64)
        self._chunk_bytes = chunk_bytes
        self._later: dict[int, Checksums] = {}

    def add(self, first: int, regions: Sequence[Pieces]) -> None:
        """Sums regions [first, first + len(regions))."""
        for nth, pieces in enumerate(regions, first):
            self._values[nth] = sums_of(pieces, self._chunk_bytes)

    def add_later(self, first: int, sums: Checksums | None) -> Checksums | None:
        """Notes what computes the checksums of regions from `first` on, region-major, and returns it."""
        if sums is None:
            return None
        self._later[first] = once = _Once(sums)
        return once

    def wait(self) -> None:
        """Waits for the checksums that `add_later` was given, whatever becomes of them."""
        for sums in self._later.values():
            with contextlib.suppress(Exception):
                sums()

    def all(self) -> list[int]:
        """Every checksum, region-major; waits for those that `add_later` was given."""
        for first, sums in self._later.items():
            rows = np.array(sums(), np.uint64).reshape(-1, self._values.shape[1])
            self._values[first : first + len(rows)] = rows
        return self._values.reshape(-1).tolist()  # type: ignore[no-any-return]


def sums_of(pieces: Pieces, chunk_bytes: int) -> list[int]:
    """xxh3-64 of every `chunk_bytes` of some pieces, which together are whole chunks."""
    if len(pieces) == 1:
        chunks = [pieces[0][at : at + chunk_bytes] for at in range(0, len(pieces[0]), chunk_bytes)]
        if chunk_bytes <= MAX_LOCKED_BYTES:
            return [checksum(chunk) for chunk in chunks]
        return [xxhash.xxh3_64(chunk.data).intdigest() for chunk in chunks]
    sums: list[int] = []
    hashed, room = xxhash.xxh3_64(), chunk_bytes
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + room]
            hashed.update(part.data)
            at, room = at + len(part), room - len(part)
            if not room:
                sums.append(hashed.intdigest())
                hashed, room = xxhash.xxh3_64(), chunk_bytes
    return sums
