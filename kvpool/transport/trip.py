"""One call's way over lanes: several batches under way at once, in order, within a deadline.

While batches travel, the caller fills the next, or drains the first that has arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvpool.errors import KVPoolError, PoolTimeoutError
from kvpool.transport.base import Buffers, Clock, Drain, Fill, batches
from kvpool.transport.lanes import MAX_LANES, Batch, Lane, Lanes, Transfer

_LOOK_S = 0.25


class Trip:
    """The lanes that a call holds, in the order of their batches. A context manager: what is left is given up.

    Args:
        depth: most batches under way at once.
        stall_timeout_s: a read that brings nothing for so long is given up.
    """

    def __init__(self, lanes: Lanes, depth: int, clock: Clock, timeout_s: float, stall_timeout_s: float):
        self._lanes = lanes
        self._depth = depth
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = clock() + timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._held: deque[Lane] = deque()

    def __enter__(self) -> Trip:
        return self

    def __exit__(self, *error: object) -> None:
        while self._held:
            self._held.popleft().let_go()

    def write(self, transfer: Transfer, fill: Fill, batch_bytes: int) -> None:
        """Fills batch after batch, and sends each off; returns when all have arrived."""
        for start, stop in batches(len(transfer.offsets), transfer.region_bytes, batch_bytes):
            lane = self._board((stop - start) * transfer.region_bytes)
            try:
                source = fill(start, lane.rows(stop - start, transfer.region_bytes))
            except Exception as error:
                self._settle(error)
                raise
            self._check_clock()
            lane.send(self._batch(transfer, start, stop, source))
        self._land_all()

    def _settle(self, error: Exception) -> None:
        """Has what is under way arrive, before `error` of a callback reaches the caller."""
        self._held.pop().let_go()  # The batch that was never sent.
        try:
            self._land_all()
        except KVPoolError as failure:
            raise failure from error

    def read(self, transfer: Transfer, drain: Drain, batch_bytes: int) -> None:
        """Sends for batches ahead, and drains each when it has arrived."""
        plan = batches(len(transfer.offsets), transfer.region_bytes, batch_bytes)
        sent = 0
        looked_at: Callable[[], object] | None = None  # Of the first lane, whose batch has been drained.
        for nth, (start, stop) in enumerate(plan):
            sent = self._send_for(transfer, plan, sent)
            if sent == nth and looked_at is not None:  # There was no other lane.
                self._land_drained(looked_at)
                looked_at = None
                sent = self._send_for(transfer, plan, sent)
            lane = self._wait(0 if looked_at is None else 1)
            self._check_clock()
            drained = drain(start, lane.rows(stop - start, transfer.region_bytes))
            if looked_at is not None:
                self._land_drained(looked_at)
            if drained is None:
                self._land()
            looked_at = drained
        if looked_at is not None:
            self._land_drained(looked_at)

    def _send_for(self, transfer: Transfer, plan: Sequence[tuple[int, int]], sent: int) -> int:
        """Sends for more batches of a plan, as far as there are lanes; returns how many have been sent for."""
        while sent < len(plan) and len(self._held) < self._depth:
            first, last = plan[sent]
            lane = self._board_if_free((last - first) * transfer.region_bytes)
            if lane is None:
                break
            lane.send(self._batch(transfer, first, last))
            sent += 1
        return sent

    def _land_drained(self, looked_at: Callable[[], object]) -> None:
        """Gives the first lane back, once nobody looks at its buffer any more."""
        looked_at()
        self._land()

    def _batch(self, transfer: Transfer, start: int, stop: int, source: Buffers | None = None) -> Batch:
        return Batch(transfer, start, stop, time.monotonic() + max(self._remaining_s(), 0), source)

    def _remaining_s(self) -> float:
        return self._deadline - self._clock()

    def _check_clock(self) -> None:
        if self._remaining_s() < 0:
            raise PoolTimeoutError(f"a transfer to or from {self._lanes.peer} took more than {self._timeout_s:.3f} s")

    def _board(self, nbytes: int) -> Lane:
        """One more lane; if the call has enough, or none is free, once its first batch has arrived."""
        if len(self._held) == self._depth:
            self._land()
        lane = self._board_if_free(nbytes)
        if lane is None:
            self._land()
            lane = self._board_if_free(nbytes)
            assert lane is not None, "a call without lanes waits for one"
        return lane

    def _board_if_free(self, nbytes: int) -> Lane | None:
        """One more lane, or None if none is free. A call that has none waits for its first."""
        lane = self._lanes.take(nbytes, 0.0 if self._held else self._remaining_s())
        if lane is not None:
            self._held.append(lane)
        elif not self._held:
            raise PoolTimeoutError(
                f"all {MAX_LANES} ways to {self._lanes.peer} were taken for {self._timeout_s:.3f} s, "
                f"{self._lanes.num_lost} of them by transfers that were given up and do not end"
            )
        return lane

    def _wait(self, nth: int = 0) -> Lane:
        """The lane of the first batch, or of a later one, once that has arrived. Raises what went wrong with it."""
        lane = self._held[nth]
        while not lane.wait(min(max(self._remaining_s(), 0), self._stall_timeout_s / 4, _LOOK_S)):
            self._check_clock()
            if lane.has_stood_still_s() > self._stall_timeout_s:
                raise PoolTimeoutError(f"{self._lanes.peer} brought nothing for {self._stall_timeout_s:.3f} s")
        return lane

    def _land_all(self) -> None:
        while self._held:
            self._land()

    def _land(self) -> None:
        """Waits for the first batch, and gives its lane back."""
        self._wait()
        self._held.popleft().let_go()
