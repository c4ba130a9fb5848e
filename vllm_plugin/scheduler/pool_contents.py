"""Which blocks an engine takes the pool to hold: those that it has stored, until one is found missing.

`PoolContents` keeps the engine from offering a block twice. `Events` collects KV events for the engine's own publisher.
A router learns from these events which tokens a block stands for, which the server cannot know. The engine does not see
which blocks the pool evicts, nor which a restarted pool still has, so a block that it finds missing, in a lookup or
after a failed load, is announced as removed. All blocks are once the engine has moved to another namespace: some with
each step, as `AllBlocksCleared` would clear vLLM's own blocks, too, which are in the same stream.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, maybe_convert_block_hash

from kvpool.protocol.types import BlockRun
from vllm_plugin.metadata import StoreJob
from vllm_plugin.model.adapters import named
from vllm_plugin.model.groups import PoolGroup
from vllm_plugin.releases import event_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_BLOCKS = 1 << 13
"""Blocks in one generation. There are two, and forgetting drops the older one; neither grows so large that dropping it,
or adding to it, delays a step."""
FORGET_S = 5.0
SAMPLE = 64
"""Of many missing blocks only so many are checked, to tell whether any was stored recently. A lookup of a new prompt
finds thousands of blocks missing, and to check each of them delays a step by a millisecond."""
Shard = dict[bytes, bytes]
"""Announced blocks of a group, the oldest first: name in the pool -> vLLM's hash. The pool has none before a `_MARK`.
All are bytes, so that Python's garbage collector does not visit them."""

NUM_SHARDS, SHARD_BLOCKS = 1 << 11, 1 << 9
"""Most announced blocks. To find the oldest of one large mapping, or to let it grow, delays a step."""
STEP_REMOVALS = 1 << 9
"""Of the blocks of a namespace that the engine has left, those that one step announces as removed."""
_MARK = b""
LOCALITY = "REMOTE"
"""Relative to the engine: the blocks are in another process, maybe on another host."""


class _Generations:
    """Blocks of one group, and when each was seen."""

    def __init__(self) -> None:
        self._newer: dict[bytes, float] = {}
        self._older: dict[bytes, float] = {}

    def add(self, block_hashes: Sequence[bytes], now: float) -> None:
        if len(self._newer) + len(block_hashes) > MAX_BLOCKS:
            self._older, self._newer = self._newer, {}
        self._newer.update(dict.fromkeys(block_hashes, now))

    def any_since(self, block_hashes: Sequence[bytes], since: float) -> bool:
        """Whether any of the blocks was seen after `since`."""
        return any(
            seen_at[block_hash] > since
            for seen_at in (self._newer, self._older)
            for block_hash in seen_at.keys() & block_hashes
        )

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        for seen_at in (self._newer, self._older):
            for block_hash in seen_at.keys() & block_hashes:
                del seen_at[block_hash]


