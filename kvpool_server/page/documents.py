"""The JSON that the page reads; docs/how-to/page.md describes it. Threads of the HTTP port make it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from kvpool import wire
from kvpool.doctor.finding import Level, problems
from kvpool.doctor.judgements import judgements
from kvpool.doctor.pool_state import INCOMPLETE
from kvpool.doctor.window import RECENT_S, window_of
from kvpool.holdings import escaped
from kvpool.types import PoolStats
from kvpool_server.log_events import LogEvent

MAX_TEXT_CHARS = 200
"""Of a text in a message."""
MAX_CHECK_CHARS = 60
"""Of the name of a check, which may contain that of a tier."""


def fields_of(message: Message) -> dict[str, Any]:
    """The fields of a message by name, those with default values too, for JSON.

    `MessageToDict` would make texts of 64-bit numbers, and would escape no names.
    """
    time.sleep(0)  # Lets the event loop have the interpreter, which a thread may keep for 5 ms otherwise.
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            found[field.name] = {escaped(name, MAX_TEXT_CHARS): _plain(each) for name, each in value.items()}
        elif isinstance(value, Message | str | bytes | int | float):
            found[field.name] = _plain(value)
        else:
            found[field.name] = [_plain(each) for each in value]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return fields_of(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str):
        return escaped(value, MAX_TEXT_CHARS)
    return value if math.isfinite(value) else None


def findings(state: str, stats: PoolStats, before: PoolStats | None) -> list[dict[str, str]]:
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
    state: str, stats: PoolStats, sample: bytes, before: PoolStats | None, events: list[LogEvent]
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
        "stats": fields_of(wire.encode_stats(stats, stats.boot_token)),
    }
    return encoded(document)[:-1] + b',"sample":' + sample + b"}"


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON, which has no NaN."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
