"""Published messages that are kept for replay, and the answers to replay requests.

Not thread-safe: the publisher's thread owns the history.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvpool_server.events.encoder import Encoder
from kvpool_server.events.ledger import ChangeBatch, Ledger

MAX_BYTES = 64 << 20


class Message(NamedTuple):
    """One batch on the wire."""

    topic: bytes
    seq: int
    payload: bytes

    @property
    def frames(self) -> tuple[bytes, bytes, bytes]:
        return self.topic, self.seq.to_bytes(8, "big"), self.payload


class History:
    """See the module. Keeps `max_batches` messages, fewer if they exceed `MAX_BYTES`.

    Args:
        counting: held to count; histories of several threads share the counters.
    """

    def __init__(
        self,
        ledger: Ledger,
        encode: Encoder,
        counters: dict[str, int],
        max_batches: int,
        counting: threading.Lock | None = None,
    ):
        self._ledger = ledger
        self._encode = encode
        self._counters = counters
        self._max_batches = max_batches
        self._counting = counting or threading.Lock()
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0

    def publish(self) -> Iterator[Message]:
        """Encodes, keeps and yields the batches that have not been published yet."""
        for batch in self._ledger.pop_batches():
            topic, payload, num_events = self._encode(batch)
            message = Message(topic, batch.seq, payload)
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
            return self._encoded(self._ledger.snapshot())
        # None is kept if the stream will bring everything newer than the last published message.
        return iter([message for message in self._kept if message.seq >= start_seq])

    def needs_snapshot(self, start_seq: int) -> bool:
        """Whether the messages from `start_seq` on are not kept, so that the answer is a snapshot."""
        if not self._kept:
            return True
        return not self._kept[0].seq <= start_seq <= max(self._kept[-1].seq, self._ledger.last_seq()) + 1

    def _encoded(self, batches: Iterator[ChangeBatch | None]) -> Iterator[Message | None]:
        for batch in batches:
            if batch is None:
                yield None
                continue
            topic, payload, _ = self._encode(batch)
            yield Message(topic, batch.seq, payload)

    def _count(self, **counts: int) -> None:
        with self._counting:
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
