"""Checksums of the chunks that a transfer moves, computed by whoever has moved them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from kvpool.protocol.hashing import MAX_LOCKED_BYTES, checksum
from kvpool.transport.base import Pieces

Checksums = Callable[[], Sequence[int]]
"""Returns one checksum a chunk of some buffers, in order. May wait until the bytes of all of them have been moved."""


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
    """One checksum for every chunk of some regions of whole chunks. Threads may add different regions at once.

    Attributes:
        values: what was computed, uint64 [regions, chunks of a region].
    """

    def __init__(self, num_regions: int, region_bytes: int, chunk_bytes: int):
        self.values = np.zeros((num_regions, region_bytes // chunk_bytes), np.uint64)
        self.chunk_bytes = chunk_bytes
        self._later: dict[int, Checksums] = {}

    def add(self, first: int, regions: Sequence[Pieces]) -> None:
        """Sums regions [first, first + len(regions))."""
        for nth, pieces in enumerate(regions, first):
            self.values[nth] = sums_of(pieces, self.chunk_bytes)

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
            rows = np.array(sums(), np.uint64).reshape(-1, self.values.shape[1])
            self.values[first : first + len(rows)] = rows
        return self.values.reshape(-1).tolist()  # type: ignore[no-any-return]


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
