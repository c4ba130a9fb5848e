"""Lanes: each a thread with a staging buffer, which carries one batch at a time between the buffer and the arena.

What a caller gives up goes on, since nothing can stop a one-sided transfer. So a lane belongs to its batch until every
transfer of it has ended; only then is its buffer anyone else's. The number of lanes is bounded, so that a peer that
stands still costs bounded memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.errors import KVPoolError, TransferError, UnavailableError
from kvpool.mooncake import Bytes, Engine, State
from kvpool.transport.base import BATCH_BYTES
from kvpool.types import MooncakeInfo

MAX_LANES = 16
LOST_AFTER_S = 5.0
CLOSE_S = 1.0
WINDOW = 64
"""Transfers that a lane has under way at once; an engine queues about 2,000 for a peer, and fails more."""

LEG_BYTES = 1 << 20

_POLL_SHARE = 1 / 8
_POLL_S = (20e-6, 20e-3)
_SPIN_S = 50e-6


@dataclass(frozen=True, slots=True)
class _Leg:
    """One transfer: addresses here and at the peer."""

    here: int
    there: int
    nbytes: int


class Lane:
    """Held by one caller from `Lanes.take` to `let_go`."""

    def __init__(self, lanes: Lanes, engine: Engine, info: MooncakeInfo, changed: threading.Condition):
        self._lanes = lanes
        self._info = info
        self._changed = changed
        self._staging: Bytes = np.empty(0, np.uint8)
        self._inbox: queue.SimpleQueue[tuple[bool, list[_Leg]] | None] = queue.SimpleQueue()
        self._held = True
        self._under_way = False
        self._let_go_at = 0.0
        self._failure: KVPoolError | None = None
        self.ended = threading.Event()
        self.progressed_at = 0.0
        self._thread = threading.Thread(target=self._serve, args=(engine,), name="kvpool-lane", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """A caller takes it."""
        self._held = True

    def rows(self, count: int, region_bytes: int) -> list[Bytes]:
        """The first `count` regions of the buffer: uint8 [region_bytes] each."""
        return list(self._staging[: count * region_bytes].reshape(count, region_bytes))

    def write(self, offsets: Sequence[int], region_bytes: int) -> None:
        """Sends the buffer's first regions off to `offsets` of the arena; does not wait."""
        self._send(True, offsets, region_bytes)

    def read(self, offsets: Sequence[int], region_bytes: int) -> None:
        """Sends for the regions at `offsets`; does not wait."""
        self._send(False, offsets, region_bytes)

    def _send(self, is_write: bool, offsets: Sequence[int], region_bytes: int) -> None:
        self.ended.clear()
        self._failure = None
        self.progressed_at = time.monotonic()
        with self._changed:
            self._under_way = True
        self._inbox.put((is_write, self._legs(offsets, region_bytes)))

    def _legs(self, offsets: Sequence[int], region_bytes: int) -> list[_Leg]:
        """Neighbours travel together, in parts that show progress often enough."""
        legs: list[_Leg] = []
        here, base = self._staging.ctypes.data, self._info.base_address
        for nth, offset in enumerate(offsets):
            last = legs[-1] if legs else None
            if (
                last is not None
                and last.there + last.nbytes == base + offset
                and last.nbytes + region_bytes <= LEG_BYTES
            ):
                legs[-1] = _Leg(last.here, last.there, last.nbytes + region_bytes)
            else:
                legs.append(_Leg(here + nth * region_bytes, base + offset, region_bytes))
        return legs

    def raise_failure(self) -> None:
        """Raises what went wrong with the batch that has ended."""
        if self._failure is not None:
            raise self._failure

    def let_go(self) -> None:
        """The caller is done with it, or gives its batch up."""
        with self._changed:
            self._held = False
            self._let_go_at = time.monotonic()
            self._settle()

    def is_lost(self) -> bool:
        """Whether its batch was given up long ago, and has not ended."""
        return self._under_way and not self._held and time.monotonic() - self._let_go_at > LOST_AFTER_S

    def end(self) -> None:
        """Ends the thread, once it has seen that the lanes are closed."""
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(timeout_s, 0))

    def _serve(self, engine: Engine) -> None:
        while (order := self._inbox.get()) is not None:
            try:
                self._failure = self._carry(engine, *order)
            except Exception as error:  # What is under way nobody knows: the lane never comes back.
                self._failure = TransferError(f"the Transfer Engine raised {error!r}")
                self.ended.set()
                return
            with self._changed:
                self._under_way = False
                # Before anyone else can take the lane: it would be the end of their batch, too.
                self.ended.set()
                self._settle()

    def _settle(self) -> None:
        if not self._held and not self._under_way:
            self._lanes.came_back(self)

    def _carry(self, engine: Engine, is_write: bool, legs: list[_Leg]) -> KVPoolError | None:
        """Carries a batch, until nothing touches the buffer any more; what went wrong."""
        submit = engine.submit_write if is_write else engine.submit_read
        failure: KVPoolError | None = None
        under_way: list[int] = []
        at = 0
        since = time.monotonic()
        while under_way or (at < len(legs) and failure is None):
            if self._lanes.closed.is_set():
                return UnavailableError(f"the way to the Transfer Engine at {self._info.session} was closed")
            for leg in legs[at : at + WINDOW - len(under_way)] if failure is None else ():
                at += 1
                if not (transfer_id := submit(self._info.session, leg.here, leg.there, leg.nbytes)):
                    failure = UnavailableError(
                        f"cannot reach the Transfer Engine of kvpool-server at {self._info.session}; is the server "
                        "running, and are the engine's ports open?"
                    )
                    break
                under_way.append(transfer_id)
            states = [engine.state(transfer_id) for transfer_id in under_way]
            if State.FAILED in states and failure is None:
                verb = "write to" if is_write else "read from"
                failure = TransferError(f"a {verb} the arena by the Transfer Engine at {self._info.session} failed")
            waiting = [each for each, state in zip(under_way, states, strict=True) if state is State.UNDER_WAY]
            if len(waiting) < len(under_way):
                under_way, since = waiting, time.monotonic()
                self.progressed_at = since
            elif (waited := time.monotonic() - since) > _SPIN_S:
                time.sleep(min(max(waited * _POLL_SHARE, _POLL_S[0]), _POLL_S[1]))
        return failure

    def fit(self, engine: Engine, nbytes: int) -> None:
        """Makes the buffer hold `nbytes`. Only while nothing is under way."""
        if nbytes <= len(self._staging):
            return
        if len(self._staging):
            engine.unregister(self._staging)
            self._staging = np.empty(0, np.uint8)
        grown: Bytes = np.empty(max(BATCH_BYTES, 1 << (nbytes - 1).bit_length()), np.uint8)
        engine.register(grown)
        self._staging = grown


