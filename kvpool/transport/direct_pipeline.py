"""A pipeline without threads: the caller's thread moves the bytes, over one channel a call.

With few cores, waking a thread for each batch costs more than the thread saves. Batches are still in flight while the
caller fills or drains another one: in the kernel, and in the peer. All batches of a channel share one buffer, which
stays in the core's cache: `begin` has sent a batch's bytes before the buffer is filled again, and `finish` receives a
batch's bytes only when it is that batch's turn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvpool.errors import KVPoolError, PoolTimeoutError, TransferError
from kvpool.transport.base import Drain, Fill, Transfer
from kvpool.transport.pipeline import MAX_CHANNELS, Bytes, TransferBatch, TransferChannel, in_rows

AHEAD = 8
"""Most batches of one call in flight."""


class DirectPipeline:
    """Channels to one peer, each used by one caller at a time.

    Args:
        make: makes a channel that enforces the deadlines of its batches, and ends batches in the order they began.
        peer: the peer's name in errors.
    """

    def __init__(self, make: Callable[[threading.Event], TransferChannel], peer: str):
        self._make = make
        self._peer = peer
        self._changed = threading.Condition()
        self._all: set[_Channel] = set()
        self._idle: list[_Channel] = []
        self._closed = threading.Event()

    def write(self, transfer: Transfer, fill: Fill) -> None:
        deadline = time.monotonic() + transfer.timeout_s
        region_bytes = transfer.region_bytes
        with self._acquired(transfer.timeout_s) as channel:
            for start, stop in transfer.batches():
                buffer = channel.buffer((stop - start) * region_bytes)
                try:
                    source = fill(start, in_rows(buffer, region_bytes))
                except Exception as error:
                    channel.finish_before(error)
                    raise
                channel.begin(TransferBatch(transfer, start, stop, deadline, is_write=True, source=source), buffer)
                if len(channel.in_flight) == AHEAD:
                    channel.finish_first(buffer)
            channel.finish_all()

    def read(self, transfer: Transfer, drain: Drain) -> None:
        deadline = time.monotonic() + transfer.timeout_s
        region_bytes = transfer.region_bytes
        batches = transfer.batches()
        with self._acquired(transfer.timeout_s) as channel:
            requested = 0
            for start, stop in batches:
                while requested < len(batches) and len(channel.in_flight) < AHEAD:
                    batch = TransferBatch(transfer, *batches[requested], deadline, is_write=False)
                    channel.begin(batch, channel.buffer(0))
                    requested += 1
                buffer = channel.buffer((stop - start) * region_bytes)
                channel.finish_first(buffer)
                wait = drain(start, in_rows(buffer, region_bytes))
                if wait is not None:
                    wait()

    @contextmanager
    def _acquired(self, timeout_s: float) -> Iterator[_Channel]:
        """A channel of the caller's own; it is closed if batches are left in flight."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed.is_set() or self._idle or len(self._all) < MAX_CHANNELS, max(timeout_s, 0)
            )
            if self._closed.is_set():
                raise TransferError(f"the transport to {self._peer} is closed; open the namespace again")
            if not self._idle and len(self._all) == MAX_CHANNELS:
                raise PoolTimeoutError(
                    f"all {MAX_CHANNELS} transfer channels to {self._peer} stayed busy for {timeout_s:.3f} s"
                )
            channel = self._idle.pop() if self._idle else _Channel(self._make(self._closed))
            self._all.add(channel)
        try:
            yield channel
        finally:
            with self._changed:
                if channel.in_flight or self._closed.is_set():
                    channel.inner.close()  # Nobody waits for what is in flight.
                    channel.in_flight.clear()
                if not self._closed.is_set():
                    self._idle.append(channel)
                    self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            for channel in self._all:
                if channel in self._idle:
                    channel.inner.close()
                else:  # The call that uses it fails, and closes it.
                    for batch in list(channel.in_flight):
                        channel.inner.give_up(batch)
            self._all, self._idle = set(), []
            self._changed.notify_all()


class _Channel:
    """A channel with its buffer and its batches.

    Attributes:
        inner: moves the bytes.
        in_flight: batches that have begun and have not ended, in order.
    """

    def __init__(self, inner: TransferChannel):
        self.inner = inner
        self.in_flight: deque[TransferBatch] = deque()
        self._buffer: Bytes = np.empty(0, np.uint8)

    def buffer(self, nbytes: int) -> Bytes:
        """The first `nbytes` of the buffer, which grows if needed."""
        if nbytes > len(self._buffer):
            self._buffer = self.inner.grow(self._buffer, nbytes)
        return self._buffer[:nbytes]

    def begin(self, batch: TransferBatch, buffer: Bytes) -> None:
        self.in_flight.append(batch)
        self.inner.begin(batch, buffer)

    def finish_first(self, buffer: Bytes) -> None:
        self.inner.finish(self.in_flight[0], buffer)
        self.in_flight.popleft()

    def finish_all(self) -> None:
        while self.in_flight:
            self.finish_first(self.buffer(0))

    def finish_before(self, error: Exception) -> None:
        """Waits until nothing is in flight, so that a callback's `error` may reach the caller."""
        try:
            self.finish_all()
        except KVPoolError as failure:
            raise failure from error
