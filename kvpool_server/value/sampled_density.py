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
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from kvpool_server.cache.entry import Entry
from kvpool_server.cache.eviction.base import TICK
from kvpool_server.cache.eviction.ghosts import NUM_PLACES
from kvpool_server.cache.eviction.hit_density import (
    GHOSTS_PER_ENTRY,
    MAX_FORGOTTEN,
    MAX_GROWTH,
    MAX_TURN,
    MIN_GHOSTS,
    NUM_KINDS,
    SAMPLES,
    TAIL,
    DensityQueue,
    HitDensity,
    is_tail,
    turn_of,
)
from kvpool_server.cache.eviction.hit_density_model import HitDensityModel

MAX_CHECKPOINTS, MAX_COHORTS, MAX_BUCKETS = 128, 512, 512
"""They bound the memory of a miniature. Fewer buckets than the full policy's cost two points of accuracy."""
GHOSTS_OF = 4
"""One block in so many of the sample becomes a ghost, which stands for all of them."""

_GROWTH_SHIFT, _GROWTH_MASK, _TURN_SHIFT, _TURN_MASK = 1, 7, 4, 3
_DEPTHS = list(SAMPLES)
_SHARES = [1.0, *(1 / weight for weight in SAMPLES.values())]
_SHARE_OF_DEPTH = [_SHARES[bisect.bisect_right(_DEPTHS, depth)] for depth in range(4_096)]


def _share(depth: int) -> float:
    """Of the blocks around a depth, the share that the full policy observes."""
    return _SHARE_OF_DEPTH[depth] if depth < 4_096 else _SHARES[bisect.bisect_right(_DEPTHS, depth)]


class SampledHitDensity(HitDensity):
    """See the module.

    Attributes:
        blocks_each: 1/R, the blocks for which each sampled one stands.
        num_added: blocks, sampled or not, that the next call of `stored` adds.
        has_tail: whether the last entry of the next call of `stored` is the last block of its prefix.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model = HitDensityModel(NUM_KINDS, MAX_CHECKPOINTS, MAX_COHORTS)
        self.queue = DensityQueue(self._model, MAX_BUCKETS)
        self.blocks_each = 1.0
        self.num_added = 0
        self.has_tail = True
        self._sampled_ghosts: OrderedDict[int, tuple[int, int]] = OrderedDict()  # Stamp of the last use, and depth.
        self._ghost_shares = 0.0  # Of them, those that the full policy would have.

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
                    self._model.reclassify(kind, kind & ~TAIL, parent.used // TICK, now, self.blocks_each)
                parent.used &= ~TAIL
        growth = min((num_before + max(self.num_added, len(entries))).bit_length() - 1, MAX_GROWTH)
        blocks, observed = self.blocks_each, 0.0
        for entry in entries:
            if entry.depth:
                share = _share(entry.depth)
                observed += share
                if (ghost := self._sampled_ghosts.pop(cast("int", entry.block_hash), None)) is not None:
                    self._ghost_shares -= GHOSTS_OF * share
                    used = ghost[0]
                    self._model.hit(used % TICK, used // TICK, now, GHOSTS_OF * blocks, GHOSTS_OF * blocks * share)
                    turn = max(turn, min((used >> _TURN_SHIFT & _TURN_MASK) + 1, MAX_TURN))
        kind = turn << _TURN_SHIFT | growth << _GROWTH_SHIFT
        for entry in entries:
            entry.used = stamp | kind
        count = len(entries) - (entries[0].depth == 0)
        last = entries[-1]
        if self.has_tail:
            last.used |= TAIL
            if last.depth:
                share = _share(last.depth)
                self._model.start(kind | TAIL, now, blocks, blocks * share)
                count, observed = count - 1, observed - share
        if count:
            self._model.start(kind, now, blocks * count, blocks * observed)

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
        waits: dict[int, list[float]] = {}  # Entries and shares by stamp: mostly one stamp.
        for entry in entries:
            if entry.depth:
                wait = waits.setdefault(entry.used, [0, 0.0])
                wait[0] += 1
                wait[1] += _share(entry.depth)
            entry.used = stamp | kind
        for used, (count, share) in waits.items():
            weight, observed = self.blocks_each * count, self.blocks_each * share
            self._model.hit(used % TICK, used // TICK, now, weight, observed)
            self._model.start(kind, now, weight, observed)

    def _place(self, entry: Entry) -> int:
        return cast("int", entry.block_hash) % NUM_PLACES  # Of a `MiniEntry`.

    def dropped(self, entry: Entry, num_entries: int) -> None:
        if self.blocks_each == 1:
            super().dropped(entry, num_entries)
            return
        key = cast("int", entry.block_hash)  # Of a `MiniEntry`.
        if entry.depth and key % GHOSTS_OF == 0:
            ghosts = self._sampled_ghosts
            ghosts[key] = entry.used, entry.depth
            self._ghost_shares += GHOSTS_OF * _share(entry.depth)
            most = MIN_GHOSTS / self.blocks_each + GHOSTS_PER_ENTRY * num_entries
            for _ in range(MAX_FORGOTTEN):
                if not ghosts or (self._ghost_shares <= most and len(ghosts) <= num_entries):
                    break
                _, depth = ghosts.popitem(last=False)[1]
                self._ghost_shares -= GHOSTS_OF * _share(depth)
