"""A filter that turns lines on the server's standard error into JSON, unless they are JSON already.

gRPC, Mooncake, the C library and child processes write there without Python's loggers. The filter is a process of its
own: it also reports the last lines of a server that aborts, and no thread that holds Python's lock waits for it. It is
run as a script without site-packages, to start fast and stay small.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from datetime import UTC, datetime

_GLOG = re.compile(r"([IWEF])\d{4} ")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}


def as_json(line: bytes) -> str:
    """A line as a JSON object: unchanged if it is one already; empty if the line is blank."""
    text = line.decode(errors="replace").strip()
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            json.loads(text)
            return text
    if not text:
        return ""
    glog = _GLOG.match(text)
    level = _LEVELS[glog[1]] if glog else "warning"
    stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": text, "logger": "stderr", "level": level, "timestamp": stamp})


def main() -> None:
    """Filters standard input to standard output until every writer has closed it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # The server gets them, too, and logs its stop afterwards.
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        if said := as_json(line):
            sys.stdout.write(said + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
