"""Blocks that lie side by side, moved in one call, and many such calls at once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvpool.hashing import checksum
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.threads import Threads

T = TypeVar("T")

MIN_STRETCH_BYTES = 1 << 20
"""Shorter ones are not worth a thread of their own."""


class Place(NamedTuple):
    """Where a block lies in a tier, and in memory.

    Args:
        view: uint8 [slot_bytes].
        checksums: of its chunks.
    """

    offset: int
    view: memoryview
    checksums: Sequence[int]


class Source(Protocol):
    """Extents that can be read."""

    @property
    def extent_bytes(self) -> int:
        """Of each."""

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """As `Extents.read`."""


async def write_all(threads: Threads, extents: Extents, places: Sequence[Place]) -> None:
    """Returns, or raises OSError, when nothing is under way any more."""
    await _all(
        threads.call(extents.write, stretch[0].offset, [place.view for place in stretch])
        for stretch in _stretches(places, extents.extent_bytes, threads.count)
    )


async def read_all(threads: Threads, source: Source, places: Sequence[Place]) -> list[bool]:
    """Of each place whether its block came, as it was stored; one on a bad spot of the disk did not.

    Raises:
        OSError: of several places not one could be read, or the file system fails otherwise than by a bad spot (EIO).
            Nothing is under way any more.
    """
    stretches = _stretches(places, source.extent_bytes, threads.count)
    parts = await _all(threads.call(_read_stretch, source, stretch) for stretch in stretches)
    results = [result for part in parts for result in part]
    errors = [result for result in results if isinstance(result, OSError)]
    if len(errors) == len(results) > 1:
        raise errors[0]
    return [result is True for result in results]


def _read_stretch(source: Source, stretch: Sequence[Place]) -> list[bool | OSError]:
    """Of each place whether its block came, or the error of its bad spot. Raises any other OSError."""
    failed: bool | OSError = False
    try:
        if source.read(stretch[0].offset, [place.view for place in stretch]):
            return [_is_sound(place) for place in stretch]
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        failed = error
    if len(stretch) == 1:
        return [failed]
    # The file ends in one of them, or one lies on a bad spot.
    return [result for place in stretch for result in _read_stretch(source, [place])]


def _is_sound(place: Place) -> bool:
    size = place.view.nbytes // len(place.checksums)
    return all(
        checksum(place.view[shard * size : (shard + 1) * size]) == expected
        for shard, expected in enumerate(place.checksums)
    )


def _stretches(places: Sequence[Place], extent_bytes: int, parts: int) -> list[list[Place]]:
    """Cuts places, in their order, where they do not lie side by side, and into about as many parts as wanted."""
    most = max(MIN_STRETCH_BYTES, sum(place.view.nbytes for place in places) // parts)
    stretches: list[list[Place]] = []
    ends = nbytes = 0
    for place in places:
        if place.offset != ends or place.offset % extent_bytes == 0 or nbytes >= most:
            stretches.append([])
            nbytes = 0
        stretches[-1].append(place)
        nbytes += place.view.nbytes
        ends = place.offset + place.view.nbytes
    return stretches


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What all of them return; raises what one of them raised, once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
