"""A circuit breaker: decides when to stop calling the pool, and when to probe it again. It makes no calls itself.

States, and what a caller of the pool sees:

- closed: calls go through.
- open: no call is made. The breaker begins open: a pool is used once it has answered a probe.
- half-open: no call is made yet, but a probe is under way in the background.

  closed -> open       the pool is unreachable or breaks the protocol, or `FAILURES_TO_OPEN` calls of one kind failed
                       in a row
  open -> half-open    the wait is over
  half-open -> closed  the probe found a pool that answers in time
  half-open -> open    the probe failed: the wait doubles, up to `MAX_RETRY_S`

After opening the breaker waits `FIRST_WAIT_S`. Where calls failed, the wait is twice as long each time that the breaker
had not been closed for `STABLE_S` before, up to `MAX_FLAP_WAIT_S`: a pool that answers probes and fails calls is tried
about once a minute, at the price of `FAILURES_TO_OPEN` calls. A pool that is unreachable costs no call, however often
it restarts, and is probed every `MAX_RETRY_S`.

Why no library: pybreaker 1.4 and purgatory 3.0 probe with a caller's own request and wait a fixed time; pybreaker holds
a lock throughout each call, purgatory holds none. Only the counter would be left of them.

Not thread-safe: the session holds a lock.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable

from kvpool.protocol.errors import (
    ChecksumError,
    DrainingError,
    InvalidReplyError,
    KVPoolError,
    LeaseExpiredError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
    UnknownNamespaceError,
)

FAILURES_TO_OPEN = 3
FIRST_WAIT_S = 0.25
MAX_RETRY_S = 5.0
MAX_FLAP_WAIT_S = 60.0
STABLE_S = 60.0

_GONE = (UnavailableError, UnknownNamespaceError)
_USELESS = (PoolTimeoutError, ChecksumError, LeaseExpiredError, TransferError, InvalidReplyError)


class State(enum.Enum):
    """Whether calls go through, and whether a probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of one session.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.state = State.OPEN
        self._failures: dict[str, int] = {}
        self._closed_at = -math.inf
        self._flap_wait_s = FIRST_WAIT_S
        self._retry_wait_s = 0.0
        self._probe_at = clock()

    def succeeded(self, call: str) -> None:
        """A call succeeded. A load proves lookup, transfer and checksum; any other call proves only itself."""
        if call == "load":
            self._failures.clear()
        else:
            self._failures.pop(call, None)

    def failed(self, call: str, error: KVPoolError) -> bool:
        """A call failed; True if that opens the breaker.

        Errors that say nothing about the next call (a full pool, a malformed request) do not count. A call that began
        earlier may fail when the breaker is open already, which changes nothing. A draining server's refusal of a
        lookup opens the breaker. Its refusal of a store does not: loads under leases of before still succeed.

        Args:
            call: the kind of call: "lookup", "load" …; failures are counted by kind, so that stores that succeed cannot
                hide loads that always fail.
        """
        if self.state is not State.CLOSED:
            return False
        if isinstance(error, _USELESS):
            self._failures[call] = self._failures.get(call, 0) + 1
            # A server that breaks the protocol once has another release, or another mind.
            if self._failures[call] < FAILURES_TO_OPEN and not isinstance(error, InvalidReplyError):
                return False
        elif not isinstance(error, _GONE) or (isinstance(error, DrainingError) and call != "lookup"):
            return False
        now = self._clock()
        wait_s = FIRST_WAIT_S
        if isinstance(error, _USELESS):
            was_stable = now - self._closed_at >= STABLE_S
            self._flap_wait_s = FIRST_WAIT_S if was_stable else min(2 * self._flap_wait_s, MAX_FLAP_WAIT_S)
            wait_s = self._flap_wait_s
        self._retry_wait_s = min(wait_s, MAX_RETRY_S)
        self.state = State.OPEN
        self._probe_at = now + wait_s
        return True

    def renew(self) -> None:
        """Calls go to another namespace from now on: the breaker begins anew, with a probe at once."""
        self.state = State.OPEN
        self._failures.clear()
        self._probe_at = self._clock()

    def wait_s(self) -> float | None:
        """Seconds until the next probe is due; None while the breaker is closed."""
        return None if self.state is State.CLOSED else max(0.0, self._probe_at - self._clock())

    def probe_began(self) -> None:
        assert self.state is State.OPEN, self.state
        self.state = State.HALF_OPEN

    def probe_ended(self, succeeded: bool) -> None:
        assert self.state is State.HALF_OPEN, self.state
        now = self._clock()
        if succeeded:
            self.state = State.CLOSED
            self._closed_at = now
            self._failures.clear()
        else:
            self.state = State.OPEN
            self._retry_wait_s = min(max(2 * self._retry_wait_s, FIRST_WAIT_S), MAX_RETRY_S)
            self._probe_at = now + self._retry_wait_s
