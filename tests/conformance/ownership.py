"""Who may read or write which KV block, and when.

A connector may write a block from the allocation of a load until it has reported that load on that rank, and the null
block never. It may read a block while a request holds it, or a reference of its own, or the word it gave with
`request_finished`; a block that was given away is filled with a mark before its next owner gets it, so a late read
stores the mark, and whoever loads it finds out.

Memory is compared around every hook call and every forward pass. A mark says which block it was put in, and how often
that block had been given away by then: a mark of the very block that is read means that a load wrote nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.conformance.recorder import SCHEDULER, WORKER, Call, Recording, Watch
from tests.support.toy.cache import Wrong
from tests.support.toy.engine import Rank

NULL_BLOCK = 0
_MAX_BLOCKS = 4096


@dataclass(slots=True)
class Window:
    """Blocks of a load, open on the ranks that have not reported it."""

    request_id: str
    is_async: bool
    blocks: frozenset[int]
    ranks: set[int]


class Ownership(Watch):
    """One engine.

    Args:
        group_block_tokens: tokens of a block, one a KV-cache group.
    """

    def __init__(self, recording: Recording, group_block_tokens: Sequence[int]):
        self._recording = recording
        self._group_block_tokens = group_block_tokens
        self._pool: Any = None
        self._ranks: list[Rank] = []
        self._shadows: list[torch.Tensor] = []
        self._windows: list[Window] = []
        # Request -> tokens of the local hit, and whether the load that was offered beyond it is asynchronous.
        self._matched: dict[str, tuple[int, bool]] = {}
        self._given: dict[int, int] = {}
        self._new_blocks: list[int] = []
        self.pins: dict[int, int] = {}

    def attach(self, pool: Any, ranks: Sequence[Rank]) -> None:
        """Starts to watch the engine's memory; called once the engine is complete."""
        self._pool, self._ranks = pool, list(ranks)
        self._shadows = [rank.cache.memory.clone() for rank in ranks]
        allocate = pool.get_new_blocks

        def allocate_marked(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            for block in blocks:
                self._given[block.block_id] = self._given.get(block.block_id, 0) + 1
                self._new_blocks.append(block.block_id)
            return blocks

        pool.get_new_blocks = allocate_marked

    # Around the hooks

    def references(self) -> list[int]:
        return [block.ref_cnt for block in self._pool.blocks] if self._pool is not None else []

    def after(self, call: Call) -> None:
        self._compare(call.hook)
        for block, delta in call.pinned.items():
            self.pins[block] = self.pins.get(block, 0) + delta
            if self.pins[block] < 0 and delta < 0:
                self._recording.note("foreign-reference", block=block, hook=call.hook)
            elif not self.pins[block]:
                del self.pins[block]
        if call.error is not None:
            return
        if call.side == SCHEDULER:
            if call.hook == "get_num_new_matched_tokens":
                self._matched[call.request_id] = (call.facts["num_computed_tokens"], bool(call.answer[1]))
            elif call.hook == "update_state_after_alloc" and call.facts["num_external_tokens"]:
                self._open(call)
        elif call.side == WORKER and call.hook == "get_transfer_results":
            self._close(call.rank, call.answer["finished_recving"])

    # Around the forward pass

    def mark_new_blocks(self, rank: int) -> None:
        """Overwrites blocks allocated since the last step; called after the connector has handled preemptions."""
        self._compare("between the hooks")
        for block in self._new_blocks:
            self._ranks[rank].cache.memory[:, block] = self._mark(block)
        self._shadows[rank].copy_(self._ranks[rank].cache.memory)
        if rank == len(self._ranks) - 1:
            self._new_blocks = []

    def forward_begins(self, rank: int) -> None:
        """Synchronous loads have ended."""
        self._compare("between the hooks")
        for window in self._windows:
            if not window.is_async:
                window.ranks.discard(rank)

    def forward_ended(self, rank: int) -> None:
        self._shadows[rank].copy_(self._ranks[rank].cache.memory)

    def explain(self, wrong: Wrong) -> str:
        """Why attention read what it should not: "unwritten", "reused" or "wrong"."""
        why = "wrong"
        for read, wanted, block in zip(wrong.read, wrong.wanted, wrong.blocks, strict=True):
            for value in read[read != wanted].unique().tolist():
                if value == self._mark(block):
                    why = "unwritten"
                elif value < -1 and 0 < (-value - 2) // _MAX_BLOCKS <= self._given.get((-value - 2) % _MAX_BLOCKS, 0):
                    return "reused"
        return why

    def _mark(self, block: int) -> int:
        return -(2 + block + _MAX_BLOCKS * self._given[block]) if block in self._given else -1

    def _open(self, call: Call) -> None:
        local, is_async = self._matched[call.request_id]
        stop = local + call.facts["num_external_tokens"]
        blocks: set[int] = set()
        for block_tokens, table in zip(self._group_block_tokens, call.facts["blocks"], strict=True):
            blocks.update(table[local // block_tokens : -(-stop // block_tokens)])
        blocks.discard(NULL_BLOCK)
        self._windows.append(Window(call.request_id, is_async, frozenset(blocks), set(range(len(self._ranks)))))
        self._recording.note("load", request_id=call.request_id, is_async=is_async, blocks=frozenset(blocks))

    def _close(self, rank: int, request_ids: Iterable[str]) -> None:
        for window in self._windows:
            if window.request_id in request_ids:
                window.ranks.discard(rank)
        self._windows = [window for window in self._windows if window.ranks]

    def _compare(self, when: str) -> None:
        for idx, (rank, shadow) in enumerate(zip(self._ranks, self._shadows, strict=True)):
            if np.array_equal(rank.cache.memory.numpy(), shadow.numpy()):  # torch.equal would wake all its threads.
                continue
            changed = (rank.cache.memory != shadow).flatten(2).any(2).any(0).nonzero().flatten().tolist()
            allowed = {block for window in self._windows if idx in window.ranks for block in window.blocks}
            for block in changed:
                if block not in allowed:
                    self._recording.note("foreign-write", rank=idx, block=block, hook=when)
            shadow.copy_(rank.cache.memory)
