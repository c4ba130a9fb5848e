"""The bytes of a put or get between the caller and the transport, with their checksums.

`Client.put` makes a `BlockWriter`, `Client.get` a `BlockReader`. Each hands a transfer to the transport, with the
caller's arrays or a callback that calls the caller's own with block indices. The thread that has moved bytes computes
their checksums.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.hashing import checksum
from kvpool.transport.base import Buffers, Bytes, Pieces, Sink, Source, Transfer, Transport, no_sum

Checksums = Callable[[], Sequence[int]]
"""Returns one checksum a chunk of some buffers, in order. May wait until the bytes of all of them have been moved."""

MIN_UNLOCKED_BYTES = 16 << 10
"""Smaller chunks are summed with Python's lock (the GIL) held: to release and acquire it would cost more."""


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


class BlockWriter:
    """The bytes of one put. With `fill_sums`, `fill` returns the checksums.

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
        fill_sums: bool,
        granted: Sequence[int],
        region_bytes: int,
        chunk_bytes: int,
    ):
        self.fill_error: Exception | None = None
        self._transport = transport
        self._fill = fill
        self._fill_sums = fill_sums
        self._granted = granted
        self._sums = ChunkSums(len(granted), region_bytes, chunk_bytes)

    def write(self, transfer: Transfer) -> list[int]:
        """Moves the blocks; returns one checksum a chunk, region-major. Raises as `Transport.write` and `fill`."""
        if isinstance(self._fill, InPlace):
            rows = [self._fill.blocks[idx] for idx in self._granted]
            self._transport.write(transfer, Source(rows=rows, sum=self._sums.add))
        else:
            self._transport.write(transfer, Source(self._fill_batch, sum=no_sum if self._fill_sums else self._sums.add))
        return self._sums.all()

    def wait(self) -> None:
        """After a failure: waits until no callback's copy is in flight, so that the regions may be revoked."""
        self._sums.wait()

    def _fill_batch(self, first: int, buffers: Buffers) -> Checksums | None:
        assert not isinstance(self._fill, InPlace)
        try:
            filled = self._sums.add_later(first, self._fill(self._granted[first : first + len(buffers)], buffers))
            _check_sums("fill", filled, self._fill_sums)
        except Exception as error:
            self.fill_error = error
            raise
        return filled


class BlockReader:
    """The bytes of one get, which may take several transfers. With `drain_sums`, `drain` returns the checksums."""

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
            sink = Sink(rows=[self._drain.blocks[idx] for idx in indices], sum=sums.add)
        else:
            sink = Sink(self._drain_batch, sum=no_sum if self._drain_sums else sums.add)
        self._transport.read(transfer, sink)

    def checksums(self) -> list[int]:
        """One checksum a chunk that was read, in order; waits for the callback's copies."""
        return [each for sums in self._parts for each in sums.all()]

    def _drain_batch(self, first: int, buffers: Buffers) -> Checksums | None:
        assert not isinstance(self._drain, InPlace)
        drained = self._drain(self._indices[first : first + len(buffers)], buffers)
        _check_sums("drain", drained, self._drain_sums)
        return self._parts[-1].add_later(first, drained)


def _check_sums(callback: str, sums: Checksums | None, are_wanted: bool) -> None:
    if (sums is not None) != are_wanted:
        found = "None" if sums is None else "checksums"
        raise InvalidRequestError(f"the {callback} callback returned {found}, and {callback}_sums is {are_wanted}")


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
        if chunk_bytes < MIN_UNLOCKED_BYTES:
            return [checksum(chunk) for chunk in chunks]
        return [xxhash.xxh3_64(chunk.data).intdigest() for chunk in chunks]  # Releases the GIL.
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
