"""The operator's HTTP port: /metrics for Prometheus, /healthz for probes.

Threads serve the requests, and the event loop owns the pool. So the threads ask the loop for the pool's numbers, with a
deadline: a loop that has stopped is reported, and holds up no scrape.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

LOOP_TIMEOUT_S = 2.0
SERVING = "ok"
TEXT = "text/plain"

Value = TypeVar("Value")


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


class OperatorHttp:
    """Listens and serves once it is made, on the bound `port`. Raises OSError if it cannot listen.

    Args:
        registry: its collectors may raise TimeoutError, which becomes status 503.
        health: called by the threads: `SERVING`, or why the server does not serve, which becomes status 503.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], str]):
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                try:
                    status, text, content_type = self._route()
                except TimeoutError:
                    status, content_type = 503, TEXT
                    text = f"the server's event loop did not answer within {LOOP_TIMEOUT_S} s\n"
                # Outside the try: a client that reads too slowly is no fault of the loop, and gets no second answer.
                self._answer(status, text, content_type)

            def _route(self) -> tuple[int, str, str]:
                if self.path == "/metrics":
                    return 200, generate_latest(registry).decode(), CONTENT_TYPE_LATEST
                if self.path == "/healthz":
                    state = health()
                    return 200 if state == SERVING else 503, f"{state}\n", TEXT
                return 404, "try /metrics or /healthz\n", TEXT

            def _answer(self, status: int, text: str, content_type: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes and probes are not logged."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Server((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvpool-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
