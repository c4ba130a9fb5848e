"""Who may read or write which KV block, and when.

A connector may write a block from the allocation of a load until it has reported that load on that rank, and the null
block never. It may read a block while a request holds it, or a reference of its own, or the word it gave with
`request_finished`; a block that was given away is filled with a mark before its next owner gets it, so a late read
stores the mark, and whoever loads it finds out.

Memory is compared around every hook call and every forward pass. A mark says which block it was put in, and how often
that block had been given away by then: a mark of the very block that is read means that a load wrote nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.conformance.contract import Contract
from tests.support.toy.cache import Wrong
from tests.support.toy.engine import Rank

NULL_BLOCK = 0
_MAX_BLOCKS = 4096


class Ownership:
    """The KV blocks of one engine, which are watched from `attach` on.

    Attributes:
        pins: block -> references that the connector has taken.
    """

    def __init__(self, contract: Contract):
        self.contract = contract
        self.pins: dict[int, int] = {}
        self._pool: Any = None
        self._ranks: list[Rank] = []
        self._shadows: list[torch.Tensor] = []
        self._given: Counter[int] = Counter()
        self._new_blocks: list[int] = []

    def attach(self, pool: Any, ranks: Sequence[Rank]) -> None:
        """Starts to watch the engine's memory; called once the engine is complete."""
        self._pool, self._ranks = pool, list(ranks)
        self._shadows = [rank.cache.memory.clone() for rank in ranks]
        allocate = pool.get_new_blocks

        def allocate_marked(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            self._new_blocks += [block.block_id for block in blocks]
            self._given.update(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = allocate_marked

    # Around the hooks

    def references(self) -> list[int]:
        """The reference count of each block."""
        return [block.ref_cnt for block in self._pool.blocks] if self._pool is not None else []

    def hook_ended(self, hook: str, references: Sequence[int]) -> dict[int, int]:
        """Judges what a hook did to blocks; returns block -> references that it took (negative: gave back)."""
        self._compare(hook)
        pairs = enumerate(zip(references, self.references(), strict=True))
        pinned = {block: now - then for block, (then, now) in pairs if now != then}
        if NULL_BLOCK in pinned:
            self.contract.broke("the-null-block-is-left-alone", f"{hook}: references {pinned[NULL_BLOCK]:+}")
        for block, delta in pinned.items():
            self.pins[block] = self.pins.get(block, 0) + delta
            if self.pins[block] < 0 and delta < 0:
                self.contract.broke("references-are-ones-own", f"{hook} gave back a reference on block {block}")
            elif not self.pins[block]:
                del self.pins[block]
        return pinned

    # Around the forward pass

    def mark_new_blocks(self, rank: int) -> None:
        """Overwrites blocks allocated since the last step; called after the connector has handled preemptions."""
        if not self._ranks:
            return
        self._compare("between the hooks")
        for block in self._new_blocks:
            self._ranks[rank].cache.memory[:, block] = self._mark(block)
        self._shadows[rank].copy_(self._ranks[rank].cache.memory)
        if rank == len(self._ranks) - 1:
            self._new_blocks = []

    def forward_begins(self, rank: int) -> None:
        self._compare("between the hooks")
        self.contract.synchronous_loads_ended(rank)

    def forward_ended(self, rank: int) -> None:
        self._shadows[rank].copy_(self._ranks[rank].cache.memory)

    def read_wrong(self, request_id: str, wrong: Wrong) -> None:
        """Attention read what it should not: finds the rule that this breaks."""
        rule = "loads-bring-the-right-bytes"
        for read, wanted, block in zip(wrong.read, wrong.wanted, wrong.blocks, strict=True):
            for value in read[read != wanted].unique().tolist():
                given, marked = divmod(-value - 2, _MAX_BLOCKS)
                if value == self._mark(block):
                    rule = "loads-are-whole-when-reported"
                elif value < -1 and 0 < given <= self._given[marked]:
                    self.contract.broke("stores-read-no-reused-block", f"{request_id}: {wrong}")
                    return
        self.contract.broke(rule, f"{request_id}: {wrong}")

    def _mark(self, block: int) -> int:
        return -(2 + block + _MAX_BLOCKS * self._given[block]) if block in self._given else -1

    def _compare(self, when: str) -> None:
        for idx, (rank, shadow) in enumerate(zip(self._ranks, self._shadows, strict=True)):
            if np.array_equal(rank.cache.memory.numpy(), shadow.numpy()):  # torch.equal would wake all its threads.
                continue
            changed = (rank.cache.memory != shadow).flatten(2).any(2).any(0).nonzero().flatten().tolist()
            allowed = {block for load in self.contract.loads if idx in load.ranks for block in load.blocks}
            for block in changed:
                if block not in allowed:
                    self.contract.broke("only-loads-write", f"block {block} of rank {idx} changed, seen at {when}")
                if block == NULL_BLOCK:
                    self.contract.broke("the-null-block-is-left-alone", f"rank {idx} wrote it, seen at {when}")
            shadow.copy_(rank.cache.memory)
