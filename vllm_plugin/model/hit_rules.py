"""The longest prefix that can be resumed: the last boundary at which every KV-cache group has what its kind needs.

A boundary is a number of tokens; a hit at boundary L means that the engine computes from token L on. What a group needs
for that (`kinds.py`) is a run of blocks that ends at L. Each boundary is judged by itself, and each group by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_plugin.model.kinds import Ints, Kind


class Found:
    """Which blocks of one group are there.

    Args:
        first: index of the first block that was asked for.
        complete: bitmap from `first` on.
        length: how many were asked for.

    Attributes:
        leading: index after the first blocks without a gap.
    """

    def __init__(self, first: int, complete: int, length: int):
        self.first = first
        self.leading = first + (~complete & (complete + 1)).bit_length() - 1
        self._complete = complete
        self._length = max(length, complete.bit_length())

    def has(self, start: int, stop: int) -> bool:
        """Whether blocks [start, stop) are all there; `start` is not before the first that was asked for."""
        if stop <= max(start, self.leading):
            return True
        last = stop - 1 - self.first
        return last < self._length and int(self._runs[last]) >= stop - start

    def have(self, start: Ints, stop: Ints) -> npt.NDArray[np.bool_]:
        """The same for each pair of two arrays."""
        if not self._length:
            return stop <= start
        last = stop - 1 - self.first
        runs = self._runs[np.clip(last, 0, self._length - 1)]
        return (stop <= start) | ((last < self._length) & (runs >= stop - start))

    @functools.cached_property
    def _runs(self) -> Ints:
        """How many blocks without a gap end at each one."""
        packed = np.frombuffer(self._complete.to_bytes(-(-self._length // 8), "little"), np.uint8)
        bits = np.unpackbits(packed, count=self._length, bitorder="little")
        nth = np.arange(1, self._length + 1)
        return nth - np.maximum.accumulate(np.where(bits, 0, nth))


def usable(kinds: Sequence[Kind], found: Sequence[Found], local: int, boundary: int) -> bool:
    """Whether every group has what a hit at `boundary` needs beyond the `local` tokens that the engine has itself."""
    return all(
        blocks.has(max(kind.first(boundary), local // kind.block_tokens), kind.end(boundary))
        for kind, blocks in zip(kinds, found, strict=True)
    )


def longest(kinds: Sequence[Kind], found: Sequence[Found], local: int, limit: int, alignment: int) -> int:
    """The longest usable boundary.

    Args:
        local: tokens that the engine has itself; the answer is not less.
        limit: tokens that the answer may not exceed.
        alignment: of boundaries, in tokens; `local` is one.
    """
    for kind, blocks in zip(kinds, found, strict=True):
        if kind.needs_prefix:
            limit = min(limit, (blocks.leading - kind.proves) * kind.block_tokens)
    limit = limit // alignment * alignment
    if limit <= local or usable(kinds, found, local, limit):
        return max(limit, local)
    boundaries = np.arange(limit, local, -alignment)
    are_usable = np.ones(len(boundaries), np.bool_)
    for kind, blocks in zip(kinds, found, strict=True):
        start = np.maximum(kind.first(boundaries), local // kind.block_tokens)
        are_usable &= blocks.have(start, kind.end(boundaries))
    nth = int(are_usable.argmax())
    return int(boundaries[nth]) if are_usable[nth] else local
