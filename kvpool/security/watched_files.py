"""Files that are read again when they change, so that nothing restarts for a new certificate or token."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvpool.protocol.errors import ConfigError

LOOK_EVERY_S = 5.0

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class WatchedFiles(Generic[Value]):
    """What some files say, which may be replaced at any time. Thread-safe.

    While what they hold cannot be used (half of a pair is replaced, say), the last good value stays in force, and one
    warning says why.

    Args:
        read: reads the files. Raises ConfigError if they cannot be used; so does the constructor.
        when_read: called with None after the first reading, after each that changes the value, and after the first that
            succeeds again; called with the error after each that fails.

    Attributes:
        paths: of the files.
        value: what is in force.
        version: how often it has changed.
        is_refused: whether the files as they are now cannot be used, so that `value` is what they held before.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[], Value],
        clock: Callable[[], float] = time.monotonic,
        when_read: Callable[[ConfigError | None], None] = lambda _: None,
    ):
        self.paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._when_read = when_read
        self._lock = threading.Lock()
        self._seen: tuple[tuple[int, ...] | None, ...] | None = self._stamps()
        self.value = read()
        self.version = 0
        self.is_refused = False
        self._look_at = clock() + LOOK_EVERY_S
        when_read(None)

    def look(self, *, at_once: bool = False) -> int:
        """Reads the files again if they have changed, every `LOOK_EVERY_S` or `at_once`; returns the version."""
        if self._clock() < self._look_at and not at_once:
            return self.version
        with self._lock:
            self._look_at = self._clock() + LOOK_EVERY_S
            if (seen := self._stamps()) == self._seen:
                return self.version
            self._seen = seen
            try:
                value = self._read()
            except ConfigError as error:
                log.warning("new files cannot be used, and what they held before stays in force: %s", error)
                self.is_refused = True
                self._when_read(error)
                return self.version
            except Exception:
                self.is_refused = True
                self._seen = None  # The next look reads again.
                raise
            was_refused, self.is_refused = self.is_refused, False
            is_new = value != self.value
            if is_new:
                self.value = value
                self.version += 1
            if is_new or was_refused:
                log.info("read again: %s", ", ".join(self.paths))
                self._when_read(None)
            return self.version

    def _stamps(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stamp, self.paths))


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file is replaced or written, or gets another mode or owner; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode, found.st_uid
