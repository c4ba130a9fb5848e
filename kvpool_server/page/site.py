"""The dashboard as the HTTP port serves it: which path has which answer. Its threads call `answer`."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import parse_qsl

import structlog

from kvpool.errors import InvalidRequestError
from kvpool.value import ValueReport
from kvpool_server.cache.steps import Steps
from kvpool_server.history import INTERVAL_S, SPANS, History
from kvpool_server.http import LOOP_TIMEOUT_S, Request, Response, awaited_on_loop, on_loop
from kvpool_server.page.documents import encoded, history_document, moment, now_document, value_document
from kvpool_server.page.instruments import Instruments, sample
from kvpool_server.page.static_files import StaticFile, read_static_files
from kvpool_server.turns import Turns

log = structlog.get_logger()

MIN_GZIP_BYTES = 1_000
MAX_QUERY_CHARS = 200
GZIP_LEVEL = 1
"""Of answers that are made for each request."""
JSON = "application/json"
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
}
"""Of each answer."""
_STATIC = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding"}  # A browser asks whether its copy is still good.
_DATA = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}


class Site:
    """The dashboard of one server. Let `run` run in the background."""

    def __init__(
        self,
        instruments: Instruments,
        history: History,
        turns: Turns,
        loop: asyncio.AbstractEventLoop,
        value: Callable[[], Steps[ValueReport]],
    ):
        self._instruments = instruments
        self._history = history
        self._turns = turns
        self._loop = loop
        self._value = value
        self._files = read_static_files()
        self._answering = threading.Lock()

    async def run(self) -> None:
        """Samples the server's numbers every `INTERVAL_S`, until cancelled."""
        while True:
            try:
                self._history.record(await self._turns.run(sample(self._instruments)))
            except Exception:
                log.exception("sampling the server's numbers for the dashboard failed")
            await asyncio.sleep(INTERVAL_S)

    def answer(self, request: Request, check: Callable[[], None]) -> Response | None:
        """The answer to a GET; None for a path that is not the dashboard's.

        Args:
            check: raises UnauthenticatedError and PermissionDeniedError for a client that may not read numbers.

        Raises TimeoutError if the server's loop does not answer.
        """
        if (file := self._files.get(request.path)) is not None:
            return _of_file(file, request)
        if request.path not in ("/api/v1/now", "/api/v1/history", "/api/v1/value"):
            return None
        check()
        try:
            if request.path == "/api/v1/now":
                _query(request.query, ())
                body = self._now()
            elif request.path == "/api/v1/value":
                _query(request.query, ())
                body = self._value_now()
            else:
                body = self._part(*_span_and_since(request.query))
        except InvalidRequestError as error:
            return Response(400, json.dumps({"error": str(error)}).encode(), JSON, HEADERS | _DATA)
        return _compressed(body, request)

    def _now(self) -> bytes:
        ask = awaited_on_loop(self._loop, lambda: self._turns.run(moment(self._instruments, self._history)))
        with self._one_answer():
            return encoded(now_document(ask()))

    def _value_now(self) -> bytes:
        ask = awaited_on_loop(self._loop, lambda: self._turns.run(self._value()))
        with self._one_answer():
            return encoded(value_document(ask()))

    def _part(self, span: str, since: float) -> bytes:
        with self._one_answer():
            return encoded(history_document(on_loop(self._loop, lambda: self._history.part(span, since))()))

    @contextlib.contextmanager
    def _one_answer(self) -> Iterator[None]:
        """One answer is made at a time: threads that encode take turns with the loop at the interpreter."""
        if not self._answering.acquire(timeout=LOOP_TIMEOUT_S):
            raise TimeoutError
        try:
            yield
        finally:
            self._answering.release()


def _of_file(file: StaticFile, request: Request) -> Response:
    headers = HEADERS | _STATIC | {"ETag": file.etag}
    if file.etag in [tag.strip().removeprefix("W/") for tag in request.if_none_match.split(",")]:
        return Response(304, b"", "", headers)
    if request.accepts_gzip:
        return Response(200, file.gzipped, file.content_type, headers | {"Content-Encoding": "gzip"})
    return Response(200, file.body, file.content_type, headers)


def _compressed(body: bytes, request: Request) -> Response:
    headers = HEADERS | _DATA
    if request.accepts_gzip and len(body) >= MIN_GZIP_BYTES:
        return Response(200, gzip.compress(body, GZIP_LEVEL), JSON, headers | {"Content-Encoding": "gzip"})
    return Response(200, body, JSON, headers)


def _span_and_since(query: str) -> tuple[str, float]:
    """What a query asks of the history. Raises InvalidRequestError."""
    given = _query(query, ("span", "since"))
    span, text = given.get("span", "1h"), given.get("since", "0")
    if span not in SPANS:
        raise InvalidRequestError(f"span {span[:20]!r} is unknown; give {', '.join(SPANS)}")
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if not 0 <= since < 1e12:
        raise InvalidRequestError(f"since {text[:20]!r} is no time; give seconds since 1970, such as 1700000000")
    return span, since


def _query(query: str, names: Sequence[str]) -> dict[str, str]:
    """The parameters of a query. Raises InvalidRequestError unless each is known, and given once."""
    if len(query) > MAX_QUERY_CHARS:
        raise InvalidRequestError(f"the query has {len(query)} characters; give at most {MAX_QUERY_CHARS}")
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs):
        raise InvalidRequestError("a parameter of the query is given twice; give it once")
    for name in given:
        if name not in names:
            raise InvalidRequestError(f"parameter {name[:20]!r} is unknown; give {' and '.join(names) or 'none'}")
    return given
