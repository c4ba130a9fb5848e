"""Which prefixes can be resumed: the rule of each KV-cache group, and the longest boundary that suits all of them.

A boundary is a number of tokens; a hit at boundary L means that the engine computes from token L on. What a group needs
for that is a run of blocks that ends at L: all of them, the window before L, L's own chunk, or the one state at L.
A rule answers for each boundary by itself, and no group's answer depends on another's, so the longest hit is the last
boundary that suits every group.

Source: vLLM, v1/core/single_type_kv_cache_manager.py, `find_longest_cache_hit` and `get_num_skipped_tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Num = TypeVar("Num", int, Ints)


class Reach(enum.Enum):
    """What a token attends to."""

    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Rule:
    """What one group needs.

    Args:
        block_tokens: tokens in a block.
        reach_tokens: WINDOW: tokens before a boundary that are needed; CHUNK: size of a chunk; else 0.
        proves: one block more must be there, and is computed again: a draft model writes the last slot of a block from
            the token after it (EAGLE, MTP).
    """

    reach: Reach
    block_tokens: int
    reach_tokens: int = 0
    proves: bool = False

    def first(self, boundary: Num) -> Num:
        """Index of the first block that a hit at `boundary` needs; of each boundary of an array."""
        match self.reach:
            case Reach.ALL:
                return boundary * 0
            case Reach.WINDOW:
                return (boundary - self.reach_tokens) * (boundary > self.reach_tokens) // self.block_tokens
            case Reach.CHUNK:
                return boundary // self.reach_tokens * self.reach_tokens // self.block_tokens
            case Reach.STATE:
                return boundary // self.block_tokens - 1

    def end(self, boundary: Num) -> Num:
        """Index after the last block that must be there for a hit at `boundary`; of each boundary of an array."""
        return boundary // self.block_tokens + self.proves


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
        self._gapless: Ints | None = None

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

    @property
    def _runs(self) -> Ints:
        """How many blocks without a gap end at each one."""
        if self._gapless is None:
            packed = np.frombuffer(self._complete.to_bytes(-(-self._length // 8), "little"), np.uint8)
            bits = np.unpackbits(packed, count=self._length, bitorder="little")
            nth = np.arange(1, self._length + 1)
            self._gapless = nth - np.maximum.accumulate(np.where(bits, 0, nth))
        return self._gapless


def usable(rules: Sequence[Rule], found: Sequence[Found], local: int, boundary: int) -> bool:
    """Whether every group has what a hit at `boundary` needs beyond the `local` tokens that the engine has itself."""
    return all(
        blocks.has(max(rule.first(boundary), local // rule.block_tokens), rule.end(boundary))
        for rule, blocks in zip(rules, found, strict=True)
    )


def longest(rules: Sequence[Rule], found: Sequence[Found], local: int, limit: int, alignment: int) -> int:
    """The longest usable boundary.

    Args:
        local: tokens that the engine has itself; the answer is not less.
        limit: tokens that the answer may not exceed.
        alignment: of boundaries, in tokens; `local` is one.
    """
    for rule, blocks in zip(rules, found, strict=True):
        if rule.reach is Reach.ALL:
            limit = min(limit, (blocks.leading - rule.proves) * rule.block_tokens)
    limit = limit // alignment * alignment
    if limit <= local or usable(rules, found, local, limit):
        return max(limit, local)
    boundaries = np.arange(limit, local, -alignment)
    are_usable = np.ones(len(boundaries), np.bool_)
    for rule, blocks in zip(rules, found, strict=True):
        start = np.maximum(rule.first(boundaries), local // rule.block_tokens)
        are_usable &= blocks.have(start, rule.end(boundaries))
    nth = int(are_usable.argmax())
    return int(boundaries[nth]) if are_usable[nth] else local
