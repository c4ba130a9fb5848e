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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.errors import KVPoolError, TransferError, UnavailableError
from kvpool.mooncake import Bytes, Engine, State
from kvpool.transport.base import BATCH_BYTES, Clock, Drain, Fill
from kvpool.transport.lanes import MAX_LANES, Batch, Lanes, Transfer
from kvpool.transport.trip import Trip
from kvpool.types import MooncakeInfo

DEPTH = 2
WINDOW = 64
"""Transfers that a lane has under way at once; an engine queues about 2,000 for a peer, and fails more."""

LEG_BYTES = 1 << 20

_POLL_SHARE = 1 / 8
_POLL_S = (20e-6, 20e-3)
_SPIN_S = 50e-6


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
    in_place = False

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
        engine, info = self._start(), self._info
        lanes = Lanes(lambda closed: _EngineCarrier(engine, info, closed), f"the Transfer Engine at {info.session}")
        # Also at the interpreter's end, which a thread inside the engine would not survive.
        self._end = weakref.finalize(self, lanes.close)
        return lanes

    def prove(self, timeout_s: float) -> None:
        """Reads the server's nonce through the engine.

        Raises:
            TransferError, PoolTimeoutError, UnavailableError: this engine does not reach the server's memory.
        """
        read: list[bytes] = []
        transfer = Transfer(False, 0, [self._info.nonce_offset], len(self._info.nonce))
        with self._trip([], 0, timeout_s, float("inf")) as trip:
            trip.read(transfer, lambda _, rows: read.append(rows[0].tobytes()), transfer.region_bytes)
        if read != [self._info.nonce]:
            raise TransferError(f"the Transfer Engine at {self._info.session} is another server's")

    def write(
        self,
        ticket_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        fill: Fill,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        with self._trip(offsets, region_bytes, timeout_s, float("inf")) as trip:
            trip.write(Transfer(True, ticket_id, offsets, region_bytes), fill, batch_bytes)

    def read(
        self,
        lease_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        drain: Drain,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        with self._trip(offsets, region_bytes, timeout_s, self._stall_timeout_s) as trip:
            trip.read(Transfer(False, lease_id, offsets, region_bytes), drain, batch_bytes)

    def _trip(self, offsets: Sequence[int], region_bytes: int, timeout_s: float, stall_timeout_s: float) -> Trip:
        if offsets and max(offsets) + region_bytes > self._info.nbytes:
            raise TransferError(
                f"a region ends at {max(offsets) + region_bytes}, beyond the arena's {self._info.nbytes} bytes"
            )
        return Trip(self._in_service(), DEPTH, self._clock, timeout_s, stall_timeout_s)

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


@dataclass(frozen=True, slots=True)
class _Leg:
    """One transfer of the engine's: addresses here and at the peer."""

    here: int
    there: int
    nbytes: int


class _EngineCarrier:
    """Carries by one-sided transfers, which nothing can stop."""

    def __init__(self, engine: Engine, info: MooncakeInfo, closed: threading.Event):
        self._engine = engine
        self._info = info
        self._closed = closed

    def grow(self, old: Bytes, nbytes: int) -> Bytes:
        if len(old):
            self._engine.unregister(old)
        grown: Bytes = np.empty(max(BATCH_BYTES, 1 << (nbytes - 1).bit_length()), np.uint8)
        self._engine.register(grown)
        return grown

    def begin(self, batch: Batch, here: Bytes) -> None:
        """The engine queues no more than a window; all is done in `finish`."""

    def finish(self, batch: Batch, here: Bytes) -> None:
        engine, legs = self._engine, self._legs(batch, here)
        submit = engine.submit_write if batch.transfer.is_write else engine.submit_read
        failure: KVPoolError | None = None
        under_way: list[int] = []
        at = 0
        since = time.monotonic()
        while under_way or (at < len(legs) and failure is None):
            if self._closed.is_set():
                raise UnavailableError(f"the way to the Transfer Engine at {self._info.session} was closed")
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
                verb = "write to" if batch.transfer.is_write else "read from"
                failure = TransferError(f"a {verb} the arena by the Transfer Engine at {self._info.session} failed")
            waiting = [each for each, state in zip(under_way, states, strict=True) if state is State.UNDER_WAY]
            if len(waiting) < len(under_way):
                under_way, since = waiting, time.monotonic()
                batch.progressed()
            elif (waited := time.monotonic() - since) > _SPIN_S:
                time.sleep(min(max(waited * _POLL_SHARE, _POLL_S[0]), _POLL_S[1]))
        if failure is not None:
            raise failure

    def _legs(self, batch: Batch, here: Bytes) -> list[_Leg]:
        """PeerDirectories travel together, in parts that show progress often enough."""
        legs: list[_Leg] = []
        address, base, region_bytes = here.ctypes.data, self._info.base_address, batch.transfer.region_bytes
        for nth, offset in enumerate(batch.offsets):
            last = legs[-1] if legs else None
            if (
                last is not None
                and last.there + last.nbytes == base + offset
                and last.nbytes + region_bytes <= LEG_BYTES
            ):
                legs[-1] = _Leg(last.here, last.there, last.nbytes + region_bytes)
            else:
                legs.append(_Leg(address + nth * region_bytes, base + offset, region_bytes))
        return legs

    def give_up(self, batch: Batch) -> None:
        """It goes on, and the lane waits for it."""

    def close(self) -> None:
        """The engine ends with its last reference."""
