"""Lanes: each a thread with a buffer and a carrier, which carries one batch at a time between the buffer and the arena.

What a caller gives up may go on, where nothing can stop a transfer. So a lane belongs to its batch until that has
ended; only then is its buffer anyone else's. The number of lanes is bounded, so that a peer that stands still costs
bounded memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError, TransferError

Bytes = npt.NDArray[np.uint8]

MAX_LANES = 16
LOST_AFTER_S = 5.0
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one call moves.

    Args:
        holding_id: of the ticket or lease.
        offsets: of all regions, of `region_bytes` each.
        permit: proof that the server granted them.
    """

    is_write: bool
    holding_id: int
    offsets: Sequence[int]
    region_bytes: int
    permit: bytes = b""


class Batch:
    """Regions [first, stop) of a transfer, on their way.

    Args:
        deadline: by `time.monotonic`.
        source: of a write, where its bytes lie, one array a region; None: in the lane's buffer.

    Attributes:
        progressed_at: when bytes were last known to have moved.
        given_up: nobody waits for it any more.
    """

    def __init__(
        self, transfer: Transfer, first: int, stop: int, deadline: float, source: Sequence[Bytes] | None = None
    ):
        self.transfer = transfer
        self.source = source
        self.first, self.stop = first, stop
        self.deadline = deadline
        self.given_up = False
        self.progressed()

    @property
    def offsets(self) -> Sequence[int]:
        return self.transfer.offsets[self.first : self.stop]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.first) * self.transfer.region_bytes

    def progressed(self) -> None:
        self.progressed_at = time.monotonic()


class Carrier(Protocol):
    """What moves a lane's batches. `give_up` and `close` come from any thread, the rest from one at a time."""

    def grow(self, old: Bytes, nbytes: int) -> Bytes:
        """A larger buffer that it can carry from and to; `old` is not used any more. Raises TransferError."""

    def begin(self, batch: Batch, here: Bytes) -> None:
        """Sends a batch off, or for it, as far as that goes without an answer. Raises as `finish` does."""

    def finish(self, batch: Batch, here: Bytes) -> None:
        """Carries it to its end, and returns or raises KVPoolError once nothing touches `here` any more.

        Any other exception means that something still may: the lane is lost.
        """

    def give_up(self, batch: Batch) -> None:
        """Ends a batch sooner, where it can."""

    def close(self) -> None:
        """No batch comes any more."""


class Lane:
    """Held by one caller from `Lanes.take` to `let_go`."""

    def __init__(self, lanes: Lanes, carrier: Carrier, changed: threading.Condition):
        self._lanes = lanes
        self._carrier = carrier
        self._changed = changed
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._held = True
        self._batch: Batch | None = None
        self._let_go_at = 0.0
        self._failure: KVPoolError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvpool-lane", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """A caller takes it."""
        self._held = True

    def rows(self, count: int, region_bytes: int) -> list[Bytes]:
        """The first `count` regions of the buffer: uint8 [region_bytes] each."""
        return list(self._buffer[: count * region_bytes].reshape(count, region_bytes))

    def fit(self, nbytes: int) -> None:
        """Makes the buffer hold `nbytes`. Only while nothing is under way."""
        if nbytes > len(self._buffer):
            old, self._buffer = self._buffer, np.empty(0, np.uint8)
            self._buffer = self._carrier.grow(old, nbytes)

    def send(self, batch: Batch) -> None:
        """Sends a batch off, from or to the start of the buffer; does not wait."""
        self._ended.clear()
        self._failure = None
        with self._changed:
            self._batch = batch
        self._inbox.put(batch)

    def wait(self, timeout_s: float) -> bool:
        """Whether the batch has ended, within that time. Raises what went wrong with it."""
        if not self._ended.wait(timeout_s):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def has_stood_still_s(self) -> float:
        """How long nothing is known to have moved of the batch under way."""
        batch = self._batch
        return 0.0 if batch is None else time.monotonic() - batch.progressed_at

    def let_go(self) -> None:
        """The caller is done with it, or gives its batch up."""
        with self._changed:
            self._held = False
            self._let_go_at = time.monotonic()
            given_up = self._batch
            self._settle()
        if given_up is not None:
            given_up.given_up = True
            self._carrier.give_up(given_up)

    def is_lost(self) -> bool:
        """Whether its batch was given up long ago, and has not ended."""
        return self._batch is not None and not self._held and time.monotonic() - self._let_go_at > LOST_AFTER_S

    def end(self) -> None:
        """Ends the thread, once it has seen that the lanes are closed."""
        if (batch := self._batch) is not None:
            batch.given_up = True
            self._carrier.give_up(batch)
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(timeout_s, 0))

    def _serve(self) -> None:
        while (batch := self._inbox.get()) is not None:
            try:
                here = self._buffer[: batch.nbytes]
                self._carrier.begin(batch, here)
                self._carrier.finish(batch, here)
            except KVPoolError as error:
                self._failure = error
            except Exception as error:  # What is under way nobody knows: the lane never comes back.
                self._failure = TransferError(f"the way to {self._lanes.peer} broke down: {error!r}")
                self._ended.set()
                return
            with self._changed:
                self._batch = None
                # Before anyone else can take the lane: it would be the end of their batch, too.
                self._ended.set()
                self._settle()
        self._carrier.close()

    def _settle(self) -> None:
        if not self._held and self._batch is None:
            self._lanes.came_back(self)


class Lanes:
    """The lanes to one peer.

    Args:
        make: a lane's carrier.
        peer: whom they lead to, for people.

    Attributes:
        closed: set when they are to end.
    """

    def __init__(self, make: Callable[[threading.Event], Carrier], peer: str):
        self._make: Callable[[threading.Event], Carrier] | None = make
        self._changed = threading.Condition()
        self._all: list[Lane] = []
        self._idle: list[Lane] = []
        self.peer = peer
        self.closed = threading.Event()

    def take(self, nbytes: int, timeout_s: float) -> Lane | None:
        """A lane with a buffer of at least `nbytes`; None if none becomes free in time.

        Raises:
            TransferError: they are closed, or the carrier cannot use the memory.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._idle or len(self._all) < MAX_LANES or self._make is None, max(timeout_s, 0)
            )
            if self._make is None:
                raise TransferError(f"the way to {self.peer} is closed")
            if self._idle:
                lane = self._idle.pop()
                lane.hold()
            elif len(self._all) < MAX_LANES:
                lane = Lane(self, self._make(self.closed), self._changed)
                self._all.append(lane)
            else:
                return None
        try:
            lane.fit(nbytes)
        except BaseException:
            lane.let_go()
            raise
        return lane

    def came_back(self, lane: Lane) -> None:
        """A lane is free. The caller holds the lock."""
        self._idle.append(lane)
        self._changed.notify()

    @property
    def num_lanes(self) -> int:
        return len(self._all)

    @property
    def num_lost(self) -> int:
        """Lanes whose batches were given up long ago, and have not ended."""
        return sum(lane.is_lost() for lane in self._all)

    def close(self) -> None:
        """Ends the threads, and with the last of them what carries. Idempotent."""
        with self._changed:
            self.closed.set()
            self._make = None
            ended, self._all, self._idle = self._all, [], []
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for lane in ended:
            lane.end()
        for lane in ended:
            lane.join(deadline - time.monotonic())
