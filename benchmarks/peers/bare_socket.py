"""What one TCP connection can do at all: bytes from one buffer into another, in another process.

No protocol but a header, nothing allocated, nothing summed. `python -m benchmarks.peers.bare_socket PORT MEMORY_BYTES
[HOST]` is the other process. The messages of a batch lie one behind the other in its memory, which begins anew where
it is too small for the batch: memory of one message stays in the other process's cache.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

from benchmarks.harness.measuring import process, wait_until
from benchmarks.harness.traffic import Bytes
from testbed.ports import free_port

DEADLINE_S = 60.0
LOOPBACK = "127.0.0.1"
_HEADER = struct.Struct("<cQQ")
_PUT, _GET, _DONE = b"p", b"g", b"."


class BareSocket:
    """A client of the bare server."""

    def __init__(self, port: int, host: str = LOOPBACK):
        self._socket = socket.create_connection((host, port), timeout=DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, source: Bytes) -> None:
        """Sends uint8 [count, message_bytes], message by message, until the other side has all of it."""
        self._socket.sendall(_HEADER.pack(_PUT, *source.shape))
        for message in source:
            self._socket.sendall(message)
        assert self._socket.recv(1) == _DONE, "the bare server went away"

    def get(self, sink: Bytes) -> None:
        """Receives uint8 [count, message_bytes], message by message."""
        self._socket.sendall(_HEADER.pack(_GET, *sink.shape))
        for message in sink:
            _receive(self._socket, memoryview(message))

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def bare_socket(memory_bytes: int) -> Iterator[BareSocket]:
    """A server with so much memory in another process, and a client of it here, for messages of up to as many bytes."""
    port = free_port()
    with process([sys.executable, "-m", "benchmarks.peers.bare_socket", str(port), str(memory_bytes)]) as running:
        assert running.stdout is not None
        said = running.stdout
        wait_until(lambda: said.readline() == "ready\n", "the bare socket server", running)
        client = BareSocket(port)
        try:
            yield client
        finally:
            client.close()


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`; False at the end of the connection."""
    taken = 0
    while taken < len(into):
        if not (nbytes := connection.recv_into(into[taken:])):
            return False
        taken += nbytes
    return True


def main(arguments: Sequence[str]) -> None:
    """Serves one client until it goes."""
    port, memory_bytes = int(arguments[0]), int(arguments[1])
    host = arguments[2] if len(arguments) > 2 else LOOPBACK
    memory, header = memoryview(bytearray(b"\1" * memory_bytes)), memoryview(bytearray(_HEADER.size))
    with socket.create_server((host, port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(connection, header):
            direction, count, nbytes = _HEADER.unpack(header)
            for nth in range(count):
                at = nth % (memory_bytes // nbytes) * nbytes
                if direction == _PUT:
                    _receive(connection, memory[at : at + nbytes])
                else:
                    connection.sendall(memory[at : at + nbytes])
            if direction == _PUT:
                connection.sendall(_DONE)


if __name__ == "__main__":
    main(sys.argv[1:])
