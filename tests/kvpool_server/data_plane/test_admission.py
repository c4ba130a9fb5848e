"""Which connections a data worker serves, and whom a new one replaces."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvpool_server.data_plane.admission import MAX_LEAVING, SPARED_S, Admission, Seat
from kvpool_server.data_plane.permits import NO_BOUND, Bound
from tests.support.clock import FakeClock

MAX_PROVEN, MAX_UNPROVEN = 3, 4
ACME, UMBRA = Bound.of("acme", 2), Bound.of("umbra", 2)


class Door:
    """An admission with sockets of its own."""

    def __init__(self, sockets: ExitStack, max_proven: int = MAX_PROVEN):
        self.clock = FakeClock()
        self.admission = Admission(max_proven, MAX_UNPROVEN, self.clock)
        self._sockets = sockets
        self._peers: dict[Seat, socket.socket] = {}

    def enter(self, address: str) -> Seat | None:
        ours, theirs = socket.socketpair()
        self._sockets.enter_context(ours)
        self._sockets.enter_context(theirs)
        seat = self.admission.admit(ours, address)
        if seat is not None:
            self._peers[seat] = theirs
        return seat

    def admitted(self, address: str) -> Seat:
        seat = self.enter(address)
        assert seat is not None
        return seat

    def proven(self, address: str, bound: Bound = NO_BOUND, *, is_idle: bool = True) -> Seat:
        seat = self.admitted(address)
        assert self.admission.prove(seat, bound)
        seat.idle_since = self.clock() if is_idle else None
        return seat

    def is_hung_up_on(self, seat: Seat) -> bool:
        try:
            return self._peers[seat].recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def door() -> Iterator[Door]:
    with ExitStack() as sockets:
        yield Door(sockets)


def test_the_oldest_silent_connection_makes_room_for_a_new_one_and_proves_nothing_any_more(door: Door) -> None:
    silent = [door.admitted("a") for _ in range(MAX_UNPROVEN + 2)]
    assert [door.is_hung_up_on(seat) for seat in silent] == [True, True, False, False, False, False]
    assert not door.admission.prove(silent[0])


def test_silent_connections_displace_only_silent_ones_of_their_own_host(door: Door) -> None:
    proven, slow = door.proven("a"), door.admitted("far away")
    door.clock.advance(1_000)
    for _ in range(10 * MAX_UNPROVEN):
        door.admission.leave(door.admitted("flood"))
    flood = [door.admitted("flood") for _ in range(5 * MAX_UNPROVEN)]
    assert [door.is_hung_up_on(seat) for seat in (proven, slow, flood[0])] == [False, False, True]
    assert door.admission.prove(slow)


def test_hung_up_connections_cannot_pile_up(door: Door) -> None:
    """Their threads may take a moment to end: so many at most, and then nobody is admitted."""
    seats = [door.enter("a") for _ in range(MAX_PROVEN + MAX_UNPROVEN + MAX_LEAVING + 1)]
    assert seats[-1] is None and None not in seats[:-1]
    assert seats[0] is not None
    door.admission.leave(seats[0])
    assert door.admitted("a").number == seats[0].number


def test_the_longest_idle_connection_of_the_host_with_most_makes_room(door: Door) -> None:
    only = door.proven("b")
    door.clock.advance(1)
    first, second = door.proven("a"), door.proven("a")
    door.clock.advance(SPARED_S / 2)
    second.idle_since = door.clock()
    door.clock.advance(SPARED_S)
    door.proven("c")
    assert [door.is_hung_up_on(seat) for seat in (only, first, second)] == [False, True, False]


def test_nobody_is_admitted_while_all_move_bytes(door: Door) -> None:
    seats = [door.proven("a", is_idle=False) for _ in range(MAX_PROVEN - 1)]
    waiting = door.admitted("a")
    seats.append(door.proven("a", is_idle=False))
    assert door.enter("b") is None and not door.admission.prove(waiting)
    assert not any(map(door.is_hung_up_on, seats))
    door.admission.leave(seats[0])
    assert door.admission.prove(waiting) and door.admission.prove(waiting)


def test_an_owner_with_all_its_connections_gets_one_for_its_own_idle_one(door: Door) -> None:
    theirs = door.proven("b", UMBRA)
    door.clock.advance(1)
    first, second = door.proven("a", ACME), door.proven("c", ACME)
    door.clock.advance(SPARED_S)
    second.idle_since = door.clock()
    third = door.proven("d", ACME)
    assert [door.is_hung_up_on(seat) for seat in (theirs, first, second, third)] == [False, True, False, False]
    second.idle_since = third.idle_since = None
    waiting = door.admitted("a")
    assert not door.admission.prove(waiting, ACME), "all of its connections move bytes"
    assert not any(map(door.is_hung_up_on, (second, third))) and door.admission.prove(second, ACME)
    door.admission.leave(second)
    assert door.admission.prove(waiting, ACME)
    third.idle_since = door.clock()
    waiting.idle_since = None
    door.clock.advance(SPARED_S)
    assert door.admission.prove(waiting, Bound.of("acme", 1)), "a lower bound ends no connection that moves bytes"
    assert door.is_hung_up_on(third) and not door.is_hung_up_on(waiting)


def test_owners_whose_connections_all_move_bytes_leave_room_for_others(door: Door) -> None:
    acme, umbra = Bound.of("acme", MAX_PROVEN), Bound.of("umbra", MAX_PROVEN)
    seats = [door.proven("a", acme, is_idle=False) for _ in range(2)]
    assert not door.admission.prove(door.admitted("a"), acme), "as many as are left"
    seats.append(door.proven("a", umbra, is_idle=False))
    assert not any(map(door.is_hung_up_on, seats))


def test_owners_that_come_late_have_a_connection_each() -> None:
    with ExitStack() as sockets:
        door = Door(sockets, max_proven=16)
        for bound in (Bound.of(f"tenant {nth}", 16) for nth in range(7)):
            door.proven("a", bound, is_idle=False)
            while door.admission.prove(seat := door.admitted("a"), bound):
                seat.idle_since = None
            door.admission.leave(seat)
