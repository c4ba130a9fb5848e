"""KV events for the engine's own publisher: blocks that this engine has put into the pool.

A router learns from them which tokens a block stands for, which the server cannot know. The engine does not see what
the pool evicts, so it takes back what it finds missing: in a lookup, after a failed load, and all of it once the pool
has restarted. What a router should trust for what the pool holds are the server's own events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvpool.types import BlockRun
from vllm_plugin.groups import Group
from vllm_plugin.metadata import LoadJob

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ANNOUNCED = 1 << 20
LOCALITY = "REMOTE"
"""Relative to the engine: the blocks are in another process, maybe on another host."""


class Events:
    """One engine's.

    Args:
        groups: of the pool; an event names the engine's own group.
        enabled: whether anybody listens; if not, nothing is collected.
    """

    def __init__(self, groups: Sequence[Group], enabled: bool):
        self._groups = groups
        self._enabled = enabled
        self._pending: dict[int, list[BlockStored]] = {}
        self._events: list[KVCacheEvent] = []
        # Blocks that were announced and not taken back, the oldest first: (group, hash).
        self._announced: dict[tuple[int, bytes], None] = {}
        self._jobs: dict[int, list[tuple[int, bytes]]] = {}

    def storing(self, job_id: int, request: Request, runs: Iterable[tuple[BlockRun, int]]) -> None:
        """A job is under way.

        Args:
            runs: each with the index of its first block.
        """
        if not self._enabled:
            return
        self._pending[job_id] = [event for run, first in runs for event in self._stored(request, run, first)]
        self._jobs[job_id] = [(run.group_idx, name) for run, _ in runs for name in run.block_hashes]

    def ended(self, job_id: int, stored: bool) -> None:
        """Every rank has reported a job."""
        events, blocks = self._pending.pop(job_id, []), self._jobs.pop(job_id, [])
        if not stored:
            return
        self._events += events
        self._announced |= dict.fromkeys(blocks)
        while len(self._announced) > MAX_ANNOUNCED:
            oldest = next(iter(self._announced))
            self.missing(*oldest)

    def missing(self, group_idx: int, block_hash: bytes) -> None:
        """A block is not in the pool; if it was announced, that is taken back."""
        if self._announced.pop((group_idx, block_hash), False) is None:
            name = maybe_convert_block_hash(BlockHash(block_hash))
            for member in self._groups[group_idx].members:
                self._events.append(BlockRemoved([name], MEDIUM_CPU, member, LOCALITY))

    def all_missing_of(self, job: LoadJob) -> None:
        """Blocks that could not be loaded."""
        for part in job.groups:
            for run in part.runs:
                for name in run.block_hashes:
                    self.missing(part.group_idx, name)

    def looked_up(self, run: BlockRun, complete: int) -> None:
        """A lookup has found some blocks of a run (a bitmap), and not the others."""
        if not self._announced:
            return
        found = reversed(f"{complete:0{len(run)}b}" if len(run) else "")
        for bit, name in zip(found, run.block_hashes, strict=True):
            if bit == "0":
                self.missing(run.group_idx, name)

    def all_missing(self) -> None:
        """Nothing that was announced is reachable any more, nor will be what is under way."""
        self._pending.clear()
        self._jobs.clear()
        for group_idx, block_hash in list(self._announced):
            self.missing(group_idx, block_hash)

    def take(self) -> list[KVCacheEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def _stored(self, request: Request, run: BlockRun, first: int) -> list[BlockStored]:
        group = self._groups[run.group_idx]
        size = group.rule.block_tokens
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
                extra_keys=to_event_extra_keys(extra_keys),
                group_idx=member,
                kv_cache_spec_kind=group.kind,
                kv_cache_spec_sliding_window=group.window_tokens or None,
                locality=LOCALITY,
            )
            for member in group.members
        ]
