"""Which connections a data worker serves, so that idle ones keep no room from those that move bytes.

A connection is unproven until it has shown a permit in force. There is room for `MAX_UNPROVEN` of them, apart from that
for others: a new one replaces the oldest of the address that has most. A proven connection replaces, where there is no
room, one that is idle; else it is refused. So whoever has no permit can only displace whoever has none. An owner of
permits who has as many proven connections as allowed gets another in the place of an idle one of its own. Owners share
the room for busy connections as in `Shares`, so that nobody takes all by moving a byte now and then.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool_server.data_plane.permits import NO_BOUND, Bound
from kvpool_server.sharing import SPARED_S, Shares

MAX_CONNECTIONS = 256
"""Proven connections of one worker."""
MAX_UNPROVEN = 64
MAX_LEAVING = 64
"""Connections that were hung up on, and whose threads have not ended yet."""
MAX_SEATS = MAX_CONNECTIONS + MAX_UNPROVEN + MAX_LEAVING


@dataclass(eq=False, slots=True)
class Seat:
    """One connection.

    Args:
        address: of the peer, without its port.
        number: 0 to `MAX_SEATS` - 1, unique among the connections that exist.
        idle_since: when it last moved bytes or received a header, by `time.monotonic`; None while it moves bytes.
        owner: as of `Bound`, of the first permit that it has shown.
    """

    client: socket.socket
    address: str
    number: int
    idle_since: float | None
    owner: int = 0


@dataclass(eq=False)
class Admission:
    """The connections of one worker. Thread-safe."""

    _max_proven: int = MAX_CONNECTIONS
    _max_unproven: int = MAX_UNPROVEN
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock. In the order in which they came in.
        self._unproven: dict[Seat, None] = {}
        self._proven: dict[Seat, None] = {}
        self._free = list(range(self._max_proven + self._max_unproven + MAX_LEAVING))

    def admit(self, client: socket.socket, address: str) -> Seat | None:
        """A seat for a new connection; None if there is no room."""
        with self._lock:
            if not self._free or not self._has_room():
                return None
            if len(self._unproven) >= self._max_unproven:
                self._hang_up_on(_of_most(self._unproven, self._unproven))
            seat = Seat(client, address, self._free.pop(), self._clock())
            self._unproven[seat] = None
            return seat

    def prove(self, seat: Seat, bound: Bound = NO_BOUND) -> bool:
        """The connection has shown a permit in force. False if there is no room for it, or its owner has too many."""
        with self._lock:
            if seat in self._proven:
                self._trim(bound, 0)
                return True
            if seat not in self._unproven or not self._has_room(bound.owner) or not self._trim(bound, 1):
                return False
            if len(self._proven) >= self._max_proven:
                self._hang_up_on(_of_most(self._proven, self._replaceable()))
            del self._unproven[seat]
            self._proven[seat] = None
            seat.owner = bound.owner
            return True

    def leave(self, seat: Seat) -> None:
        """The connection's thread ends. Call it before the socket is closed: its number may be another's afterwards."""
        with self._lock:
            self._unproven.pop(seat, None)
            self._proven.pop(seat, None)
            self._free.append(seat.number)

    def _trim(self, bound: Bound, num_new: int) -> bool:
        """Ends idle connections of an owner until it may have so many new ones. False if too few are idle."""
        if not bound.owner:
            return True
        excess = sum(seat.owner == bound.owner for seat in self._proven) + num_new - bound.max_connections
        if excess <= 0:
            return True
        idle = [seat for seat in self._replaceable() if seat.owner == bound.owner][:excess]
        for seat in idle:
            self._hang_up_on(seat)
        return len(idle) == excess

    def _has_room(self, owner: int = 0) -> bool:
        """Whether one more connection of an owner could be proven; 0: of a client whose owner is not known."""
        busy = Shares()
        for seat in self._proven.keys() - self._replaceable():
            busy.add(str(seat.owner or ""))
        return busy.has_room(str(owner or ""), 1, self._max_proven)

    def _replaceable(self) -> list[Seat]:
        """Proven connections that have moved no bytes for `SPARED_S`, the longest idle first."""
        now = self._clock()
        idle = [(since, seat) for seat in self._proven if (since := seat.idle_since) is not None]
        idle.sort(key=lambda pair: pair[0])
        return [seat for since, seat in idle if now - since >= SPARED_S]

    def _hang_up_on(self, seat: Seat) -> None:
        """Wakes the connection's thread, which ends. Its seat is free once it has."""
        self._unproven.pop(seat, None)
        self._proven.pop(seat, None)
        with contextlib.suppress(OSError):  # The peer has disconnected, or the thread has closed the socket.
            seat.client.shutdown(socket.SHUT_RDWR)


def _of_most(seats: Iterable[Seat], candidates: Iterable[Seat]) -> Seat:
    """The first of the candidates whose address has most of the seats."""
    counts = Counter(seat.address for seat in seats)
    return max(candidates, key=lambda seat: counts[seat.address])
