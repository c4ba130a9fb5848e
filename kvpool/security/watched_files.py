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
    warning says why. Such files are read at each look: the reason may have been the process, not the files.

    Args:
        read: reads the files. Raises ConfigError if they cannot be used; so does the constructor.
        when_read: called with None after the first reading, after each that changes the value, and after the first that
            succeeds again; called with the error after each that fails, once per change and reason.

    Attributes:
        paths: of the files.
        value: what is in force.
        version: how often it has changed.
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
        self._seen = self._stamps()
        self.value = read()
        self.version = 0
        self._reason = ""  # Why the files as they are now cannot be used; empty: they can.
        self._look_at = clock() + LOOK_EVERY_S
        when_read(None)

    @property
    def is_refused(self) -> bool:
        """Whether the files as they are now cannot be used, so that `value` is what they held before."""
        return bool(self._reason)

    def look(self, *, at_once: bool = False) -> int:
        """Reads files that have changed or are refused, every `LOOK_EVERY_S` or `at_once`; returns the version."""
        if self._clock() < self._look_at and not at_once:
            return self.version
        with self._lock:
            self._look_at = self._clock() + LOOK_EVERY_S
            seen, reason = self._stamps(), self._reason
            is_changed, self._seen = seen != self._seen, seen
            if not (is_changed or reason):
                return self.version
            try:
                value = self._read()
            except ConfigError as error:
                self._reason = str(error)
                if is_changed or self._reason != reason:
                    log.warning("new files cannot be used, and what they held before stays in force: %s", error)
                    self._when_read(error)
                return self.version
            except Exception as error:
                self._reason = repr(error)
                raise
            self._reason = ""
            is_new = value != self.value
            if is_new:
                self.value = value
                self.version += 1
            if is_new or reason:
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
