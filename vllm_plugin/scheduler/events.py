"""KV events for the engine's own publisher: blocks that this engine has put into the pool.

A router learns from these events which tokens a block stands for, which the server cannot know. The engine does not see
which blocks the pool evicts, so a block that it finds missing, in a lookup or after a failed load, is announced as
removed, and all blocks once the pool has restarted. The contents of the pool are told by the server's own events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)

from kvpool.types import BlockRun
from vllm_plugin.metadata import StoreJob
from vllm_plugin.model.adapters import named
from vllm_plugin.model.groups import PoolGroup
from vllm_plugin.releases import event_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ANNOUNCED = 1 << 20
LOCALITY = "REMOTE"
"""Relative to the engine: the blocks are in another process, maybe on another host."""


class Events:
    """One engine's.

    Args:
        groups: of the pool; an event names the engine's own group.
        enabled: whether vLLM publishes KV events; if not, nothing is collected.
    """

    def __init__(self, groups: Sequence[PoolGroup], enabled: bool):
        self._groups = groups
        self._enabled = enabled
        self._events: list[KVCacheEvent] = []
        # Blocks announced as stored and not as removed, the oldest first: (group, name in the pool) -> vLLM's hash.
        self._announced: dict[tuple[int, bytes], bytes] = {}

    def stored(self, request: Request, job: StoreJob) -> None:
        """Every rank has stored a job of a request."""
        if not self._enabled:
            return
        for part in job.groups:
            for run, first in zip(part.runs, part.firsts, strict=True):
                parent = named([run.parent_hash], job.adapter)[0] if run.parent_hash else b""
                own = BlockRun(run.group_idx, named(run.block_hashes, job.adapter), parent)
                self._events += self._stored(request, own, first)
                names = ((run.group_idx, name) for name in run.block_hashes)
                self._announced.update(zip(names, own.block_hashes, strict=True))
        while len(self._announced) > MAX_ANNOUNCED:
            group_idx, oldest = next(iter(self._announced))
            self.missing(group_idx, [oldest])

    def missing(self, group_idx: int, block_hashes: Iterable[bytes]) -> None:
        """Blocks are not in the pool; those that were announced as stored are announced as removed."""
        if not self._announced:
            return
        for block_hash in block_hashes:
            own = self._announced.pop((group_idx, block_hash), None)
            if own is not None:
                name = maybe_convert_block_hash(BlockHash(own))
                for member in self._groups[group_idx].members:
                    self._events.append(BlockRemoved([name], MEDIUM_CPU, member, LOCALITY))

    def all_missing(self) -> None:
        """No announced block is in the pool any more."""
        for group_idx, block_hash in list(self._announced):
            self.missing(group_idx, [block_hash])

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

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
