"""The last warnings and errors of the server's log, for the dashboard: few, short, and without secrets.

What a log line says goes to people who may read the server's files; the dashboard goes to callers over the network. So
an event is shown without file paths, and without anything that looks like a token, a key or a digest. Any thread may
log.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

MAX_EVENTS = 100
MAX_FIELDS = 8
"""Of one event; further ones are left out."""
MAX_CHARS = 300
"""Of an event's text, and of each field."""

LEVELS = {"warning": "warning", "error": "error", "exception": "error", "critical": "error"}
"""The levels that are kept, by structlog's and logging's names of them."""
_SKIPPED = {"exc_info", "stack_info", "exception", "timestamp", "level", "_record", "_from_structlog"}
_SECRETS = re.compile(r"key|token|secret|salt|password|path|file|director|seed", re.IGNORECASE)
"""Names of fields that are not shown."""
_TOKEN = re.compile(r"kvpool_[\w-]+|[A-Za-z0-9_+/=-]{24,}(?:\.[\w-]+)*")
_PATH = re.compile(r"(?<![\w.:/])~?(?:/[^\s/'\",;()\[\]]+)+/?")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event.

    Args:
        at: seconds since 1970.
        level: "warning" or "error".
        count: how often the event came in a row, the same but for its time.
    """

    at: float
    level: str
    text: str
    fields: tuple[tuple[str, str], ...]
    count: int = 1


def without_secrets(text: str) -> str:
    """The text, shortened to `MAX_CHARS`, with file paths and whatever may be a secret replaced."""
    shown = _TOKEN.sub("[secret]", _PATH.sub("[path]", text[: 4 * MAX_CHARS]))
    return shown if len(shown) <= MAX_CHARS else f"{shown[: MAX_CHARS - 1]}…"


class LogEvents(logging.Handler):
    """The last `MAX_EVENTS`, as a handler of Python's own loggers; `record` is a processor of structlog."""

    def __init__(self, clock: Callable[[], float] = time.time):
        super().__init__(logging.WARNING)
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[LogEvent] = deque(maxlen=MAX_EVENTS)

    def record(self, _: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Keeps an event of level warning or above; returns it unchanged."""
        if (level := LEVELS.get(name)) is not None:
            fields = {field: value for field, value in event.items() if field != "event"}
            self.add(level, str(event.get("event", "")), fields)
        return event

    def emit(self, record: logging.LogRecord) -> None:
        level = "warning" if record.levelno < logging.ERROR else "error"
        self.add(level, record.getMessage(), {"logger": record.name})

    def add(self, level: str, text: str, fields: Mapping[str, Any]) -> None:
        """Keeps an event. One that equals the last one raises its count."""
        shown = [(name, value) for name, value in fields.items() if not (name in _SKIPPED or _SECRETS.search(name))]
        kept = tuple((name[:40], without_secrets(str(value))) for name, value in shown[:MAX_FIELDS])
        new = LogEvent(self._clock(), level, without_secrets(text), kept)
        with self._lock:
            last = self._events[-1] if self._events else None
            if last is not None and (last.level, last.text, last.fields) == (level, new.text, kept):
                self._events[-1] = LogEvent(new.at, level, new.text, kept, last.count + 1)
            else:
                self._events.append(new)

    def latest(self) -> list[LogEvent]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._events))