class Lanes:
    """The lanes of one engine to one peer.

    Attributes:
        closed: set when they are to end.
    """

    def __init__(self, engine: Engine, info: MooncakeInfo):
        self._engine: Engine | None = engine
        self._info = info
        self._changed = threading.Condition()
        self._all: list[Lane] = []
        self._idle: list[Lane] = []
        self.closed = threading.Event()

    def take(self, nbytes: int, timeout_s: float) -> Lane | None:
        """A lane with a buffer of at least `nbytes`; None if none becomes free in time.

        Raises:
            TransferError: they are closed, or the engine does not take the memory.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._idle or len(self._all) < MAX_LANES or self._engine is None, max(timeout_s, 0)
            )
            engine = self._engine
            if engine is None:
                raise TransferError(f"the way to the Transfer Engine at {self._info.session} is closed")
            if self._idle:
                lane = self._idle.pop()
                lane.hold()
            elif len(self._all) < MAX_LANES:
                lane = Lane(self, engine, self._info, self._changed)
                self._all.append(lane)
            else:
                return None
        try:
            lane.fit(engine, nbytes)
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
        """Ends the threads, and the engine with the last of them. Idempotent."""
        with self._changed:
            self.closed.set()
            self._engine = None
            ended, self._all, self._idle = self._all, [], []
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for lane in ended:
            lane.end()
        for lane in ended:
            lane.join(deadline - time.monotonic())
