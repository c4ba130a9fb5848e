"""Which prefixes can be resumed: the rule of each KV-cache group, and the longest boundary that suits all of them.

A boundary is a number of tokens; a hit at boundary L means that the engine computes from token L on. What a group needs
for that is a run of blocks that ends at L: all of them, the window before L, L's own chunk, or the one state at L.
A rule answers for one boundary at a time, so the longest hit is found by walking down from the end of the prompt: no
group's answer depends on another's.

Source: vLLM, v1/core/single_type_kv_cache_manager.py, `find_longest_cache_hit` and `get_num_skipped_tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


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

    def first(self, boundary: int) -> int:
        """Index of the first block that a hit at `boundary` needs."""
        match self.reach:
            case Reach.ALL:
                return 0
            case Reach.WINDOW:
                return max(0, boundary - self.reach_tokens) // self.block_tokens
            case Reach.CHUNK:
                return boundary // self.reach_tokens * self.reach_tokens // self.block_tokens
            case Reach.STATE:
                return boundary // self.block_tokens - 1

    def end(self, boundary: int) -> int:
        """Index after the last block that must be there for a hit at `boundary`."""
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
        num_leading = (~complete & (complete + 1)).bit_length() - 1
        self.leading = first + num_leading
        # How many blocks without a gap end at each one; bitmaps of thousands of bits are walked as text.
        self._runs = list(range(1, num_leading + 1))
        run = 0
        for bit in reversed(f"{complete >> num_leading:b}") if complete >> num_leading else "":
            run = run + 1 if bit == "1" else 0
            self._runs.append(run)
        self._runs += [0] * (length - len(self._runs))

    def has(self, start: int, stop: int) -> bool:
        """Whether blocks [start, stop) are all there; `start` is not before the first that was asked for."""
        if stop <= start:
            return True
        last = stop - 1 - self.first
        return last < len(self._runs) and self._runs[last] >= stop - start


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
    for boundary in range(limit // alignment * alignment, local, -alignment):
        if usable(rules, found, local, boundary):
            return boundary
    return local
