"""Whether a tier is worth asking: one that fails, or does not answer, is left alone for a while, longer each time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import structlog

log = structlog.get_logger()

AWAY_S = (1.0, 30.0)
"""How long after its first failure in a row, and after many."""

MAX_DOUBLINGS = 10

ANSWER_S = 10.0
"""A call that takes longer has failed for those who wait. It may go on; until it ends, the tier is away."""


class Health:
    """Of one tier. Belongs to the event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self._name = name
        self._clock = clock
        self._calls: dict[int, float] = {}
        self._num_calls = 0
        self._failures = 0
        self._back_at = 0.0
        self._is_late = False

    @property
    def up(self) -> bool:
        """Ask it, or leave it alone?"""
        now = self._clock()
        calls = list(self._calls.values())  # A scrape asks from another thread.
        is_late = any(now - began_at > ANSWER_S for began_at in calls)
        if is_late and not self._is_late:
            log.error("a tier does not answer and is left alone", tier=self._name, seconds=ANSWER_S)
        self._is_late = is_late
        return not is_late and now >= self._back_at

    @property
    def works(self) -> bool:
        """Did it do so when it was last asked?"""
        return self.up and not self._failures

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call: knows how long it takes. What it raises is a failure, and passes."""
        self._num_calls += 1
        nth = self._num_calls
        self._calls[nth] = self._clock()
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise
        else:
            if self._failures:
                log.info("a tier works again", tier=self._name)
            self._failures = 0
        finally:
            del self._calls[nth]

    def _failed(self, error: Exception) -> None:
        away_s = min(AWAY_S[0] * 2 ** min(self._failures, MAX_DOUBLINGS), AWAY_S[1])
        self._failures += 1
        self._back_at = self._clock() + away_s
        log.error("a tier has failed and is left alone", tier=self._name, error=str(error), seconds=away_s)
