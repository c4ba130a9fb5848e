"""The JSON that the page reads; docs/how-to/page.md describes it. Threads of the HTTP port make it."""

from __future__ import annotations

import json
from typing import Any

from kvpool.doctor.judgements import judgements
from kvpool.doctor.pool_state import INCOMPLETE
from kvpool.doctor.window import RECENT_S, window_of
from kvpool.protocol.messages import fields_of
from kvpool.protocol.text import escaped
from kvpool.report.finding import Level, problems
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.process.log_events import LogEvent

MAX_TEXT_CHARS = 200
"""Of a text in a message."""
MAX_CHECK_CHARS = 60
"""Of the name of a check, which may contain that of a tier."""


def shown(text: str) -> str:
    """A text of a message as the page shows it."""
    return escaped(text, MAX_TEXT_CHARS)


def findings(state: str, stats: pb.StatsResponse, before: pb.StatsResponse | None) -> list[dict[str, str]]:
    """What is wrong with a server, faults first: the problems that `kvpool stats` prints, over ten minutes.

    Args:
        state: of the server, as /healthz tells it.
        before: the counters of ten minutes ago.
    """
    found = []
    if state != "ok":
        text = f"The server is {state}: it takes no new calls, and engines compute meanwhile."
        found.append({"level": "fault", "text": text})
    for problem in problems(judgements(stats, window_of(stats, before, RECENT_S))):
        if problem.check != INCOMPLETE:  # A page asks so often that it would see blocks between the puts of two ranks.
            sentences = f"{escaped(problem.check, MAX_CHECK_CHARS)}: {problem.text}", problem.fix
            text = " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences)
            found.append({"level": "fault" if problem.level is Level.ERROR else "warning", "text": text})
    return sorted(found, key=lambda finding: finding["level"] != "fault")


def now_document(
    state: str, stats: pb.StatsResponse, sample: bytes, before: pb.StatsResponse | None, events: list[LogEvent]
) -> bytes:
    """How the server is now.

    Args:
        sample: what the charts draw of it.
        before, state: see `findings`.
        events: of the log, the newest first.
    """
    log = [
        {"time": round(event.at, 3), "level": event.level, "text": event.text, "fields": dict(event.fields),
         "count": event.count}
        for event in events
    ]  # fmt: skip
    document = {
        "state": state,
        "findings": findings(state, stats, before),
        "log": log,
        "stats": fields_of(stats, shown),
    }
    return encoded(document)[:-1] + b',"sample":' + sample + b"}"


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON, which has no NaN."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
