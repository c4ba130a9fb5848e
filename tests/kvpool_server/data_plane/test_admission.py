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


def test_the_oldest_silent_connection_makes_room_for_a_new_one(door: Door) -> None:
    silent = [door.admitted("a") for _ in range(MAX_UNPROVEN + 2)]
    assert [door.is_hung_up_on(seat) for seat in silent] == [True, True, False, False, False, False]


def test_silent_connections_displace_none_that_has_proven_itself(door: Door) -> None:
    proven = door.proven("a")
    door.clock.advance(1_000)
    for _ in range(10 * MAX_UNPROVEN):
        door.admission.leave(door.admitted("a"))
    for _ in range(2 * MAX_UNPROVEN):
        door.admitted("a")
    assert not door.is_hung_up_on(proven)


def test_a_host_that_floods_displaces_only_its_own_connections(door: Door) -> None:
    slow = door.admitted("far away")
    flood = [door.admitted("flood") for _ in range(5 * MAX_UNPROVEN)]
    assert not door.is_hung_up_on(slow) and door.is_hung_up_on(flood[0])
    assert door.admission.prove(slow)


def test_hung_up_connections_cannot_pile_up(door: Door) -> None:
    """Their threads may take a moment to end: so many at most, and then nobody is admitted."""
    seats = [door.enter("a") for _ in range(MAX_PROVEN + MAX_UNPROVEN + MAX_LEAVING + 1)]
    assert seats[-1] is None and None not in seats[:-1]
    assert seats[0] is not None
    door.admission.leave(seats[0])
    assert door.admitted("a").number == seats[0].number


def test_of_those_that_are_idle_the_longest_makes_room(door: Door) -> None:
    first, second, busy = door.proven("a"), door.proven("a"), door.proven("a", is_idle=False)
    door.clock.advance(SPARED_S / 2)
    second.idle_since = door.clock()
    door.clock.advance(SPARED_S)
    door.proven("b")
    assert [door.is_hung_up_on(seat) for seat in (first, second, busy)] == [True, False, False]


def test_the_host_with_most_connections_gives_up_one(door: Door) -> None:
    only = door.proven("b")
    door.clock.advance(1)
    many = [door.proven("a"), door.proven("a")]
    door.clock.advance(SPARED_S)
    door.proven("c")
    assert not door.is_hung_up_on(only) and door.is_hung_up_on(many[0])


def test_nobody_is_admitted_while_all_move_bytes(door: Door) -> None:
    seats = [door.proven("a", is_idle=False) for _ in range(MAX_PROVEN - 1)]
    waiting = door.admitted("a")
    seats.append(door.proven("a", is_idle=False))
    assert door.enter("b") is None and not door.admission.prove(waiting)
    assert not any(map(door.is_hung_up_on, seats))
    door.admission.leave(seats[0])
    assert door.admission.prove(waiting) and door.admission.prove(waiting)


def test_who_was_hung_up_on_cannot_prove_anything_any_more(door: Door) -> None:
    first = door.admitted("a")
    for _ in range(MAX_UNPROVEN):
        door.admitted("a")
    assert door.is_hung_up_on(first) and not door.admission.prove(first)


def test_an_owner_with_all_its_connections_gets_one_for_its_own_idle_one(door: Door) -> None:
    theirs = door.proven("b", UMBRA)
    door.clock.advance(1)
    first, second = door.proven("a", ACME), door.proven("c", ACME)
    door.clock.advance(SPARED_S)
    second.idle_since = door.clock()
    third = door.proven("d", ACME)
    assert [door.is_hung_up_on(seat) for seat in (theirs, first, second, third)] == [False, True, False, False]


def test_an_owner_whose_connections_all_move_bytes_gets_no_other(door: Door) -> None:
    mine = [door.proven("a", ACME, is_idle=False) for _ in range(2)]
    waiting = door.admitted("a")
    assert not door.admission.prove(waiting, ACME)
    assert not any(map(door.is_hung_up_on, mine)) and door.admission.prove(mine[0], ACME)
    door.admission.leave(mine[0])
    assert door.admission.prove(waiting, ACME)


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


def test_idle_connections_of_others_are_no_reason_to_refuse_an_owner(door: Door) -> None:
    idle = [door.proven("a", Bound.of(f"tenant {nth}", 1)) for nth in range(MAX_PROVEN)]
    door.clock.advance(SPARED_S)
    door.proven("b", ACME)
    assert [door.is_hung_up_on(seat) for seat in idle] == [True, False, False]


def test_a_lower_bound_ends_connections_that_exist(door: Door) -> None:
    idle, busy = door.proven("a", ACME), door.proven("a", ACME, is_idle=False)
    door.clock.advance(SPARED_S)
    assert door.admission.prove(busy, Bound.of("acme", 1)), "who moves bytes goes on"
    assert door.is_hung_up_on(idle) and not door.is_hung_up_on(busy)
