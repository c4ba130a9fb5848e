"""Batches in vLLM's wire format, and those published that are kept for replay.

Source: vLLM 0.32, distributed/kv_events.py: the batch is an array; each event is a map with its type's name under
"type", without fields that have their default value. `group_idx` 0 is always there: its default is None.

Not thread-safe: the publisher's thread owns the history.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvpool_server.events.ledger import Change, ChangeBatch, Ledger

MAX_BYTES = 64 << 20
"""Of the messages that one stream keeps for replay."""
BlockHash = int | bytes
LOCALITY = "LOCAL"
"""Relative to the publisher, which is this server."""
_COUNTING = threading.Lock()
"""Held to count: the threads of several streams share the counters."""


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


class Message(NamedTuple):
    """One batch on the wire."""

    topic: bytes
    seq: int
    payload: bytes

    @property
    def frames(self) -> tuple[bytes, bytes, bytes]:
        return self.topic, self.seq.to_bytes(8, "big"), self.payload


class Encoder:
    """Encodes batches.

    Args:
        medium: where the blocks lie, as subscribers are told.
        full_hashes: name blocks by all bytes of their hash; else by its low 64 bits, as vLLM does by default.
    """

    def __init__(self, topic: str = "kv", medium: str = "CPU", full_hashes: bool = False):
        self._topic = topic
        self._medium = medium
        self._full_hashes = full_hashes
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, batch: ChangeBatch) -> tuple[Message, int]:
        """The message, and the number of events in it."""
        events = [*([AllBlocksCleared()] if batch.cleared else []), *self._events(batch.changes)]
        namespace = batch.changes[0].group.namespace if batch.changes else "@"
        topic = f"{self._topic}@{namespace}".encode()
        return Message(topic, batch.seq, self._encoder.encode(EventBatch(batch.ts, events, 0))), len(events)

    def _events(self, changes: list[Change]) -> list[BlockStored | BlockRemoved]:
        events: list[BlockStored | BlockRemoved] = []
        before = None
        for change in changes:
            name = self._name(change.block_hash)
            if before is not None and _continues(before, change):
                events[-1].block_hashes.append(name)
            elif change.stored:
                events.append(self._stored(change, name))
            else:
                events.append(BlockRemoved([name], self._medium, change.group.idx, LOCALITY))
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

    def _name(self, block_hash: bytes) -> BlockHash:
        return block_hash if self._full_hashes else int.from_bytes(block_hash[-8:], "big")


def _continues(before: Change, change: Change) -> bool:
    """Whether both changes fit into one event."""
    if before.stored != change.stored or before.group is not change.group:
        return False
    return not change.stored or change.parent_hash == before.block_hash


class History:
    """The last `max_batches` messages of a stream, fewer if they exceed `MAX_BYTES`; and the answers to replays."""

    def __init__(self, ledger: Ledger, encode: Encoder, counters: dict[str, int], max_batches: int):
        self._ledger = ledger
        self._encode = encode
        self._counters = counters
        self._max_batches = max_batches
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0

    def publish(self) -> Iterator[Message]:
        """Encodes, keeps and yields the batches that have not been published yet."""
        for batch in self._ledger.pop_batches():
            message, num_events = self._encode(batch)
            self._count(kv_event_batches=1, kv_events=num_events)
            self._keep(message)
            yield message

    def answer(self, start_seq: int) -> Iterator[Message | None]:
        """All messages from `start_seq` on if they are kept without a gap, else a snapshot; None: not ready yet.

        A number from the future is another server's: its subscriber needs a snapshot, too.
        """
        self._count(kv_event_replays=1)
        if self.needs_snapshot(start_seq):
            self._count(kv_event_snapshots=1)
            return (None if batch is None else self._encode(batch)[0] for batch in self._ledger.snapshot())
        # None is kept if the stream will bring everything newer than the last published message.
        return iter([message for message in self._kept if message.seq >= start_seq])

    def needs_snapshot(self, start_seq: int) -> bool:
        """Whether the messages from `start_seq` on are not kept, so that the answer is a snapshot."""
        if not self._kept:
            return True
        return not self._kept[0].seq <= start_seq <= max(self._kept[-1].seq, self._ledger.last_seq()) + 1

    def _count(self, **counts: int) -> None:
        with _COUNTING:
            for name, count in counts.items():
                self._counters[name] += count

    def _keep(self, message: Message) -> None:
        if self._kept and self._kept[-1].seq + 1 != message.seq:
            self._kept.clear()  # Batches were dropped: messages before the gap cannot be replayed up to now.
            self._kept_bytes = 0
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        while len(self._kept) > self._max_batches or (self._kept_bytes > MAX_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft().payload)
