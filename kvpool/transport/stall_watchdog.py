"""How long a reader waits for the next bytes: with a deadline alone, one that stands still would wait for all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StallWatchdog:
    """Ends a call that brings nothing for too long. A context manager; the time between two waits does not count.

    Args:
        limit_s: of one wait.
        give_up: ends the call; from another thread, at most a quarter of the limit late.

    Attributes:
        lost: whether it was ended.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], object]):
        self._limit_s = limit_s
        self._give_up = give_up
        self._waiting_since = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvpool-watchdog", daemon=True)
        self.lost = False

    def __enter__(self) -> StallWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def wait(self) -> None:
        """A wait begins."""
        self._waiting_since = time.monotonic()

    def came(self) -> None:
        """It is over."""
        self._waiting_since = 0.0

    def _watch(self) -> None:
        while not self._done.wait(self._limit_s / 4):
            since = self._waiting_since
            if since and time.monotonic() - since > self._limit_s:
                self.lost = True
                self._give_up()
                return
