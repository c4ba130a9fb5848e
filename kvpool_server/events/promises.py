"""The blocks of one namespace that routers may promise: see `prefixes.py` for the rule.

A change of one block may concern all blocks behind it, so blocks are judged in steps: one change after the other, each
with all it concerns before the next one begins. A block that changes again before it is judged is judged once.

Invariant: once all blocks are judged, what is published is closed under prefixes, and each block was published after
the block before it. Not thread-safe: the pool's event loop owns the blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvpool.errors import InvalidRequestError
from kvpool.namespace import NamespaceSpec
from kvpool.types import BlockRun
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.events.ledger import Change

MAX_LEFT = 1 << 17
"""Blocks that are not held and whose tokens are remembered: they may come back, for example from a tier."""
MAX_LEFT_BYTES = 64 << 20
"""Of their tokens."""
TOKEN_BYTES = 4
WALK_BLOCKS = 8
"""A walk over so many announced blocks takes the time of judging one."""


def main_group(spec: NamespaceSpec) -> int | None:
    """Index of the group whose blocks make the chain: the one with the smallest blocks that needs whole prefixes."""
    sizes = {idx: group.block_tokens for idx, group in enumerate(spec.groups) if not group.hit_blocks}
    return min(sizes, key=lambda idx: sizes[idx], default=None)


class _Block(NamedTuple):
    """What an engine has announced of a block: the block before it, empty at the start of a prefix, and its tokens."""

    parent_hash: bytes
    tokens: bytes


class Promises:
    """See the module. At first they rest: it is noted which blocks are held and announced, and nothing is published.

    Args:
        group: any of its groups, which names the namespace in changes.

    Attributes:
        main_idx: see `main_group`.
    """

    def __init__(self, spec: NamespaceSpec, group: Group):
        main_idx = main_group(spec)
        assert main_idx is not None, "a view follows namespaces with a group that needs whole prefixes"
        self.main_idx = main_idx
        self._is_resting = True
        self._label = group
        sizes = [each.block_tokens for each in spec.groups]
        main_size = sizes[main_idx]
        self._ratio = math.lcm(*sizes) // main_size
        self._block_bytes = main_size * TOKEN_BYTES
        # Of each other group: its blocks, in blocks of the main group, and how many of them a hit needs before its end.
        # Where it needs all, those before the last published block are there.
        self._others = [
            (idx, sizes[idx] // main_size, each.hit_blocks or math.lcm(*sizes) // sizes[idx])
            for idx, each in enumerate(spec.groups)
            if idx != main_idx
        ]
        # How far behind a block of another group the hits end that need it, in blocks of the main group.
        self._reach = max((step * count for _, step, count in self._others), default=0)
        self._held: list[set[bytes]] = [set() for _ in spec.groups]
        self._announced: dict[bytes, _Block] = {}  # Held blocks of the main group.
        self._left: dict[bytes, _Block] = {}  # Blocks that are not held, the oldest first; `_block_bytes` each.
        self._max_left = min(MAX_LEFT, MAX_LEFT_BYTES // self._block_bytes)
        self._children: defaultdict[bytes, set[bytes]] = defaultdict(set)  # Of announced blocks.
        # Of announced blocks before which none is missing: the depth, from 1, and the announcement it was judged by.
        self._depths: dict[bytes, tuple[int, _Block]] = {}
        # Of each other group: how many of its blocks end with a block that has a depth, without a gap; at most as many
        # as a hit needs, which is also what there is where none is missing since the start of the prefix.
        self._unbroken: list[dict[bytes, int]] = [{} for _ in spec.groups]
        self._published: dict[bytes, _Block] = {}  # As it was told: with all tokens of a published block.
        # Blocks to judge, and how far behind them blocks may change. Each is there once, so that changes of one block
        # neither pile up, nor withdraw and publish all behind it again and again.
        self._changed: OrderedDict[bytes, int] = OrderedDict()
        self._under_way: list[tuple[bytes, int]] = []  # The same, of the change that is being judged.

    def wake(self) -> None:
        """Has all blocks judged, and published from now on."""
        self._is_resting = False
        for block_hash in self._children.get(b"", ()):
            self._change(block_hash, 0)

    def rest(self) -> None:
        """Publishes nothing any more, and forgets all that has no use until the next `wake`."""
        self._is_resting = True
        for blocks in (self._left, self._published):
            blocks.clear()
        for unbroken in self._unbroken:
            unbroken.clear()
        self._depths.clear()
        self._changed.clear()
        self._under_way.clear()

    @property
    def has_beginning(self) -> bool:
        """Whether the first block of a prefix is held and announced."""
        return b"" in self._children

    @property
    def is_empty(self) -> bool:
        """Whether nothing is published, or about to be."""
        return not self._published and not self.is_behind

    def stored(self, entry: Entry) -> None:
        block_hash, idx = entry.block_hash, entry.group.idx
        self._held[idx].add(block_hash)
        if idx != self.main_idx:
            self._change(block_hash, self._reach)
        elif (block := self._left.pop(block_hash, None)) is not None:
            self._add(block_hash, block)

    def removed(self, entry: Entry) -> None:
        block_hash, idx = entry.block_hash, entry.group.idx
        self._held[idx].discard(block_hash)
        if idx != self.main_idx:
            self._change(block_hash, self._reach)
        elif (block := self._announced.pop(block_hash, None)) is not None:
            self._remember(block_hash, block)
            self._unlink(block_hash, block)
            self._change(block_hash, 0)

    def announced(self, run: BlockRun, token_ids: Sequence[int]) -> None:
        """The last announcement of a block counts.

        Raises InvalidRequestError for another number of tokens than the blocks have.
        """
        packed = np.array(token_ids, "<u4").tobytes()
        if len(packed) != len(run) * self._block_bytes:
            raise InvalidRequestError(
                f"{len(token_ids)} token_ids for {len(run)} blocks; give {self._block_bytes // TOKEN_BYTES} for each "
                f"block of group {self.main_idx}"
            )
        parent_hash = run.parent_hash
        for nth, block_hash in enumerate(run.block_hashes):
            block = _Block(parent_hash, packed[nth * self._block_bytes : (nth + 1) * self._block_bytes])
            parent_hash = block_hash
            if block_hash not in self._held[self.main_idx]:
                self._remember(block_hash, block)
            elif (before := self._announced.get(block_hash)) != block:
                if before is not None:
                    self._unlink(block_hash, before)
                self._add(block_hash, block)

    def _add(self, block_hash: bytes, block: _Block) -> None:
        self._announced[block_hash] = block
        self._children[block.parent_hash].add(block_hash)
        # A block that was away and was not judged meanwhile seems unchanged, but changes before it have passed over
        # those behind it, and those could not be judged by its tokens.
        self._change(block_hash, max(self._reach, self._ratio) if block_hash in self._depths else 0)

    def _unlink(self, block_hash: bytes, block: _Block) -> None:
        siblings = self._children[block.parent_hash]
        siblings.remove(block_hash)
        if not siblings:
            del self._children[block.parent_hash]

    def _change(self, block_hash: bytes, reach: int) -> None:
        if not self._is_resting:
            self._changed[block_hash] = max(reach, self._changed.get(block_hash, 0))

    def _remember(self, block_hash: bytes, block: _Block) -> None:
        if self._is_resting:
            return
        self._left.pop(block_hash, None)
        self._left[block_hash] = block
        if len(self._left) > self._max_left:
            del self._left[next(iter(self._left))]

    @property
    def is_behind(self) -> bool:
        """Whether blocks are to be judged."""
        return bool(self._changed or self._under_way)

    def judge(self, most: int) -> list[Change]:
        """Judges at most so many blocks; returns what is to be published, in order."""
        changes: list[Change] = []
        while most > 0 and self.is_behind:
            if not self._under_way:
                self._under_way.append(self._changed.popitem(last=False))
            stored: list[Change] = []
            withdrawn: list[Change] = []
            while most > 0 and self._under_way:
                most -= 1 + self._judge_one(*self._under_way.pop(), stored, withdrawn) // WALK_BLOCKS
            changes += stored + withdrawn[::-1]
        return changes

    def _judge_one(self, block_hash: bytes, reach: int, stored: list[Change], withdrawn: list[Change]) -> int:
        """Judges a block, and has those behind it judged next as far as they are concerned.

        Returns how many announced blocks it has walked over.

        Args:
            reach: how many blocks behind it are judged even if nothing has changed before them.
        """
        depth, before = self._depth(block_hash), self._depths.pop(block_hash, None)
        if depth is not None and before is not None and depth != before:
            # Announced anew before it was judged. All behind it loses its depth first, so that a chain that bites its
            # tail comes to rest without any: its depths would grow for ever.
            depth = None
            self._change(block_hash, 0)
        if depth is not None:
            self._depths[block_hash] = depth
        walked = self._count_unbroken(block_hash, depth[0] if depth is not None else 0)
        span = None
        if depth is not None and depth[0] % self._ratio == 0:
            span = self._span(block_hash)
            walked += self._ratio
        told = self._published.get(block_hash)
        if span is not None and told is not None and span != told:
            # Announced anew; all behind it is withdrawn with it, and then published again.
            span = None
            self._change(block_hash, 0)
        if span is not None and told is None:
            self._published[block_hash] = span
            stored.append(Change(True, self._label, block_hash, *span))
        elif span is None and told is not None:
            del self._published[block_hash]
            withdrawn.append(Change(False, self._label, block_hash, b""))
        if span != told or depth != before:
            reach = max(reach, self._ratio)
        if reach:
            self._under_way += ((child, reach - 1) for child in self._children.get(block_hash, ()))
        return walked

    def _depth(self, block_hash: bytes) -> tuple[int, _Block] | None:
        """How many blocks of the main group end with a block, if all of them are held and announced."""
        if (block := self._announced.get(block_hash)) is None:
            return None
        if not block.parent_hash:
            return 1, block
        before = self._depths.get(block.parent_hash)
        return (before[0] + 1, block) if before is not None else None

    def _span(self, block_hash: bytes) -> _Block | None:
        """The published block before one that has a depth, and its tokens; None if no hit can end with the block."""
        tokens, parent_hash = [], block_hash
        for _ in range(self._ratio):
            if (block := self._announced.get(parent_hash)) is None:
                return None  # It has just left, and is judged next.
            parent_hash = block.parent_hash
            tokens.append(block.tokens)
        if parent_hash and parent_hash not in self._published:
            return None
        if any(self._unbroken[idx].get(block_hash, 0) < count for idx, _, count in self._others):
            return None
        return _Block(parent_hash, b"".join(reversed(tokens)))

    def _count_unbroken(self, block_hash: bytes, depth: int) -> int:
        """Notes how many blocks of each other group end with a block; returns how many it has walked over for that."""
        walked = 0
        for idx, step, count in self._others:
            unbroken = self._unbroken[idx]
            unbroken.pop(block_hash, None)
            if not depth or depth % step or block_hash not in self._held[idx]:
                continue
            walked += step
            before: bytes | None = block_hash
            for _ in range(step):
                before = block.parent_hash if before and (block := self._announced.get(before)) is not None else None
            if before is not None:  # Else one has just left, and is judged next.
                unbroken[block_hash] = min(unbroken.get(before, 0) + 1, count) if before else count
        return walked
