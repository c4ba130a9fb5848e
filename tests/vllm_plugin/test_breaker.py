"""Every transition of the breaker, and how long it waits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.protocol.errors import (
    ChecksumError,
    ConfigError,
    IncompatibleNamespaceError,
    InvalidReplyError,
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    OutOfSpaceError,
    PermissionDeniedError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
    UnknownNamespaceError,
)
from tests.support.clock import FakeClock
from vllm_plugin.session import (
    FAILURES_TO_OPEN,
    FIRST_WAIT_S,
    MAX_FLAP_WAIT_S,
    MAX_RETRY_S,
    STABLE_S,
    Breaker,
    State,
)

LATE = PoolTimeoutError("late")
GONE = UnavailableError("gone")
OPEN_AT_ONCE = (GONE, UnknownNamespaceError("restarted"), InvalidReplyError("nonsense"))
OPEN_IN_A_ROW = (LATE, ChecksumError("bad"), LeaseExpiredError("late"), TransferError("cut"))
NO_FAULT = (
    OutOfSpaceError("full"),
    ConfigError("wrong"),
    InvalidRequestError("odd"),
    IncompatibleNamespaceError("other"),
    PermissionDeniedError("no"),
)


def closed(clock: FakeClock) -> Breaker:
    breaker = Breaker(clock)
    probe(breaker, clock, True)
    return breaker


def probe(breaker: Breaker, clock: FakeClock, succeeded: bool) -> float:
    """Waits for the next probe and has it; returns how long the wait was."""
    wait_s = breaker.wait_s()
    assert wait_s is not None
    clock.advance(wait_s)
    breaker.probe_began()
    breaker.probe_ended(succeeded)
    return wait_s


def open_by(breaker: Breaker, error: KVPoolError = LATE, call: str = "load") -> None:
    while breaker.state is State.CLOSED:
        breaker.failed(call, error)


def test_probes_that_fail_come_ever_more_rarely_up_to_a_bound() -> None:
    clock = FakeClock()
    breaker = closed(clock)
    clock.advance(STABLE_S)
    open_by(breaker)
    waits_s = [probe(breaker, clock, False) for _ in range(10)]
    assert waits_s[0] == FIRST_WAIT_S
    assert all(later == min(2 * earlier, MAX_RETRY_S) for earlier, later in pairwise(waits_s))
    assert waits_s[-1] == MAX_RETRY_S
    probe(breaker, clock, True)
    assert breaker.state is State.CLOSED


@pytest.mark.parametrize("error", [ChecksumError("bad"), InvalidReplyError("nonsense")])
def test_flapping_is_tried_ever_more_rarely_up_to_a_bound_and_forgiven_after_a_quiet_while(error: KVPoolError) -> None:
    clock = FakeClock()
    breaker = closed(clock)
    clock.advance(STABLE_S)
    waits_s = []
    for _ in range(12):
        open_by(breaker, error)
        waits_s.append(probe(breaker, clock, True))
        clock.advance(STABLE_S / 2)
    assert waits_s[0] == FIRST_WAIT_S
    assert all(later == min(2 * earlier, MAX_FLAP_WAIT_S) for earlier, later in pairwise(waits_s))
    assert waits_s[-1] == MAX_FLAP_WAIT_S
    clock.advance(STABLE_S / 2)
    open_by(breaker)
    assert probe(breaker, clock, True) == FIRST_WAIT_S


def test_a_pool_that_restarts_is_found_again_at_once_and_one_that_flapped_as_often_as_any_once_it_went_away() -> None:
    clock = FakeClock()
    breaker = closed(clock)
    for _ in range(12):
        open_by(breaker, GONE)
        assert probe(breaker, clock, True) == FIRST_WAIT_S
    for _ in range(12):
        open_by(breaker)
        probe(breaker, clock, True)
    open_by(breaker)
    assert probe(breaker, clock, False) == MAX_FLAP_WAIT_S
    assert probe(breaker, clock, False) == MAX_RETRY_S


class Machine(RuleBasedStateMachine):
    """Whatever happens: closed calls, open waits a bounded time, and at most three failed calls of a kind in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.breaker = Breaker(self.clock)
        assert self.breaker.state is State.OPEN and self.breaker.wait_s() == 0
        self.rows: dict[str, int] = {}

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(
        call=st.sampled_from(["lookup", "load", "store"]),
        error=st.sampled_from([*OPEN_AT_ONCE, *OPEN_IN_A_ROW, *NO_FAULT, None, None, None]),
    )
    def call_ends(self, call: str, error: KVPoolError | None) -> None:
        was = self.breaker.state
        if error is None:
            self.breaker.succeeded(call)
            if call == "load":
                self.rows.clear()
            else:
                self.rows.pop(call, None)
            assert self.breaker.state is was
            return
        opened = self.breaker.failed(call, error)
        if was is not State.CLOSED:
            assert not opened and self.breaker.state is was
        elif error not in NO_FAULT:
            self.rows[call] = self.rows.get(call, 0) + (math.inf if error in OPEN_AT_ONCE else 1)  # type: ignore[assignment]
            assert opened == (self.rows[call] >= FAILURES_TO_OPEN)
        else:
            assert not opened
        if opened:
            self.rows.clear()

    @precondition(lambda self: self.breaker.state is State.OPEN)
    @rule()
    def probe_begins(self) -> None:
        self.breaker.probe_began()

    @precondition(lambda self: self.breaker.state is State.HALF_OPEN)
    @rule(succeeded=st.booleans())
    def probe_ends(self, succeeded: bool) -> None:
        self.breaker.probe_ended(succeeded)
        assert self.breaker.state is (State.CLOSED if succeeded else State.OPEN)
        self.rows.clear()

    @invariant()
    def the_wait_is_bounded(self) -> None:
        wait_s = self.breaker.wait_s()
        assert (wait_s is None) == (self.breaker.state is State.CLOSED)
        assert wait_s is None or 0 <= wait_s <= MAX_FLAP_WAIT_S


TestMachine = Machine.TestCase
