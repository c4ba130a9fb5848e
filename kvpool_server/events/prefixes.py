"""The prefixes that routers may promise: blocks from which an engine can resume, each with its tokens.

Routers that index blocks by tokens take the longest run of stored blocks from a prompt's start for a hit. So a block is
published only while it is usable by itself:
- every block before it is there, and is published;
- every KV-cache group has what a hit needs that ends with it (`GroupSpec.hit_blocks`): the blocks of a window before
  it, or its state;
- its tokens are known, since an engine has announced them.

A published block has the tokens of the namespace's alignment: a whole block of every group. It is named by the hash
of its last block.

A view follows one namespace: of those with its model and tenant, the one that has begun to hold blocks last. Pipeline
stages have namespaces of their own, of which none alone can be promised: their blocks are not published. Nor are blocks
whose names a key hides.

How blocks follow each other is what engines announce, beside the tokens. A block of several blocks of the main group
has the name of the last of them, so that the chain of the main group leads to the blocks of all groups.

A change of one block may concern all blocks behind it, so blocks are judged in steps of `STEP_BLOCKS`: one change after
the other, each with all it concerns before the next one begins.

Invariant: once all blocks are judged, what is published is closed under prefixes, and each block was published after
the block before it. Not thread-safe: the pool's event loop owns the view.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.errors import InvalidRequestError
from kvpool.name_key import FIELD
from kvpool.namespace import NamespaceSpec
from kvpool.types import BlockRun
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.events.ledger import Change, Ledger

MAX_LEFT = 1 << 17
"""Blocks that are not held and whose tokens are remembered: they may come back, for example from a tier."""
MAX_LEFT_BYTES = 64 << 20
"""Of their tokens."""
MAX_BLOCK_TOKENS = 4_096
"""In a block of the main group; namespaces with larger ones are not followed."""
MAX_HIT_BLOCKS = 4_096
"""That a hit needs of a group; namespaces with larger windows are not followed. All of them change with one block."""
MAX_ALIGNMENT = 1 << 16
"""Tokens in a published block; namespaces with larger ones are not followed."""
TOKEN_BYTES = 4
STEP_BLOCKS = 2_048
"""Most that are judged in one turn of the loop."""
WALK_BLOCKS = 8
"""A walk over so many announced blocks takes the time of judging one."""


def main_group(spec: NamespaceSpec) -> int | None:
    """Index of the group whose blocks make the chain: the one with the smallest blocks that needs whole prefixes."""
    sizes = {idx: group.block_tokens for idx, group in enumerate(spec.groups) if not group.hit_blocks}
    return min(sizes, key=lambda idx: sizes[idx], default=None)


class PrefixView(Observer):
    """See the module.

    Args:
        model, tenant: of the namespaces.
        ledger: gets the changes of what is published.
        spec_of: the specification of an open namespace; None: it is not open.
        defer: schedules a function for the next turn of the pool's loop.
    """

    def __init__(
        self,
        model: str,
        tenant: str,
        ledger: Ledger,
        spec_of: Callable[[bytes], NamespaceSpec | None],
        defer: Callable[[Callable[[], None]], object],
    ):
        self.model = model
        self.tenant = tenant
        self._ledger = ledger
        self._spec_of = spec_of
        self._defer = defer
        self._is_deferred = False
        self._passed: set[bytes] = set()  # Namespaces that are not followed, or not any more.
        self._followed: _Followed | None = None

    def follows(self, spec: NamespaceSpec) -> bool:
        """Whether blocks of a namespace may be published, so that their tokens are wanted."""
        if (spec.model, spec.tenant) != (self.model, self.tenant) or spec.num_pipeline_stages > 1:
            return False
        return (
            (main := main_group(spec)) is not None
            and spec.groups[main].block_tokens <= MAX_BLOCK_TOKENS
            and FIELD not in dict(spec.extra)
            and all(group.block_tokens % spec.groups[main].block_tokens == 0 for group in spec.groups)
            and all(group.hit_blocks <= MAX_HIT_BLOCKS for group in spec.groups)
            and math.lcm(*(group.block_tokens for group in spec.groups)) <= MAX_ALIGNMENT
        )

    def stored(self, entry: Entry) -> None:
        if (followed := self._of(entry.group)) is not None:
            followed.stored(entry)
            self._publish()

    def removed(self, entry: Entry) -> None:
        followed = self._followed
        if followed is not None and followed.fingerprint == entry.group.fingerprint:
            followed.removed(entry)
            self._publish()

    def announced(self, fingerprint: bytes, run: BlockRun, tokens: Sequence[int]) -> None:
        """An engine has told which tokens blocks stand for: `block_tokens` of the group each."""
        followed = self._followed
        if followed is not None and followed.fingerprint == fingerprint and run.group_idx == followed.main_idx:
            followed.announced(run, tokens)
            self._publish()

    def _of(self, group: Group) -> _Followed | None:
        """The followed namespace, if a group is of that; begins to follow a namespace that is new."""
        fingerprint = group.fingerprint
        if self._followed is not None and self._followed.fingerprint == fingerprint:
            return self._followed
        if fingerprint in self._passed:
            return None
        spec = self._spec_of(fingerprint)
        if spec is None or not self.follows(spec):
            self._passed.add(fingerprint)
            return None
        if self._followed is not None:
            self._passed.add(self._followed.fingerprint)
            self._ledger.clear()
        self._followed = _Followed(spec, fingerprint, group)
        return self._followed

    def _publish(self) -> None:
        """Judges blocks, and tells what comes of it; the rest in later turns."""
        if self._is_deferred or self._followed is None:
            return
        for change in self._followed.judge(STEP_BLOCKS):
            self._ledger.note(change)
        if self._followed.is_behind:
            self._is_deferred = True
            self._defer(self._go_on)

    def _go_on(self) -> None:
        self._is_deferred = False
        self._publish()


class _Block(NamedTuple):
    """What an engine has announced of a block: the block before it, empty at the start of a prefix, and its tokens."""

    parent_hash: bytes
    tokens: bytes


class _Followed:
    """The blocks of one namespace.

    Args:
        group: any of its groups, which names the namespace in changes.

    Attributes:
        main_idx: see `main_group`.
    """

    def __init__(self, spec: NamespaceSpec, fingerprint: bytes, group: Group):
        main_idx = main_group(spec)
        assert main_idx is not None, "a view follows namespaces with a group that needs whole prefixes"
        self.fingerprint = fingerprint
        self.main_idx = main_idx
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
        self._published: set[bytes] = set()
        self._changed: deque[tuple[bytes, int]] = deque()  # Blocks to judge, and how far behind them blocks may change.
        self._under_way: list[tuple[bytes, int]] = []  # The same, of the change that is being judged.

    def stored(self, entry: Entry) -> None:
        block_hash, idx = entry.block_hash, entry.group.idx
        self._held[idx].add(block_hash)
        if idx != self.main_idx:
            self._changed.append((block_hash, self._reach))
        elif (block := self._left.pop(block_hash, None)) is not None:
            self._add(block_hash, block)
            self._changed.append((block_hash, 0))

    def removed(self, entry: Entry) -> None:
        block_hash, idx = entry.block_hash, entry.group.idx
        self._held[idx].discard(block_hash)
        if idx != self.main_idx:
            self._changed.append((block_hash, self._reach))
        elif (block := self._announced.pop(block_hash, None)) is not None:
            self._remember(block_hash, block)
            siblings = self._children[block.parent_hash]
            siblings.remove(block_hash)
            if not siblings:
                del self._children[block.parent_hash]
            self._changed.append((block_hash, 0))

    def announced(self, run: BlockRun, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError for another number of tokens than the blocks have."""
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
            elif block_hash not in self._announced:
                self._add(block_hash, block)
                self._changed.append((block_hash, 0))

    def _add(self, block_hash: bytes, block: _Block) -> None:
        self._announced[block_hash] = block
        self._children[block.parent_hash].add(block_hash)

    def _remember(self, block_hash: bytes, block: _Block) -> None:
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
                self._under_way.append(self._changed.popleft())
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
            self._changed.append((block_hash, 0))
        if depth is not None:
            self._depths[block_hash] = depth
        walked = self._count_unbroken(block_hash, depth[0] if depth is not None else 0)
        span = None
        if depth is not None and depth[0] % self._ratio == 0:
            span = self._span(block_hash)
            walked += self._ratio
        was_published = block_hash in self._published
        if span is not None and not was_published:
            self._published.add(block_hash)
            stored.append(Change(True, self._label, block_hash, *span))
        elif span is None and was_published:
            self._published.discard(block_hash)
            withdrawn.append(Change(False, self._label, block_hash, b""))
        if (span is not None) != was_published or depth != before:
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
