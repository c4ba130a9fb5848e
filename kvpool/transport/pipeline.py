"""Batches in flight of a transport whose transfers nothing can stop (`mooncake`), and what moves them.

`ThreadedPipeline` cuts a transfer into batches, acquires channels to the peer, calls the caller's `fill` or `drain` in
the order of the batches, and keeps the deadlines. A `TransferChannel` moves the bytes of a batch between a buffer and
the arena.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.transport.base import Bytes, Sum, Transfer

MAX_CHANNELS = 16
"""Of one pipeline: a peer that does not answer costs at most the buffers of so many channels."""


@dataclass(eq=False, slots=True)
class TransferBatch:
    """Regions [first, stop) of a transfer, in flight on one channel.

    Args:
        deadline: by `time.monotonic`.
        sum: computes the checksums of its regions, where they lie in the channel's buffer.

    Attributes:
        progressed_at: when bytes of this batch were last seen to move, by `time.monotonic`.
        given_up: True once its caller no longer waits for it.
    """

    transfer: Transfer
    first: int
    stop: int
    deadline: float
    is_write: bool
    sum: Sum
    progressed_at: float = field(default_factory=time.monotonic)
    given_up: bool = False

    @property
    def offsets(self) -> Sequence[int]:
        return self.transfer.starts(self.first, self.stop)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.first) * self.transfer.region_bytes

    def progressed(self) -> None:
        self.progressed_at = time.monotonic()


class TransferChannel(Protocol):
    """Moves batches between a buffer and the arena.

    Threads: `give_up` and `close` may be called from any thread; the other methods from one thread at a time.
    """

    def grow(self, old: Bytes, nbytes: int) -> Bytes:
        """Returns a buffer of at least `nbytes` for this channel; `old` is no longer used. Raises TransferError."""

    def begin(self, batch: TransferBatch, buffer: Bytes) -> None:
        """Sends a write's bytes, or a read's request, as far as possible without the peer's answer.

        Raises as `finish` does.
        """

    def finish(self, batch: TransferBatch, buffer: Bytes) -> None:
        """Waits until the batch has ended: a read's bytes are in `buffer`, a write's bytes are in the arena.

        Raises:
            KVPoolError: the batch failed, and nothing accesses `buffer` any more.
            Exception: the batch failed, and something may still access `buffer`: the channel must not be reused.
        """

    def give_up(self, batch: TransferBatch) -> None:
        """Ends a batch sooner, if the channel can."""

    def close(self) -> None:
        """Closes the channel; no batch follows."""


def in_rows(buffer: Bytes, region_bytes: int) -> list[Bytes]:
    """A buffer of whole regions as one view a region: uint8 [region_bytes] each."""
    return list(buffer.reshape(-1, region_bytes))
