"""A data worker: `python -m kvpool_server.data_plane.worker`, started by `workers.py` alone.

A worker maps the arena and accepts connections on a socket that the server has opened. Each connection has a thread:
the kernel copies the bytes, without the interpreter's lock. A worker ends with its server (`child_process.py`), at
once, whatever it was doing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time

import numpy as np

from kvpool.transport.child_process import exit_with_parent, receive_settings
from kvpool.transport.data_port import MAGIC, NO_ROOM, Signer
from kvpool.transport.sealed_socket import RANDOM_BYTES
from kvpool.transport.segment import Segment
from kvpool_server.data_plane.admission import MAX_SEATS, Seat
from kvpool_server.data_plane.connection import TALLY_COLUMNS, Connection, DataPort
from kvpool_server.data_plane.permits import map_words

ACCEPT_AGAIN_S = 0.1


def serve(listener: socket.socket, port: DataPort) -> None:
    """Serves the connections of a listening socket, a thread each; returns when the socket is closed."""
    while True:
        try:
            client, address = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            time.sleep(ACCEPT_AGAIN_S)  # Too many open files, or the client has disconnected already.
            continue
        seat = port.admission.admit(client, address[0])
        if seat is not None:
            try:
                threading.Thread(target=_serve_client, args=(seat, port), name="kvpool-data", daemon=True).start()
                continue
            except RuntimeError:  # No memory for another thread: the connections that exist go on.
                port.admission.leave(seat)
        with client:
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.send(MAGIC + NO_ROOM + bytes(RANDOM_BYTES * port.sealed))


def _serve_client(seat: Seat, port: DataPort) -> None:
    with seat.client:
        try:
            Connection(seat, port).serve()
        finally:
            port.admission.leave(seat)


def main() -> None:
    """Serves until the server ends."""
    settings = receive_settings()
    exit_with_parent()
    segment = Segment(settings["segment_fd"], settings["nbytes"])
    row = settings["row"]
    port = DataPort(
        segment.bytes.data,
        Signer(bytes.fromhex(settings["key"])),
        bytes.fromhex(settings["nonce"]),
        np.frombuffer(mmap.mmap(settings["tally_fd"], 0), np.uint64).reshape(-1, TALLY_COLUMNS)[row],
        map_words(settings["entries_fd"], writable=False),
        map_words(settings["words_fd"], writable=True)[row * MAX_SEATS : (row + 1) * MAX_SEATS],
        settings["sealed"],
    )
    listener = socket.socket(fileno=settings["listen_fd"])
    with contextlib.suppress(BrokenPipeError):  # The server has ended, and this process ends in a moment.
        os.write(sys.stdout.fileno(), b"ready\n")
    segment.map_ahead()
    serve(listener, port)


if __name__ == "__main__":
    main()
