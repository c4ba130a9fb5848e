"""The pipeline of transports that need a peer: batches of a transfer travel over channels, several in flight at once.

A transport (`tcp`, `mooncake`) hands each transfer to its `TransferPipeline`. The pipeline cuts the transfer into
batches, acquires channels to the peer, calls the caller's `fill` or `drain` in the order of the batches, and keeps the
deadlines. A `TransferChannel` moves the bytes of a batch between a buffer and the arena.

There are two pipelines: `DirectPipeline`, where the caller's thread moves the bytes, and `ThreadedPipeline`, where each
channel has a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.transport.base import Buffers, Drain, Fill, Transfer

Bytes = npt.NDArray[np.uint8]

MAX_CHANNELS = 16
"""Of one pipeline: a peer that does not answer costs at most the buffers of so many channels."""


class TransferPipeline(Protocol):
    """Moves transfers over the channels to one peer. Thread-safe."""

    def write(self, transfer: Transfer, fill: Fill) -> None:
        """Fills and sends one batch after the other; returns when the peer has all of them."""

    def read(self, transfer: Transfer, drain: Drain) -> None:
        """Requests batches ahead, and drains each one after it has arrived."""

    def close(self) -> None:
        """Ends transfers in flight, which then raise, and closes the channels. Idempotent."""


@dataclass(eq=False, slots=True)
class TransferBatch:
    """Regions [first, stop) of a transfer, in flight on one channel.

    Args:
        deadline: by `time.monotonic`.
        source: of a write, one array a region to send from; None: the channel's buffer has the bytes.

    Attributes:
        progressed_at: when bytes of this batch were last seen to move, by `time.monotonic`.
        given_up: True once its caller no longer waits for it.
    """

    transfer: Transfer
    first: int
    stop: int
    deadline: float
    is_write: bool
    source: Buffers | None = None
    progressed_at: float = field(default_factory=time.monotonic)
    given_up: bool = False

    @property
    def offsets(self) -> Sequence[int]:
        return self.transfer.starts[self.first : self.stop]

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
