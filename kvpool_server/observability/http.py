"""The operator's HTTP port: /metrics for Prometheus, /healthz for probes, the dashboard for people.

Threads serve the requests, and the event loop owns the pool. So the threads ask the loop for the pool's numbers, with a
deadline: a loop that has stopped is reported, and holds up no scrape.

With TLS, /metrics and the dashboard's numbers are for authenticated clients that may read them. /healthz answers every
client: a kubelet has no certificate, and learns one word. So do the dashboard's own files, which tell nothing. Without
TLS a request's Host header must name this server: else a web page could read the port by its visitors' browsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BufferedReader
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvpool.protocol.errors import PermissionDeniedError, UnauthenticatedError
from kvpool.protocol.text import escaped
from kvpool_server.process.addresses import is_own_name

LOOP_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 16
"""Connections at once; a further one closes the oldest of the host that has most."""
MAX_THREADS = 2 * MAX_CONNECTIONS
"""Connections with those whose threads are about to end; a further one is closed unanswered."""
CONNECTION_S = 5.0
"""How long one connection may last."""
CLOSE_EVERY_S = 0.25
MAX_REQUEST_BYTES = 64 << 10
"""Of one request's line and headers together."""
MAX_PATH_CHARS = 60
"""Of a path that is named in errors and in the audit log."""
STARTING, SERVING, DRAINING = "starting", "ok", "draining"

Value = TypeVar("Value")
Gate = Callable[[str, str, bytes | None, Sequence[str]], None]
"""Called with the path of numbers, as it may be logged, a client's address, its certificate (DER) and its Authorization
headers. Raises UnauthenticatedError and PermissionDeniedError for those who may not read the numbers."""
METHODS = "GET, HEAD"


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; `headers` are those beside the body's."""

    status: int
    body: bytes
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


Pages = Callable[[str, Callable[[], None]], Response | None]
"""Further paths of the port, as they were sent before the first "?", for the threads: the answer, or None for an
unknown path. It calls its second argument before it tells numbers, which raises as a Gate."""


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], Value]) -> Callable[[], Value]:
    """A function for other threads that calls `function` on the loop; TimeoutError after `LOOP_TIMEOUT_S`."""

    async def call() -> Value:
        return function()

    def called() -> Value:
        future = asyncio.run_coroutine_threadsafe(call(), loop)
        try:
            return future.result(LOOP_TIMEOUT_S)
        finally:
            future.cancel()

    return called


