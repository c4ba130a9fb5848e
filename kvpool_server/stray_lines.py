"""Makes JSON of whatever else is written to the server's standard error, for logs that are to be JSON line by line.

gRPC, Mooncake, the C library and the server's other processes write there past every logger of Python. A process of its
own reads what they write: it also tells of the last words of a server that aborts, and no writer that keeps Python's
lock can wait for it. Run as a script, without site-packages: it is to start fast, and to be small.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from datetime import UTC, datetime

_GLOG = re.compile(r"([IWEF])\d{4} ")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}


def as_json(line: bytes) -> str:
    """A line as one of JSON: itself if it is an object already; empty if it says nothing."""
    text = line.decode(errors="replace").strip()
    if text.startswith("{"):
        try:
            json.loads(text)
        except ValueError:
            pass
        else:
            return text
    if not text:
        return ""
    glog = _GLOG.match(text)
    level = _LEVELS[glog[1]] if glog else "warning"
    stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": text, "logger": "stderr", "level": level, "timestamp": stamp})


def main() -> None:
    """Copies standard input to standard output until every writer has gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # The server gets them, too, and has yet to say how it ends.
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        if said := as_json(line):
            sys.stdout.write(said + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
