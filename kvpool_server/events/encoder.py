"""Batches in vLLM's wire format.

Source: vLLM 0.32, distributed/kv_events.py: the batch is an array; each event is a map with its type's name under
"type", without fields that have their default value. `group_idx` 0 is always there: its default is None.
"""

from __future__ import annotations

import msgspec

from kvpool_server.events.ledger import Change, ChangeBatch

BlockHash = int | bytes
LOCALITY = "LOCAL"
"""Relative to the publisher, which is this server."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks are readable: the first follows `parent_block_hash`, each other the block before it."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks are gone."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """This server holds no block of any namespace."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Encoder:
    """Encodes batches.

    Args:
        topic: begins every topic.
        medium: where the blocks lie, as subscribers are told.
        full_hashes: name blocks by all bytes of their hash; else by its low 64 bits, as vLLM does by default.
    """

    def __init__(self, topic: str = "kv", medium: str = "CPU", full_hashes: bool = False):
        self._topic = topic
        self._medium = medium
        self._full_hashes = full_hashes
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, batch: ChangeBatch) -> tuple[bytes, bytes, int]:
        """Topic, payload, and the number of events in it."""
        events = [*([AllBlocksCleared()] if batch.cleared else []), *self._events(batch.changes)]
        namespace = batch.changes[0].group.namespace if batch.changes else "@"
        topic = f"{self._topic}@{namespace}".encode()
        return topic, self._encoder.encode(EventBatch(batch.ts, events, 0)), len(events)

    def _events(self, changes: list[Change]) -> list[BlockStored | BlockRemoved]:
        events: list[BlockStored | BlockRemoved] = []
        before = None
        for change in changes:
            name = self._name(change.block_hash)
            if before is not None and _continues(before, change):
                events[-1].block_hashes.append(name)
            else:
                events.append(self._stored(change, name) if change.stored else self._removed(change, name))
            before = change
        return events

    def _stored(self, change: Change, name: BlockHash) -> BlockStored:
        spec = change.group.spec
        return BlockStored(
            block_hashes=[name],
            parent_block_hash=self._name(change.parent_hash) if change.parent_hash else None,
            token_ids=[],
            block_size=spec.block_tokens,
            lora_id=None,
            medium=self._medium,
            lora_name=None,
            group_idx=change.group.idx,
            kv_cache_spec_kind=spec.kind,
            kv_cache_spec_sliding_window=spec.window_tokens or None,
            locality=LOCALITY,
        )

    def _removed(self, change: Change, name: BlockHash) -> BlockRemoved:
        return BlockRemoved([name], self._medium, change.group.idx, LOCALITY)

    def _name(self, block_hash: bytes) -> BlockHash:
        return block_hash if self._full_hashes else int.from_bytes(block_hash[-8:], "big")


def _continues(before: Change, change: Change) -> bool:
    """Whether both changes fit into one event."""
    if before.stored != change.stored or before.group is not change.group:
        return False
    return not change.stored or change.parent_hash == before.block_hash
