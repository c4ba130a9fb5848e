"""The server's log: lines for people, or JSON from its first line to its last.

The format is read before the settings are resolved, so that errors in the settings have the right format, too.

The dashboard shows the last warnings and errors: few, short, and without secrets. What a log line says goes to people
who may read the server's files; the dashboard goes to callers over the network. So an event is shown without file
paths, and without anything that looks like a token, a key or a digest.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import select
import sys
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import structlog

from kvpool.protocol.text import escaped

log = structlog.get_logger()

_SHARED: list[Any] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,
]
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


def wants_json(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether --log-format will be json: flag > environment > file. False if the settings cannot be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-format", nargs="?")
    parser.add_argument("--config", nargs="?")
    flags, _ = parser.parse_known_args(arguments)
    wanted = flags.log_format or environ.get("KVPOOL_LOG_FORMAT")
    file = flags.config or environ.get("KVPOOL_CONFIG")
    if not wanted and file:
        with contextlib.suppress(OSError, ValueError):
            wanted = tomllib.loads(Path(file).read_text()).get("log_format")
    return wanted == "json"


def log_as_json() -> None:
    """Sends Python's log records, warnings and tracebacks to standard error, each as one line of JSON."""
    _log_to_stderr(structlog.processors.JSONRenderer())
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: log.critical("the server ended with an error", exc_info=error)
    threading.excepthook = lambda failed: log.error(
        "a thread ended with an error",
        thread=failed.thread and failed.thread.name,
        exc_info=(failed.exc_type, failed.exc_value, failed.exc_traceback),
    )


def _escape(_: Any, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Escapes what would move the cursor or begin a line: clients choose names, and texts of errors have them.

    The lines of a traceback stay, indented: none begins as a line of the log does.
    """
    for name, value in event.items():
        if isinstance(value, str):
            lines = value.splitlines() if name == "exception" else [value]
            event[name] = "\n  ".join(escaped(line, len(line)) for line in lines)
    return event


class Lossy:
    """A stream that loses what cannot be written at once: no call fails or waits for a full disk or a pipe's reader."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if select.select([], [self._stream], [], 0)[1]:
                self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _log_to_stderr(*renderers: structlog.types.Processor) -> None:
    """Has structlog and Python's own loggers write with the same renderers."""
    stream: Any = Lossy(sys.stderr)
    structlog.configure(processors=[*_SHARED, *renderers], logger_factory=structlog.PrintLoggerFactory(stream))
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_SHARED],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.getLogger().addHandler(handler)


def configure(log_format: str, level: str, events: LogEvents | None = None) -> None:
    """Sets format and level of the log on stderr. For JSON, call `log_as_json` first.

    `events` keeps the last warnings and errors.
    """
    if log_format == "console":
        _log_to_stderr(_escape, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    if events is not None:
        structlog.configure(processors=[events.record, *structlog.get_config()["processors"]])
        logging.getLogger().addHandler(events)
    logging.getLogger("kvpool").setLevel(level.upper())  # The client's library, which reads credentials for the server.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())))


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
    """The last `MAX_EVENTS`, as a handler of Python's loggers; `record` is a processor of structlog. Thread-safe."""

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
            if self._events and replace(self._events[-1], at=new.at, count=1) == new:
                new = replace(new, count=self._events.pop().count + 1)
            self._events.append(new)

    def latest(self) -> list[LogEvent]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._events))
