"""Ways without threads: the caller itself begins batches and finishes them, one connection a call.

Where cores are few, a thread that has to be woken for each batch costs more than it carries. Batches are still under
way while the caller fills or drains another: in the kernel, and in the worker at the other end. All use one buffer,
which stays in the core's cache: a batch that was begun has been taken from it, and one is brought only when it is
finished.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvpool.errors import KVPoolError, PoolTimeoutError, TransferError
from kvpool.transport.base import Drain, Fill, batches
from kvpool.transport.lanes import MAX_LANES, Batch, Bytes, Carrier, Transfer

AHEAD = 8
"""Batches of one call that have begun and are not finished."""


class Way:
    """A carrier and its buffer. Held by one caller at a time.

    Attributes:
        begun: batches under way, in order.
    """

    def __init__(self, carrier: Carrier):
        self.carrier = carrier
        self.begun: deque[Batch] = deque()
        self._buffer: Bytes = np.empty(0, np.uint8)

    def here(self, nbytes: int) -> Bytes:
        """The first `nbytes` of the buffer, made larger if need be."""
        if nbytes > len(self._buffer):
            self._buffer = self.carrier.grow(self._buffer, nbytes)
        return self._buffer[:nbytes]

    def begin(self, batch: Batch, here: Bytes) -> None:
        self.begun.append(batch)
        self.carrier.begin(batch, here)

    def finish(self, here: Bytes) -> None:
        """The first of the batches under way."""
        self.carrier.finish(self.begun[0], here)
        self.begun.popleft()

    def finish_all(self) -> None:
        while self.begun:
            self.finish(self.here(0))

    def settle(self, error: Exception) -> None:
        """Has what is under way arrive, before `error` of a callback reaches the caller."""
        try:
            self.finish_all()
        except KVPoolError as failure:
            raise failure from error


class Ways:
    """The ways to one peer, for the callers of one transport.

    Args:
        make: a way's carrier, which keeps batches' deadlines itself, and has several under way, in order.
        peer: whom they lead to, for people.
    """

    def __init__(self, make: Callable[[threading.Event], Carrier], peer: str):
        self._make = make
        self._peer = peer
        self._changed = threading.Condition()
        self._all: set[Way] = set()
        self._idle: list[Way] = []
        self._closed = threading.Event()

    def write(self, transfer: Transfer, fill: Fill, batch_bytes: int, timeout_s: float) -> None:
        """Fills batch after batch, and sends each off; returns when all have arrived."""
        deadline = time.monotonic() + timeout_s
        with self._taken(timeout_s) as way:
            for start, stop in batches(len(transfer.offsets), transfer.region_bytes, batch_bytes):
                here = way.here((stop - start) * transfer.region_bytes)
                try:
                    source = fill(start, list(here.reshape(stop - start, transfer.region_bytes)))
                except Exception as error:
                    way.settle(error)
                    raise
                way.begin(Batch(transfer, start, stop, deadline, source), here)
                if len(way.begun) == AHEAD:
                    way.finish(here)
            way.finish_all()

    def read(self, transfer: Transfer, drain: Drain, batch_bytes: int, timeout_s: float) -> None:
        """Sends for batches ahead, and drains each when it has arrived."""
        deadline = time.monotonic() + timeout_s
        plan = batches(len(transfer.offsets), transfer.region_bytes, batch_bytes)
        with self._taken(timeout_s) as way:
            asked = 0
            for start, stop in plan:
                while asked < len(plan) and len(way.begun) < AHEAD:
                    way.begin(Batch(transfer, *plan[asked], deadline), way.here(0))
                    asked += 1
                here = way.here((stop - start) * transfer.region_bytes)
                way.finish(here)
                drained = drain(start, list(here.reshape(stop - start, transfer.region_bytes)))
                if drained is not None:
                    drained()

    @contextmanager
    def _taken(self, timeout_s: float) -> Iterator[Way]:
        way = self._take(timeout_s)
        try:
            yield way
        finally:
            with self._changed:
                if way.begun or self._closed.is_set():
                    way.carrier.close()  # What is under way nobody waits for.
                    way.begun.clear()
                if not self._closed.is_set():
                    self._idle.append(way)
                    self._changed.notify()

    def _take(self, timeout_s: float) -> Way:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed.is_set() or self._idle or len(self._all) < MAX_LANES, max(timeout_s, 0)
            )
            if self._closed.is_set():
                raise TransferError(f"the way to {self._peer} is closed")
            if self._idle:
                return self._idle.pop()
            if len(self._all) == MAX_LANES:
                raise PoolTimeoutError(f"all {MAX_LANES} ways to {self._peer} were taken for {timeout_s:.3f} s")
            way = Way(self._make(self._closed))
            self._all.add(way)
            return way

    def close(self) -> None:
        """Ends calls under way, which raise then. Idempotent."""
        with self._changed:
            self._closed.set()
            for way in self._all:
                if way in self._idle:
                    way.carrier.close()
                else:  # Its caller finds out, and closes it.
                    for batch in list(way.begun):
                        way.carrier.give_up(batch)
            self._all, self._idle = set(), []
            self._changed.notify_all()
