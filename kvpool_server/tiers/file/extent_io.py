"""Reads and writes of blocks: adjacent blocks in one call, and several calls at once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.peer_directories import PeerBlocks
from kvpool_server.tiers.thread_pool import DaemonThreadPool
from kvpool_server.tiers.tier import is_sound

T = TypeVar("T")

ReadableExtents = Extents | PeerBlocks
"""This server's extents, or a peer's."""
MIN_SPAN_BYTES = 1 << 20
"""A shorter span is not worth a call of its own."""


class BlockSpot(NamedTuple):
    """Where a block lies in a tier, and in memory.

    Args:
        view: uint8 [slot_bytes].
        checksums: of its chunks.
        is_authentic: whether bytes have the block's tag, where servers share a key.
    """

    offset: int
    view: memoryview
    checksums: Sequence[int]
    is_authentic: Callable[[memoryview], bool] | None = None

    def is_sound(self) -> bool:
        """Whether the bytes in memory match the checksums, and the tag if there is one."""
        is_authentic = self.is_authentic is None or self.is_authentic(self.view)
        return is_authentic and is_sound(self.view, self.checksums)


async def write_all(threads: DaemonThreadPool, extents: Extents, spots: Sequence[BlockSpot]) -> None:
    """Returns, or raises OSError, when no call is under way any more."""
    await _all(
        threads.call(extents.write, span[0].offset, [spot.view for spot in span])
        for span in _spans(spots, extents.extent_bytes, threads.num_threads)
    )


async def read_all(threads: DaemonThreadPool, source: ReadableExtents, spots: Sequence[BlockSpot]) -> list[bool]:
    """For each block whether it was read and is sound; a block on a bad sector of the disk is not.

    Raises:
        OSError: none of several blocks could be read, or the file system fails other than by a bad sector (EIO). No
            call is under way any more.
    """
    spans = _spans(spots, source.extent_bytes, threads.num_threads)
    parts = await _all(threads.call(_read_span, source, span) for span in spans)
    results = [result for part in parts for result in part]
    errors = [result for result in results if isinstance(result, OSError)]
    if len(errors) == len(results) > 1:
        raise errors[0]
    return [result is True for result in results]


def _read_span(source: ReadableExtents, span: Sequence[BlockSpot]) -> list[bool | OSError]:
    """For each block whether it was read and is sound, or the error of its bad sector. Raises any other OSError."""
    failed: bool | OSError = False
    try:
        if source.read(span[0].offset, [spot.view for spot in span]):
            return [spot.is_sound() for spot in span]
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        failed = error
    if len(span) == 1:
        return [failed]
    # The file ends in one of the blocks, or one lies on a bad sector: read each by itself.
    return [result for spot in span for result in _read_span(source, [spot])]


def _spans(spots: Sequence[BlockSpot], extent_bytes: int, num_parts: int) -> list[list[BlockSpot]]:
    """Adjacent blocks, in their order, cut at the ends of extents and into about `num_parts` parts."""
    most = max(MIN_SPAN_BYTES, sum(spot.view.nbytes for spot in spots) // num_parts)
    spans: list[list[BlockSpot]] = []
    end = nbytes = 0
    for spot in spots:
        if spot.offset != end or spot.offset % extent_bytes == 0 or nbytes >= most:
            spans.append([])
            nbytes = 0
        spans[-1].append(spot)
        nbytes += spot.view.nbytes
        end = spot.offset + spot.view.nbytes
    return spans


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all calls. Raises the error of one of them, once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
