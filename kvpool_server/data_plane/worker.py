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
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.data_port import MAGIC, NO_ROOM, Signer
from kvpool.segment import Segment
from kvpool_server.child_process import exit_with_server, receive_settings
from kvpool_server.data_plane.connection import Connection

MAX_CONNECTIONS = 256
ACCEPT_AGAIN_S = 0.1
TALLY_COLUMNS = 2
"""Payload bytes read, and written."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the server tells a worker at its start.

    Args:
        segment_fd, nbytes: of the arena's segment.
        listen_fd: descriptor of the listening socket.
        tally_fd: descriptor of the memory where payload bytes are counted: uint64 [workers, TALLY_COLUMNS].
        row: this worker's row in that memory.
        key: signs permits.
        nonce: sent in greetings; names this boot of the server.
    """

    segment_fd: int
    nbytes: int
    listen_fd: int
    tally_fd: int
    row: int
    key: bytes
    nonce: bytes

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> WorkerSettings:
        """The settings as a worker receives them: bytes as hex."""
        decoded = {name: bytes.fromhex(fields[name]) for name in ("key", "nonce")}
        return cls(**{**fields, **decoded})


class DataWorker:
    """Serves connections of one listening socket.

    Args:
        arena: all of the arena, writable.
        tally: uint64 [TALLY_COLUMNS], written by this worker alone.
        max_connections: served at once; a client beyond that is refused with `NO_ROOM`.
    """

    def __init__(
        self,
        listener: socket.socket,
        arena: memoryview,
        key: bytes,
        nonce: bytes,
        tally: np.ndarray[tuple[int], np.dtype[np.uint64]],
        max_connections: int = MAX_CONNECTIONS,
    ):
        self._listener = listener
        self._arena = arena
        self._signer = Signer(key)
        self._nonce = nonce
        self._tally = tally
        self._counting = threading.Lock()
        self._free_connections = threading.BoundedSemaphore(max_connections)

    def serve(self) -> None:
        """Returns when the listening socket is closed."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(ACCEPT_AGAIN_S)  # Too many open files, or the client has disconnected already.
                continue
            if self._free_connections.acquire(blocking=False):
                try:
                    threading.Thread(target=self._serve_client, args=(client,), name="kvpool-data", daemon=True).start()
                    continue
                except RuntimeError:  # No memory for another thread: the connections that exist go on.
                    self._free_connections.release()
            with client:
                client.setblocking(False)
                with contextlib.suppress(OSError):
                    client.send(MAGIC + NO_ROOM)

    def _serve_client(self, client: socket.socket) -> None:
        try:
            with client:
                Connection(client, self._arena, self._signer, self._nonce, self._count).serve()
        finally:
            self._free_connections.release()

    def _count(self, is_write: bool, nbytes: int) -> None:
        with self._counting:
            self._tally[int(is_write)] += np.uint64(nbytes)


def main() -> None:
    """Serves until the server ends."""
    settings = WorkerSettings.from_json(receive_settings())
    exit_with_server()
    segment = Segment(settings.segment_fd, settings.nbytes)
    tallies = np.frombuffer(mmap.mmap(settings.tally_fd, 0), np.uint64).reshape(-1, TALLY_COLUMNS)
    listener = socket.socket(fileno=settings.listen_fd)
    worker = DataWorker(listener, segment.bytes.data, settings.key, settings.nonce, tallies[settings.row])
    with contextlib.suppress(BrokenPipeError):  # The server has ended, and this process ends in a moment.
        os.write(sys.stdout.fileno(), b"ready\n")
    segment.map_ahead()
    worker.serve()


if __name__ == "__main__":
    main()