class OperatorHttp(ThreadingHTTPServer):
    """Listens and serves once it is made, on the bound `port`. Raises OSError if it cannot listen.

    Whoever reaches the port may connect and say nothing. So each connection, which has a thread, has a deadline; when
    there are too many, the oldest of the host with most is closed, and scrapes and probes of other hosts are answered.

    Args:
        registry: its collectors may raise TimeoutError, which becomes status 503.
        health: called by the threads: `SERVING`, or why the server does not serve, which becomes status 503.
        tls: the context of a new connection; None: plaintext.
        gate: who may read /metrics; None: everybody.
        pages: further paths; None: there are none.
        names: that requests in plaintext may give this server, besides those of `is_own_name`.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        health: Callable[[], str],
        tls: Callable[[], ssl.SSLContext] | None = None,
        gate: Gate | None = None,
        pages: Pages | None = None,
        names: Collection[str] = (),
    ):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry, self.health = registry, health
        self.tls, self.gate, self.names = tls, gate, names
        self.pages: Pages = pages or (lambda path, check: None)
        self.answering = threading.Lock()
        self._lock = threading.Lock()
        # The oldest first -> its host and its deadline; until its thread ends.
        self._open: dict[socket.socket, tuple[str, float]] = {}
        super().__init__((host, port), _Handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(
            target=self.serve_forever, args=(CLOSE_EVERY_S,), name="kvpool-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Blocks for up to half a second."""
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=5)

    def get_request(self) -> tuple[socket.socket, Any]:
        plain, address = super().get_request()
        if self.tls is None:
            return plain, address
        return self.tls().wrap_socket(plain, server_side=True, do_handshake_on_connect=False), address

    def finish_request(self, request: Any, client_address: Any) -> None:
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(CONNECTION_S)
            request.do_handshake()
        super().finish_request(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_refused = len(self._open) >= MAX_THREADS
            hosts = Counter(host for host, _ in self._open.values())
            busiest = sorted(self._open, key=lambda connection: -hosts[self._open[connection][0]])
            for connection in busiest[: max(0, len(self._open) - MAX_CONNECTIONS + 1)]:
                _close(connection)
            if not is_refused:
                self._open[request] = (client_address[0], time.monotonic() + CONNECTION_S)
        if is_refused:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def service_actions(self) -> None:
        """Closes connections whose time is over; called every `CLOSE_EVERY_S`, and after each connection."""
        now = time.monotonic()
        with self._lock:
            for connection, (_, deadline) in self._open.items():
                if deadline > now:
                    break
                _close(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or is hung up on, is not reported."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _close(connection: socket.socket) -> None:
    """Ends what its thread reads or writes; the thread then closes it."""
    with contextlib.suppress(OSError):
        # Not the method of an SSLSocket, which first has the socket's other users go on in plaintext.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Head:
    """What a client sends before its body, of which `http.server` bounds each line, and not their sum."""

    def __init__(self, file: BufferedIOBase):
        self._file, self._left = file, MAX_REQUEST_BYTES
        self.close = file.close

    def readline(self, most: int) -> bytes:
        """A line, or a part of one. Raises HTTPException, which becomes status 431, if there is too much."""
        if not self._left:
            raise HTTPException(f"more than {MAX_REQUEST_BYTES} bytes")
        line = self._file.readline(min(most, self._left))
        self._left -= len(line)
        return line


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    timeout = CONNECTION_S
    server: OperatorHttp

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("BufferedReader", _Head(self.rfile))

    def parse_request(self) -> bool:
        """Whether the request can be served; answers it otherwise."""
        if not super().parse_request():
            return False
        hosts = [] if self.server.tls is not None else self.headers.get_all("Host", [])
        foreign = [escaped(each, MAX_PATH_CHARS) for each in hosts if not is_own_name(each, self.server.names)]
        if foreign:
            ways = "its IP address, host name or NAME.NAMESPACE.svc, or a name that --http-listen has"
            self._answer(Response(421, f"{foreign[0]} is no name of this server; use {ways}\n".encode()))
        return not foreign

    def do_GET(self) -> None:
        try:
            with contextlib.ExitStack() as self._held:
                response = self._route(self.path.partition("?")[0])
        except TimeoutError:
            response = Response(503, f"the server's event loop did not answer within {LOOP_TIMEOUT_S} s\n".encode())
        except UnauthenticatedError as error:
            response = Response(401, f"{error}\n".encode(), headers={"WWW-Authenticate": "Bearer"})
        except PermissionDeniedError as error:
            response = Response(403, f"{error}\n".encode())
        # Outside the try: a client that reads too slowly is no fault of the loop, and gets no second answer.
        self._answer(response)

    def do_HEAD(self) -> None:
        self.do_GET()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """The handler of any other method."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return lambda: self._answer(Response(405, f"use {METHODS}\n".encode(), headers={"Allow": METHODS}))

    def _route(self, path: str) -> Response:
        if path == "/metrics":
            self._check()
            return Response(200, generate_latest(self.server.registry), CONTENT_TYPE_LATEST)
        if path == "/healthz":
            state = self.server.health()
            return Response(200 if state == SERVING else 503, f"{state}\n".encode())
        return self.server.pages(path, self._check) or Response(404, b"try /, /metrics or /healthz\n")

    def _check(self) -> None:
        """Returns when it is the turn of the request, whose answer has numbers.

        One such answer is made at a time: threads that encode take turns with the loop at the interpreter.

        Raises UnauthenticatedError and PermissionDeniedError for a client that may not read numbers.
        """
        if (gate := self.server.gate) is not None:
            is_tls = isinstance(self.connection, ssl.SSLSocket)
            certificate = self.connection.getpeercert(binary_form=True) if is_tls else None
            path = escaped(self.path.partition("?")[0], MAX_PATH_CHARS)
            gate(path, self.client_address[0], certificate, self.headers.get_all("Authorization", []))
        if not self.server.answering.acquire(timeout=LOOP_TIMEOUT_S):
            raise TimeoutError
        self._held.callback(self.server.answering.release)

    def _answer(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes and probes are not logged."""
