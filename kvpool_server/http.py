"""The operator's HTTP port: /metrics for Prometheus, /healthz for probes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


class OperatorHttp:
    """Serves in a thread of its own, so that a scrape never waits for the event loop, nor it for a scrape.

    Args:
        healthy: what /healthz answers: 200 "ok" or 503 "draining".
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, healthy: Callable[[], bool]):
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/healthz":
                    self._answer(*((200, "text/plain", b"ok\n") if healthy() else (503, "text/plain", b"draining\n")))
                else:
                    self._answer(404, "text/plain", b"try /metrics or /healthz\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes are no events."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvpool-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