class Events:
    """Events of the blocks that an engine has put into the pool; none unless `enabled`, as vLLM publishes none then."""

    def __init__(self, groups: Sequence[PoolGroup], enabled: bool):
        self._groups = groups
        self._enabled = enabled
        self._events: list[KVCacheEvent] = []
        self._num_shards = NUM_SHARDS // max(1, len(groups))  # Of each group.
        self._shards: list[list[Shard]] = [[{} for _ in range(self._num_shards)] for _ in groups if enabled]
        self._marked: list[tuple[int, Shard]] = []  # Group and shard of those that may have a mark.

    def stored(self, request: Request, job: StoreJob) -> None:
        """Every rank has stored a job of a request."""
        if not self._enabled:
            return
        for part in job.groups:
            for run, first in zip(part.runs, part.firsts, strict=True):
                parent = named([run.parent_hash], job.adapter)[0] if run.parent_hash else b""
                own = BlockRun(run.group_idx, named(run.block_hashes, job.adapter), parent)
                self._events += self._stored(request, own, first)
                for name, own_name in zip(run.block_hashes, own.block_hashes, strict=True):
                    shard = self._shards[run.group_idx][hash(name) % self._num_shards]
                    shard.pop(name, None)
                    shard[name] = own_name
                    if len(shard) > SHARD_BLOCKS:
                        self._remove(run.group_idx, shard, next(iter(shard)))

    def missing(self, group_idx: int, block_hashes: Iterable[bytes]) -> None:
        """Blocks are not in the pool: those that were announced are announced as removed."""
        if self._enabled:
            shards, num_shards = self._shards[group_idx], self._num_shards
            for name in block_hashes:  # Thousands, of which few were announced.
                if name in (shard := shards[hash(name) % num_shards]):
                    self._remove(group_idx, shard, name)

    def all_missing(self) -> None:
        """No announced block is in the pool any more."""
        self._marked = [(group_idx, shard) for group_idx, shards in enumerate(self._shards) for shard in shards]
        for _, shard in self._marked:
            shard.pop(_MARK, None)
            shard[_MARK] = b""

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call, and those of up to `STEP_REMOVALS` blocks before a mark."""
        budget = STEP_REMOVALS
        while self._marked and budget > 0:
            group_idx, shard = self._marked[-1]
            if _MARK in shard:
                self._remove(group_idx, shard, next(iter(shard)))
                budget -= 1
            else:
                self._marked.pop()
        events, self._events = self._events, []
        return events

    def _remove(self, group_idx: int, shard: Shard, name: bytes) -> None:
        """Takes a block, or the mark, out of its shard; a block is announced as removed."""
        if own := shard.pop(name):
            names, members = [maybe_convert_block_hash(BlockHash(own))], self._groups[group_idx].members
            self._events += [BlockRemoved(names, MEDIUM_CPU, member, LOCALITY) for member in members]

    def _stored(self, request: Request, run: BlockRun, first: int) -> list[BlockStored]:
        group = self._groups[run.group_idx]
        size = group.kind.block_tokens
        start, stop = first * size, (first + len(run)) * size
        extra_keys, mm_idx = [], 0
        for at in range(start, stop, size):
            keys, mm_idx = generate_block_hash_extra_keys(request, at, at + size, mm_idx)
            extra_keys.append(keys)
        lora = request.lora_request
        return [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(BlockHash(name)) for name in run.block_hashes],
                parent_block_hash=maybe_convert_block_hash(BlockHash(run.parent_hash)) if run.parent_hash else None,
                token_ids=request.all_token_ids[start:stop],
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                extra_keys=event_extra_keys(extra_keys),
                group_idx=member,
                kv_cache_spec_kind=group.kind.name,
                kv_cache_spec_sliding_window=group.kind.window_tokens or None,
                locality=LOCALITY,
            )
            for member in group.members
        ]


class PoolContents:
    """Blocks stored and found missing, of which `events` is told, too. `clock` tells monotonic seconds.

    A block that this engine has stored recently need not be offered again with every request that shares it. The pool
    may have evicted the block since. So the block is offered again as soon as a lookup or a load has found it missing,
    and in any case after `FORGET_S`.
    """

    def __init__(self, events: Events, clock: Callable[[], float] = time.monotonic):
        self.events = events
        self._clock = clock
        self._groups: defaultdict[int, _Generations] = defaultdict(_Generations)

    def was_stored(self, block_hash: bytes, group_idx: int) -> bool:
        """Whether a block was stored within the last `FORGET_S`, and not found missing since."""
        return self._groups[group_idx].any_since([block_hash], self._clock() - FORGET_S)

    def stored(self, request: Request, job: StoreJob) -> None:
        self.events.stored(request, job)
        now = self._clock()
        for part in job.groups:
            for run in part.runs:
                self._groups[part.group_idx].add(run.block_hashes, now)

    def missing(self, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        self.events.missing(group_idx, block_hashes)
        group = self._groups[group_idx]
        if group.any_since(block_hashes[:: len(block_hashes) // SAMPLE + 1], self._clock() - FORGET_S):
            group.remove(block_hashes)

    def forget_all(self) -> None:
        """The engine has moved to another namespace."""
        self.events.all_missing()
        self._groups.clear()
