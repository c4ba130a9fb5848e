"""The hit-density policy on a spatial sample of blocks.

A sample of rate R holds about one block in 1/R of each prefix. The full policy's model observes the blocks at some
depths of a prefix, each for all blocks up to the next such depth. On a sample it would observe next to nothing. So this
one observes every sampled block, for 1/R blocks, as if that block's depth were the only one observed around it: then
the model is told of as many blocks as the full policy's, and its priors weigh as much.

Kinds follow the whole prefix: the caller says how many blocks a put adds, and whether the sample has the last of them.

Source: the full policy, `cache/eviction/hit_density.py`. The weights are ours.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import TICK
from kvpool_server.cache.eviction.hit_density import (
    GHOSTS_PER_ENTRY,
    MAX_FORGOTTEN,
    MAX_GROWTH,
    MAX_TURN,
    MIN_GHOSTS,
    SAMPLES,
    TAIL,
    HitDensity,
    is_tail,
    turn_of,
)

_GROWTH_SHIFT, _GROWTH_MASK, _TURN_SHIFT, _TURN_MASK = 1, 7, 4, 3
_DEPTHS = list(SAMPLES)
_WEIGHTS = [1, *SAMPLES.values()]


class SampledHitDensity(HitDensity):
    """See the module.

    Attributes:
        blocks_each: 1/R, the blocks for which each sampled one stands.
        num_added: blocks, sampled or not, that the next call of `stored` adds.
        has_tail: whether the last entry of the next call of `stored` is the last block of its prefix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks_each = 1.0
        self.num_added = 0
        self.has_tail = True

    def _weigh(self, entry: Entry) -> tuple[float, float]:
        """The blocks for which an entry stands, and how many of them the full policy would observe."""
        blocks = self.blocks_each
        return blocks, blocks / _WEIGHTS[bisect.bisect_right(_DEPTHS, entry.depth)]

    def stored(self, entries: Sequence[Entry], stamp: int) -> None:
        if self.blocks_each == 1:
            super().stored(entries, stamp)
            return
        now = self._advance(stamp)
        if not entries:
            return
        turn = num_before = 0
        parent = entries[0].parent
        if parent is not None:
            turn = turn_of(parent)
            num_before = (1 << (parent.used >> _GROWTH_SHIFT & _GROWTH_MASK)) - 1
            if is_tail(parent):
                if parent.depth:
                    kind = parent.used % TICK
                    self._model.reclassify(kind, kind & ~TAIL, parent.used // TICK, now, self._weigh(parent)[0])
                parent.used &= ~TAIL
        growth = min((num_before + max(self.num_added, len(entries))).bit_length() - 1, MAX_GROWTH)
        for entry in entries:
            if entry.depth and (ghost := self._ghosts.pop((entry.group, entry.block_hash), None)) is not None:
                self._model.hit(ghost % TICK, ghost // TICK, now, *self._weigh(entry))
                turn = max(turn, min((ghost >> _TURN_SHIFT & _TURN_MASK) + 1, MAX_TURN))
        tail = entries[-1] if self.has_tail else None
        kind = turn << _TURN_SHIFT | growth << _GROWTH_SHIFT
        for entry in entries:
            of_entry = kind | (entry is tail)
            entry.used = stamp | of_entry
            if entry.depth:
                self._model.start(of_entry, now, *self._weigh(entry))

    def used(self, entries: Sequence[Entry], stamp: int) -> None:
        if self.blocks_each == 1:
            super().used(entries, stamp)
            return
        if not entries:
            return
        now = self._advance(stamp)
        last = entries[-1]
        turn = min(turn_of(last) + 1, MAX_TURN) if last.children <= 1 else 0
        kind = turn << _TURN_SHIFT
        for entry in entries:
            if entry.depth:
                weight, observed = self._weigh(entry)
                self._model.hit(entry.used % TICK, entry.used // TICK, now, weight, observed)
                self._model.start(kind, now, weight, observed)
            entry.used = stamp | kind

    def dropped(self, entry: Entry, num_entries: int) -> None:
        if self.blocks_each == 1:
            super().dropped(entry, num_entries)
            return
        if entry.depth:
            self._ghosts[entry.group, entry.block_hash] = entry.used
            for _ in range(MAX_FORGOTTEN):
                if len(self._ghosts) <= MIN_GHOSTS + GHOSTS_PER_ENTRY * num_entries:
                    break
                self._ghosts.popitem(last=False)
