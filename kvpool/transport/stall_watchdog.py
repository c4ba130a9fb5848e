"""Ends a read whose peer sends nothing for too long; a deadline alone would let a stalled read wait until it passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StallWatchdog:
    """Watches the waits of one call. A context manager; time outside of `waiting` does not count.

    Args:
        limit_s: longest wait.
        cancel: ends the call. Called on the watchdog's thread, at most a quarter of the limit late.

    Attributes:
        has_stalled: whether a wait was longer, so that the call was cancelled.
    """

    def __init__(self, limit_s: float, cancel: Callable[[], object]):
        self._limit_s = limit_s
        self._cancel = cancel
        self._waiting_since = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvpool-watchdog", daemon=True)
        self.has_stalled = False

    def __enter__(self) -> StallWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around one wait for the peer."""
        self._waiting_since = time.monotonic()
        yield
        self._waiting_since = 0.0

    def _watch(self) -> None:
        while not self._done.wait(self._limit_s / 4):
            since = self._waiting_since
            if since and time.monotonic() - since > self._limit_s:
                self.has_stalled = True
                self._cancel()
                return
