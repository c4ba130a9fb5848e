"""The `mooncake` transport: one-sided reads and writes of the arena by Mooncake's Transfer Engine, over RDMA or TCP.

The server takes no part in a transfer, so it cannot check that a lease or a ticket is live; what guards the bytes is
what guards them in shared memory. The caller's clock: a lease or ticket is asked for just before, no batch leaves or is
handed over after `timeout_s`, and the client throws away what it got once the lease is over. The server's quarantine:
slots of an expired ticket wait for `grace_ms`. Checksums, behind both.

A transfer that was given up may still be writing, and one that failed may still have bytes in a socket. So a ticket
whose write did not end well is never given back (`one_sided`): it expires, and its slots wait.

Two batches of a call are under way at once, where lanes allow: one travels while the other is filled or drained.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from kvpool.errors import PoolTimeoutError, TransferError
from kvpool.mooncake import Engine
from kvpool.transport.base import Clock, Drain, Fill, batches
from kvpool.transport.lanes import MAX_LANES, Lane, Lanes
from kvpool.types import MooncakeInfo

DEPTH = 2
_LOOK_S = 0.25


class MooncakeTransport:
    """Regions of an arena that a peer's engine has registered.

    Args:
        info: the peer.
        start: makes this side's engine; again, should too many transfers have been given up.
        stall_timeout_s: a read that brings nothing for so long is given up.

    Raises:
        ConfigError: the engine does not start.
    """

    name = "mooncake"
    memory = None
    one_sided = True

    def __init__(
        self,
        info: MooncakeInfo,
        start: Callable[[], Engine],
        stall_timeout_s: float,
        clock: Clock = time.monotonic,
    ):
        self._info = info
        self._start = start
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._renewing = threading.Lock()
        self._lanes = self._open()

    def __repr__(self) -> str:
        return f"MooncakeTransport({self._info.session}, {self._info.protocol})"

    def _open(self) -> Lanes:
        lanes = Lanes(self._start(), self._info)
        # Also at the interpreter's end, which a thread inside the engine would not survive.
        self._end = weakref.finalize(self, lanes.close)
        return lanes

    def prove(self, timeout_s: float) -> None:
        """Reads the server's nonce through the engine.

        Raises:
            TransferError, PoolTimeoutError, UnavailableError: this engine does not reach the server's memory.
        """
        nbytes = len(self._info.nonce)
        with self._trip([], nbytes, timeout_s) as trip:
            lane = trip.board(nbytes)
            lane.read([self._info.nonce_offset], nbytes)
            trip.wait()
            if lane.rows(1, nbytes)[0].tobytes() != self._info.nonce:
                raise TransferError(f"the Transfer Engine at {self._info.session} is another server's")

    def write(
        self, ticket_id: int, offsets: Sequence[int], region_bytes: int, fill: Fill, batch_bytes: int, timeout_s: float
    ) -> None:
        with self._trip(offsets, region_bytes, timeout_s) as trip:
            for start, stop in batches(len(offsets), region_bytes, batch_bytes):
                lane = trip.board((stop - start) * region_bytes)
                fill(start, lane.rows(stop - start, region_bytes))
                trip.check_clock()
                lane.write(offsets[start:stop], region_bytes)
            trip.land_all()

    def read(
        self, lease_id: int, offsets: Sequence[int], region_bytes: int, drain: Drain, batch_bytes: int, timeout_s: float
    ) -> None:
        plan = batches(len(offsets), region_bytes, batch_bytes)
        sent = 0
        with self._trip(offsets, region_bytes, timeout_s, self._stall_timeout_s) as trip:
            for nth, (start, stop) in enumerate(plan):
                while sent < min(nth + DEPTH, len(plan)):
                    first, last = plan[sent]
                    lane = trip.board_if_free((last - first) * region_bytes)
                    if lane is None:
                        break
                    lane.read(offsets[first:last], region_bytes)
                    sent += 1
                lane = trip.wait()
                trip.check_clock()
                drain(start, lane.rows(stop - start, region_bytes))
                trip.land()

    def _trip(
        self, offsets: Sequence[int], region_bytes: int, timeout_s: float, stall_timeout_s: float = float("inf")
    ) -> _Trip:
        if offsets and max(offsets) + region_bytes > self._info.nbytes:
            raise TransferError(
                f"a region ends at {max(offsets) + region_bytes}, beyond the arena's {self._info.nbytes} bytes"
            )
        return _Trip(self._in_service(), self._clock, timeout_s, stall_timeout_s)

    def _in_service(self) -> Lanes:
        """The lanes; new ones where a peer that stood still has taken half of them for good."""
        with self._renewing:
            if self._lanes.num_lost > MAX_LANES // 2:
                end_lost = self._end
                self._lanes = self._open()
                end_lost()
            return self._lanes

    def close(self) -> None:
        with self._renewing:
            self._end()


class _Trip:
    """One call's way: the lanes it holds, in the order of their batches, and its deadline. A context manager."""

    def __init__(self, lanes: Lanes, clock: Clock, timeout_s: float, stall_timeout_s: float):
        self._lanes = lanes
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = clock() + timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._held: deque[Lane] = deque()

    def __enter__(self) -> _Trip:
        return self

    def __exit__(self, *error: object) -> None:
        while self._held:
            self._held.popleft().let_go()

    def _remaining_s(self) -> float:
        return self._deadline - self._clock()

    def check_clock(self) -> None:
        """Raises PoolTimeoutError once the deadline has passed."""
        if self._remaining_s() < 0:
            raise PoolTimeoutError(f"one-sided transfer took more than {self._timeout_s:.3f} s")

    def board(self, nbytes: int) -> Lane:
        """One more lane; if the call has enough, or none is free, once its first batch has arrived."""
        if len(self._held) == DEPTH:
            self.land()
        lane = self.board_if_free(nbytes)
        if lane is None:
            self.land()
            lane = self.board_if_free(nbytes)
            assert lane is not None, "a call without lanes waits for one"
        return lane

    def board_if_free(self, nbytes: int) -> Lane | None:
        """One more lane, or None if none is free. A call that has none waits for its first."""
        lane = self._lanes.take(nbytes, 0.0 if self._held else self._remaining_s())
        if lane is not None:
            self._held.append(lane)
        elif not self._held:
            raise PoolTimeoutError(
                f"all {MAX_LANES} ways to the Transfer Engine were taken for {self._timeout_s:.3f} s, "
                f"{self._lanes.num_lost} of them by transfers that were given up and do not end"
            )
        return lane

    def wait(self) -> Lane:
        """The lane of the first batch, once that has arrived. Raises what went wrong with it."""
        lane = self._held[0]
        while not lane.ended.wait(min(max(self._remaining_s(), 0), self._stall_timeout_s / 4, _LOOK_S)):
            self.check_clock()
            if time.monotonic() - lane.progressed_at > self._stall_timeout_s:
                raise PoolTimeoutError(f"a one-sided read brought nothing for {self._stall_timeout_s:.3f} s")
        lane.raise_failure()
        return lane

    def land(self) -> None:
        """Waits for the first batch, and gives its lane back."""
        self.wait()
        self._held.popleft().let_go()

    def land_all(self) -> None:
        while self._held:
            self.land()
