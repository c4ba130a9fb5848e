"""A pipeline over channels with threads: several batches of a call are in flight at once, in order, each on a channel.

While batches travel, the caller fills the next one, or drains the first that has arrived.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.errors import KVPoolError, PoolTimeoutError
from kvpool.transport.base import Clock, Sink, Source, Sum, Transfer
from kvpool.transport.channel_threads import ChannelPool, ChannelThread
from kvpool.transport.pipeline import MAX_CHANNELS, TransferBatch, TransferChannel

_CHECK_S = 0.25
"""Longest wait for a batch between two looks at the deadline and at its progress."""


class ThreadedPipeline:
    """Channels with threads to one peer.

    Args:
        make, peer: as of `ChannelPool`.
        depth: most batches of one call in flight.
        stall_timeout_s: a read without progress for so long fails.

    Attributes:
        channels: of all calls.
    """

    def __init__(
        self,
        make: Callable[[threading.Event], TransferChannel],
        peer: str,
        depth: int,
        stall_timeout_s: float,
        clock: Clock = time.monotonic,
    ):
        self.channels = ChannelPool(make, peer)
        self._depth = depth
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock

    def write(self, transfer: Transfer, source: Source) -> None:
        """Fills and sends one batch after the other; returns when the peer has all of them."""
        with _PipelinedCall(self.channels, self._depth, self._clock, transfer, source.sum, is_write=True) as call:
            call.write(source)

    def read(self, transfer: Transfer, sink: Sink, stall_timeout_s: float | None = None) -> None:
        """Requests batches ahead, and drains each one after it has arrived.

        Args:
            stall_timeout_s: replaces the pipeline's own.
        """
        limit_s = self._stall_timeout_s if stall_timeout_s is None else stall_timeout_s
        with _PipelinedCall(self.channels, self._depth, self._clock, transfer, sink.sum, limit_s) as call:
            call.read(sink)

    def close(self) -> None:
        """Ends transfers in flight, which then raise, and closes the channels. Idempotent."""
        self.channels.close()


@dataclass(eq=False)
class _PipelinedCall:
    """One transfer and the channels that it holds, in the order of their batches.

    A context manager: at its end, batches in flight are given up.
    """

    channels: ChannelPool
    depth: int
    clock: Clock
    transfer: Transfer
    sum: Sum
    stall_timeout_s: float = math.inf
    is_write: bool = False
    _held: deque[ChannelThread] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.transfer.timeout_s

    def __enter__(self) -> _PipelinedCall:
        return self

    def __exit__(self, *error: object) -> None:
        while self._held:
            self._held.popleft().release()

    def write(self, source: Source) -> None:
        fill, region_bytes = source.filling(), self.transfer.region_bytes
        for start, stop in self.transfer.batches():
            channel = self._acquire((stop - start) * region_bytes)
            try:
                wait = fill(start, channel.rows(stop - start, region_bytes))
                if wait is not None:
                    wait()
            except Exception as error:
                self._finish_before(error)
                raise
            self._check_deadline()
            channel.send(self._batch(start, stop))
        self._finish_all()

    def _finish_before(self, error: Exception) -> None:
        """Waits until nothing is in flight, so that a callback's `error` may reach the caller."""
        self._held.pop().release()  # Its batch was never sent.
        try:
            self._finish_all()
        except KVPoolError as failure:
            raise failure from error

    def read(self, sink: Sink) -> None:
        drain, batches = sink.draining(), self.transfer.batches()
        requested = 0
        in_use: Callable[[], object] | None = None  # Waits for the drain that still reads the first channel's buffer.
        for nth, (start, stop) in enumerate(batches):
            requested = self._request(batches, requested)
            if requested == nth and in_use is not None:  # There was no other channel.
                self._finish_drained(in_use)
                in_use = None
                requested = self._request(batches, requested)
            channel = self._wait(0 if in_use is None else 1)
            self._check_deadline()
            wait = drain(start, channel.rows(stop - start, self.transfer.region_bytes))
            if in_use is not None:
                self._finish_drained(in_use)
            if wait is None:
                self._finish_first()
            in_use = wait
        if in_use is not None:
            self._finish_drained(in_use)

    def _request(self, batches: Sequence[tuple[int, int]], requested: int) -> int:
        """Requests more batches, while there are channels; returns how many have been requested in all."""
        while requested < len(batches) and len(self._held) < self.depth:
            start, stop = batches[requested]
            channel = self._acquire_if_free((stop - start) * self.transfer.region_bytes)
            if channel is None:
                break
            channel.send(self._batch(start, stop))
            requested += 1
        return requested

    def _finish_drained(self, in_use: Callable[[], object]) -> None:
        """Releases the first channel, after the drain that reads its buffer."""
        in_use()
        self._finish_first()

    def _batch(self, start: int, stop: int) -> TransferBatch:
        deadline = time.monotonic() + max(self._remaining_s(), 0)
        return TransferBatch(self.transfer, start, stop, deadline, self.is_write, self.sum)

    def _remaining_s(self) -> float:
        return self._deadline - self.clock()

    def _check_deadline(self) -> None:
        if self._remaining_s() < 0:
            raise PoolTimeoutError(
                f"a transfer to or from {self.channels.peer} took more than {self.transfer.timeout_s:.3f} s"
            )

    def _acquire(self, nbytes: int) -> ChannelThread:
        """One more channel; if the call has enough, or none is free, after its first batch has ended."""
        if len(self._held) == self.depth:
            self._finish_first()
        channel = self._acquire_if_free(nbytes)
        if channel is None:
            self._finish_first()
            channel = self._acquire_if_free(nbytes)
            assert channel is not None, "a call without channels waits for one"
        return channel

    def _acquire_if_free(self, nbytes: int) -> ChannelThread | None:
        """One more channel, or None if none is free. A call without channels waits for its first."""
        channel = self.channels.acquire(nbytes, 0.0 if self._held else self._remaining_s())
        if channel is not None:
            self._held.append(channel)
        elif not self._held:
            raise PoolTimeoutError(
                f"all {MAX_CHANNELS} transfer channels to {self.channels.peer} stayed busy for "
                f"{self.transfer.timeout_s:.3f} s, {self.channels.num_lost} of them with transfers that were given "
                "up and do not end"
            )
        return channel

    def _wait(self, nth: int = 0) -> ChannelThread:
        """The channel of the nth batch in flight, once that batch has ended. Raises the batch's error."""
        channel = self._held[nth]
        while not channel.wait(min(max(self._remaining_s(), 0), self.stall_timeout_s / 4, _CHECK_S)):
            self._check_deadline()
            if channel.stalled_s > self.stall_timeout_s:
                raise PoolTimeoutError(f"{self.channels.peer} sent nothing for {self.stall_timeout_s:.3f} s")
        return channel

    def _finish_all(self) -> None:
        while self._held:
            self._finish_first()

    def _finish_first(self) -> None:
        """Waits for the first batch in flight, and releases its channel."""
        self._wait()
        self._held.popleft().release()
