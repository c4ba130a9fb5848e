"""Channels with a thread and a buffer each; a channel carries one batch at a time.

A transfer that its caller gives up may go on, because nothing can stop a one-sided transfer. So a channel belongs to
its batch until the batch has ended; only then may another caller use the buffer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from kvpool.errors import KVPoolError, TransferError
from kvpool.transport.base import Bytes
from kvpool.transport.pipeline import MAX_CHANNELS, TransferBatch, TransferChannel, in_rows

LOST_AFTER_S = 5.0
"""A channel counts as lost if its batch was given up so long ago and has not ended."""
CLOSE_S = 1.0
THREAD_NAME = "kvpool-channel"


class ChannelThread:
    """A channel and its thread. Belongs to one caller from `ChannelPool.acquire` to `release`."""

    def __init__(self, pool: ChannelPool, channel: TransferChannel, changed: threading.Condition):
        self._pool = pool
        self._channel = channel
        self._changed = changed
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._inbox: queue.SimpleQueue[TransferBatch | None] = queue.SimpleQueue()
        self._acquired = True
        self._batch: TransferBatch | None = None
        self._released_at = 0.0
        self._failure: KVPoolError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def rows(self, count: int, region_bytes: int) -> list[Bytes]:
        """The first `count` regions of the buffer: uint8 [region_bytes] each."""
        return in_rows(self._buffer[: count * region_bytes], region_bytes)

    def send(self, batch: TransferBatch) -> None:
        """Starts a batch, from or to the start of the buffer; does not wait."""
        self._ended.clear()
        self._failure = None
        with self._changed:
            self._batch = batch
        self._inbox.put(batch)

    def wait(self, timeout_s: float) -> bool:
        """Whether the batch has ended within `timeout_s`. Raises the batch's error."""
        if not self._ended.wait(timeout_s):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    @property
    def stalled_s(self) -> float:
        """Seconds since bytes of the batch in flight were last seen to move."""
        batch = self._batch
        return 0.0 if batch is None else time.monotonic() - batch.progressed_at

    def release(self) -> None:
        """Returns the channel to its pool, once its batch has ended; a batch in flight is given up."""
        with self._changed:
            self._acquired = False
            self._released_at = time.monotonic()
            given_up = self._batch
            self._return_if_free()
        if given_up is not None:
            given_up.given_up = True
            self._channel.give_up(given_up)

    # Called by the pool.

    def acquire(self) -> None:
        self._acquired = True

    def fit(self, nbytes: int) -> None:
        """Makes the buffer hold `nbytes`. Only while no batch is in flight."""
        if nbytes > len(self._buffer):
            old, self._buffer = self._buffer, np.empty(0, np.uint8)
            self._buffer = self._channel.grow(old, nbytes)

    @property
    def is_lost(self) -> bool:
        """Whether its batch was given up more than `LOST_AFTER_S` ago and has not ended."""
        released_s = time.monotonic() - self._released_at
        return self._batch is not None and not self._acquired and released_s > LOST_AFTER_S

    def end(self) -> None:
        """Gives up a batch in flight, and lets the thread end."""
        if (batch := self._batch) is not None:
            batch.given_up = True
            self._channel.give_up(batch)
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(timeout_s, 0))

    # The thread.

    def _serve(self) -> None:
        while (batch := self._inbox.get()) is not None:
            try:
                buffer = self._buffer[: batch.nbytes]
                if batch.is_write:
                    self._sum(batch, buffer)
                self._channel.begin(batch, buffer)
                self._channel.finish(batch, buffer)
                if not batch.is_write:
                    self._sum(batch, buffer)
            except KVPoolError as error:
                self._failure = error
            except Exception as error:  # Something may still access the buffer: the channel is never returned.
                self._failure = TransferError(f"a transfer channel to {self._pool.peer} failed: {error!r}")
                self._ended.set()
                return
            with self._changed:
                self._batch = None
                # Set before the channel is returned: the next caller must not take this end for its own batch's.
                self._ended.set()
                self._return_if_free()
        self._channel.close()

    @staticmethod
    def _sum(batch: TransferBatch, buffer: Bytes) -> None:
        if not batch.given_up:
            batch.sum(batch.first, [[row] for row in in_rows(buffer, batch.transfer.region_bytes)])

    def _return_if_free(self) -> None:
        """Returns the channel to its pool if neither a caller nor a batch has it. The caller holds the lock."""
        if not self._acquired and self._batch is None:
            self._pool.put_back(self)


class ChannelPool:
    """The channels to one peer, at most `MAX_CHANNELS`. Thread-safe.

    Args:
        make: makes a channel; its argument is `closed`.
        peer: the peer's name in errors.

    Attributes:
        closed: set once the channels are to end.
    """

    def __init__(self, make: Callable[[threading.Event], TransferChannel], peer: str):
        self._make: Callable[[threading.Event], TransferChannel] | None = make
        self._changed = threading.Condition()
        self._all: list[ChannelThread] = []
        self._idle: list[ChannelThread] = []
        self.peer = peer
        self.closed = threading.Event()

    def acquire(self, nbytes: int, timeout_s: float) -> ChannelThread | None:
        """A channel with a buffer of at least `nbytes`; None if all stay busy for `timeout_s`.

        Raises:
            TransferError: the pool is closed, or the channel cannot use the memory.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._idle or len(self._all) < MAX_CHANNELS or self._make is None, max(timeout_s, 0)
            )
            if self._make is None:
                raise TransferError(f"the transport to {self.peer} is closed; open the namespace again")
            if self._idle:
                channel = self._idle.pop()
                channel.acquire()
            elif len(self._all) < MAX_CHANNELS:
                channel = ChannelThread(self, self._make(self.closed), self._changed)
                self._all.append(channel)
            else:
                return None
        try:
            channel.fit(nbytes)
        except BaseException:
            channel.release()
            raise
        return channel

    def put_back(self, channel: ChannelThread) -> None:
        """Makes a channel available. The caller holds the lock."""
        self._idle.append(channel)
        self._changed.notify()

    @property
    def num_channels(self) -> int:
        return len(self._all)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_lost(self) -> int:
        """Channels whose batches were given up long ago and have not ended."""
        return sum(channel.is_lost for channel in self._all)

    def close(self) -> None:
        """Ends the threads; each closes its channel. Idempotent."""
        with self._changed:
            self.closed.set()
            self._make = None
            ended, self._all, self._idle = self._all, [], []
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for channel in ended:
            channel.end()
        for channel in ended:
            channel.join(deadline - time.monotonic())
