"""The server's log: lines for people, or JSON from the first line to the last.

The format is read before the settings are resolved, so that errors in the settings have the right format, too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import structlog

from kvpool.protocol.text import escaped
from kvpool_server.process import stray_lines
from kvpool_server.process.log_events import LogEvents

END_S = 2.0
_SHARED: list[Any] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,
]

log = structlog.get_logger()


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


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """While the body runs, every line on standard error is JSON, also from libraries and child processes."""
    stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    sys.stderr.flush()
    filtered = subprocess.Popen(
        [sys.executable, "-I", "-S", stray_lines.__file__], stdin=subprocess.PIPE, stdout=stream, stderr=stream
    )
    assert filtered.stdin is not None
    with filtered.stdin as pipe:
        os.dup2(pipe.fileno(), sys.stderr.fileno())
    _route_python_to(stream)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stream.fileno(), sys.stderr.fileno())
        # The filter runs until every process has closed the pipe, and a child may outlive the server.
        with contextlib.suppress(subprocess.TimeoutExpired):
            filtered.wait(END_S)


def _route_python_to(stream: TextIO) -> None:
    """Sends Python's log records, warnings and tracebacks to a stream, each as one line."""
    _log_to(stream, structlog.processors.JSONRenderer())
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


def _log_to(stream: TextIO, *renderers: structlog.types.Processor) -> None:
    """Has structlog and Python's own loggers write to a stream with the same renderers."""
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
    """Sets format and level of the log on stderr. For JSON, call it within `json_lines`.

    Args:
        events: keeps the last warnings and errors.
    """
    if log_format == "console":
        _log_to(sys.stderr, _escape, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    if events is not None:
        structlog.configure(processors=[events.record, *structlog.get_config()["processors"]])
        logging.getLogger().addHandler(events)
    logging.getLogger("kvpool").setLevel(level.upper())  # The client's library, which reads credentials for the server.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())))
