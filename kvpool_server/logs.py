"""The server's log stream: lines for people, or JSON from the first line to the last.

The format is known before the settings are: what is wrong with them is to be said in it.
"""

from __future__ import annotations

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

from kvpool_server import stray_lines

END_S = 2.0
_SHARED: list[Any] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,
]

log = structlog.get_logger()


def wants_json(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """What --log-format will be: flag > environment > file. False where nobody can tell."""
    wanted = _flag(arguments, "--log-format") or environ.get("KVPOOL_LOG_FORMAT")
    file = _flag(arguments, "--config") or environ.get("KVPOOL_CONFIG")
    if not wanted and file:
        with contextlib.suppress(OSError, ValueError):
            wanted = tomllib.loads(Path(file).read_text()).get("log_format")
    return wanted == "json"


def _flag(arguments: Sequence[str], name: str) -> str | None:
    """The value that is in force: the last."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        if argument == name:
            found = following
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """Everything that is written to standard error meanwhile is JSON, line by line, whoever writes it."""
    stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    reading, writing = os.pipe()
    filtered = subprocess.Popen(
        [sys.executable, "-I", "-S", stray_lines.__file__],
        stdin=reading,
        stdout=stream.fileno(),
        stderr=stream.fileno(),
    )
    os.close(reading)
    sys.stderr.flush()
    os.dup2(writing, sys.stderr.fileno())
    os.close(writing)
    _route_python_to(stream)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stream.fileno(), sys.stderr.fileno())
        # The filter goes on for as long as a process has the pipe, and one may outlive the server.
        with contextlib.suppress(subprocess.TimeoutExpired):
            filtered.wait(END_S)


def _route_python_to(stream: TextIO) -> None:
    """Has Python's loggers, warnings and tracebacks write whole records to a stream."""
    renderer = structlog.processors.JSONRenderer()
    structlog.configure(processors=[*_SHARED, renderer], logger_factory=structlog.PrintLoggerFactory(stream))
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_SHARED],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: log.critical("the server ends with an error", exc_info=error)
    threading.excepthook = lambda failed: log.error(
        "a thread ended with an error",
        thread=failed.thread and failed.thread.name,
        exc_info=(failed.exc_type, failed.exc_value, failed.exc_traceback),
    )


def configure(log_format: str, level: str) -> None:
    """One line per event that matters, on stderr. After `json_lines` where the format is json."""
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        structlog.configure(processors=[*_SHARED, renderer], logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())))
