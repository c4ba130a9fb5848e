"""What passes on the wire between a client and a server."""

from __future__ import annotations

import socket
import socketserver
import threading

TIMEOUT_S = 10.0
POLL_S = 0.01


class Recorder(socketserver.ThreadingTCPServer):
    """A proxy that keeps every byte that passes, and may change one.

    Args:
        target: HOST:PORT of the server.
        flip_at: whether the byte to change is one from the client, and its number among those; None: no byte changes.

    Attributes:
        endpoint: its own.
        seen: the bytes, of both directions.
    """

    daemon_threads = True

    def __init__(self, target: str, flip_at: tuple[bool, int] | None = None):
        host, _, port = target.rpartition(":")
        seen = self.seen = bytearray()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection((host, int(port)), TIMEOUT_S) as onward:
                    back = threading.Thread(target=self._pass, args=(onward, self.request, False))
                    back.start()
                    self._pass(self.request, onward, True)
                    back.join(TIMEOUT_S)

            def _pass(self, source: socket.socket, sink: socket.socket, is_client: bool) -> None:
                passed = 0
                try:
                    while piece := bytearray(source.recv(1 << 16)):
                        at = flip_at[1] - passed if flip_at is not None and flip_at[0] == is_client else -1
                        if 0 <= at < len(piece):
                            piece[at] ^= 0x10
                        passed += len(piece)
                        seen.extend(piece)
                        sink.sendall(piece)
                    sink.shutdown(socket.SHUT_WR)
                except OSError:
                    pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()
