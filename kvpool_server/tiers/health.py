"""Whether calls are sent to a tier: after a failure, or without an answer, none are for a while, longer each time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import structlog

log = structlog.get_logger()

AWAY_S = (1.0, 30.0)
"""How long no calls are sent after a failure: the first in a row, and the longest. Each failure doubles it."""

MAX_DOUBLINGS = 10

ANSWER_S = 10.0
"""Deadline of a call for those that wait for it. The call may go on; until it ends, the tier is unavailable."""


class Health:
    """Health of one tier. Belongs to the event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self._name = name
        self._clock = clock
        self._calls: dict[int, float] = {}
        """When each call under way began."""
        self._last_id = 0
        self._failures = 0
        self._back_at = 0.0

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def is_available(self) -> bool:
        """True if calls may be sent to the tier now."""
        now = self._clock()
        return now >= self._back_at and not any(now - began_at > ANSWER_S for began_at in self._calls.values())

    @property
    def is_working(self) -> bool:
        """True if the tier is available and its last call succeeded."""
        return self.is_available and not self._failures

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call to the tier: an exception is a failure, and propagates."""
        self._last_id = call_id = self._last_id + 1
        self._calls[call_id] = self._clock()
        late = asyncio.get_running_loop().call_later(ANSWER_S, self._report_late, call_id)
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise
        else:
            if self._failures:
                log.info("a tier works again", tier=self._name)
            self._failures = 0
        finally:
            late.cancel()
            del self._calls[call_id]

    def _report_late(self, call_id: int) -> None:
        if call_id == next(iter(self._calls)):  # Calls that began later hang with the first, and are not reported.
            log.error("a tier does not answer and gets no calls until it does", tier=self._name, seconds=ANSWER_S)

    def _fail(self, error: Exception) -> None:
        away_s = min(AWAY_S[0] * 2 ** min(self._failures, MAX_DOUBLINGS), AWAY_S[1])
        self._failures += 1
        self._back_at = self._clock() + away_s
        log.error("a tier has failed and gets no calls for a while", tier=self._name, error=str(error), seconds=away_s)
