"""The page as the HTTP port serves it: the answer to each path, and the hour of samples that its charts draw.

Threads of the HTTP port call `answer`; the samples belong to the event loop.
The page's files are a fixed table, read once. No request names a path of the file system.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from kvpool.protocol.messages import fields_of
from kvpool.protocol.reports import Cause
from kvpool.protocol.text import escaped
from kvpool.report.judgements import INCOMPLETE, RECENT_S, Level, judgements, problems, window_of
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.observability.http import Response, on_loop
from kvpool_server.process.logs import LogEvent, LogEvents

log = structlog.get_logger()

INTERVAL_S = 10
"""Between two samples."""
KEPT_S = 3_600
"""Age of the oldest sample."""
OF_POOL = ("arena_bytes", "free_bytes")
COUNTERS = ("lookups", "lookup_hits", "evicted_blocks", "quota_evicted_blocks")
OF_USAGE = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "saved_seconds", "lost_seconds")
"""Summed over models and tenants."""
MAX_TEXT_CHARS = 200
"""Of a text in a message."""
MAX_CHECK_CHARS = 60
"""Of the name of a check, which may contain that of a tier."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of each answer."""
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
NAMES = (
    "index.html", "page.css", "page.js", "panels.js", "charts.js", "chart.js", "samples.js", "format.js", "source.js",
    "uPlot/uPlot.iife.min.js", "uPlot/uPlot.min.css",
)  # fmt: skip
"""What is served of `kvpool_server/observability/static`: index.html at /, the others under /page/."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of one time.

    Args:
        counters: a snapshot of the pool's and the tiers' counters alone.
        drawn: what `drawn` returns, as JSON.
    """

    at: float  # Monotonic seconds.
    counters: pb.StatsResponse
    drawn: bytes


class Samples:
    """The samples of the last `KEPT_S`, which the charts draw. Belongs to the event loop.

    Args:
        clock: monotonic seconds.
        unix_time: seconds since 1970, read once, so that a step of the host's clock does not disorder the samples.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time):
        self._clock = clock
        self._offset = unix_time() - clock()
        self._kept: deque[Sample] = deque(maxlen=KEPT_S // INTERVAL_S + 1)

    def make(self, stats: pb.StatsResponse) -> Sample:
        """A sample of a snapshot that was taken now."""
        at = self._clock()
        counters = pb.StatsResponse(boot_token=stats.boot_token, counters=stats.counters, tiers=stats.tiers)
        return Sample(at, counters, encoded(drawn(stats, at + self._offset)))

    def add(self, stats: pb.StatsResponse) -> None:
        """Keeps a sample of a snapshot, in place of the oldest sample if there are too many."""
        self._kept.append(self.make(stats))

    def kept(self) -> list[Sample]:
        """Oldest first."""
        return list(self._kept)

    def before(self, seconds: float) -> pb.StatsResponse | None:
        """The counters of the newest sample that is at least this old, or of the oldest one; None without samples."""
        latest = self._clock() - seconds
        old = [sample for sample in self._kept if sample.at <= latest]
        return (old[-1] if old else self._kept[0]).counters if self._kept else None


class Site:
    """The page of one server. Let `run` run in the background.

    Args:
        loop: calls `state` (as /healthz tells it), `stats` and `value`.
        events: the last warnings and errors of the log.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: Callable[[], str],
        stats: Callable[[], pb.StatsResponse],
        value: Callable[[], pb.ValueResponse],
        events: LogEvents,
    ):
        self._state = state
        self._stats = stats
        self._events = events
        self._samples = Samples()
        self._look = on_loop(loop, self._look_on_loop)
        self._kept = on_loop(loop, self._samples.kept)
        self._value = on_loop(loop, value)
        self._files = read_static_files()
        self._numbers = {"/api/v1/now": self._now, "/api/v1/history": self._history, "/api/v1/value": self._value_now}

    async def run(self) -> None:
        """Takes a sample every `INTERVAL_S`, until cancelled."""
        while True:
            try:
                self._samples.add(self._stats())
            except Exception:
                log.exception("sampling the server's numbers for the page failed")
            await asyncio.sleep(INTERVAL_S)

    def answer(self, path: str, check: Callable[[], None]) -> Response | None:
        """The answer to a GET; None for a path that is not the page's: see `Pages`.

        Raises TimeoutError if the server's loop does not answer.
        """
        if (file := self._files.get(path)) is not None:
            return file
        if (numbers := self._numbers.get(path)) is None:
            return None
        check()
        return Response(200, numbers(), "application/json", HEADERS)

    def _look_on_loop(self) -> tuple[str, pb.StatsResponse, Sample, pb.StatsResponse | None]:
        stats = self._stats()
        return self._state(), stats, self._samples.make(stats), self._samples.before(RECENT_S)

    def _now(self) -> bytes:
        state, stats, sample, before = self._look()
        return now_document(state, stats, sample.drawn, before, self._events.latest())

    def _history(self) -> bytes:
        return b'{"samples":[' + b",".join(sample.drawn for sample in self._kept()) + b"]}"

    def _value_now(self) -> bytes:
        return encoded(fields_of(self._value(), shown))


def read_static_files() -> dict[str, Response]:
    """The files by the path of their URL, as HTTP sends them."""
    root = importlib.resources.files("kvpool_server.observability") / "static"
    files = {}
    for name in NAMES:
        path = "/" if name == "index.html" else f"/page/{name}"
        body = root.joinpath(*name.split("/")).read_bytes()
        files[path] = Response(200, body, _TYPES[name.rpartition(".")[2]], HEADERS)
    return files


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON, which has no NaN."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def drawn(stats: pb.StatsResponse, unix_seconds: float) -> dict[str, Any]:
    """The numbers of a snapshot that the charts draw: gauges, and counters since the server's start."""
    server = stats.server
    lookups = (each.buckets for each in server.rpcs if (each.method, each.status) == ("Lookup", "OK"))
    return {
        "boot": f"{stats.boot_token:016x}",  # A text: JavaScript's numbers have too few digits.
        "time": round(unix_seconds, 3),
        **{name: getattr(stats, name) for name in OF_POOL},
        **{name: stats.counters.get(name, 0) for name in COUNTERS},
        **{name: sum(getattr(used, name) for used in server.usage) for name in OF_USAGE},
        "promoted_blocks": {shown(tier.name): tier.counters.get("promoted_blocks", 0) for tier in stats.tiers},
        "lookup_buckets": list(next(lookups, ())),
        "loop_lag_p50_seconds": server.loop_lag_p50_seconds,
        "loop_lag_p99_seconds": server.loop_lag_p99_seconds or None,  # Not known yet.
    }


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
    """How the server is now: `findings` of it, what the charts draw of it (`sample`), and events of the log."""
    document = {
        "state": state,
        "findings": findings(state, stats, before),
        "log": [
            {
                "time": round(event.at, 3),
                "level": event.level,
                "text": event.text,
                "fields": dict(event.fields),
                "count": event.count,
            }
            for event in events
        ],
        "causes": {cause.label: cause.gloss for cause in Cause},
        "stats": fields_of(stats, shown),
    }
    return encoded(document)[:-1] + b',"sample":' + sample + b"}"
