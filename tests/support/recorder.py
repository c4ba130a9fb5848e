"""What passes on the wire between a client and a server."""

from __future__ import annotations

import socket
import socketserver
import threading

TIMEOUT_S = 10.0


class Recorder(socketserver.ThreadingTCPServer):
    """A proxy that keeps every byte that passes.

    Args:
        target: HOST:PORT of the server.

    Attributes:
        endpoint: its own.
        seen: the bytes, of both directions.
    """

    daemon_threads = True

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        seen = self.seen = bytearray()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection((host, int(port)), TIMEOUT_S) as onward:
                    back = threading.Thread(target=self._pass, args=(onward, self.request))
                    back.start()
                    self._pass(self.request, onward)
                    back.join(TIMEOUT_S)

            def _pass(self, source: socket.socket, sink: socket.socket) -> None:
                try:
                    while piece := source.recv(1 << 16):
                        seen.extend(piece)
                        sink.sendall(piece)
                    sink.shutdown(socket.SHUT_WR)
                except OSError:
                    pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()
