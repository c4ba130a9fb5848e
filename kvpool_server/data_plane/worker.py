"""A data worker: `python -m kvpool_server.data_plane.worker`, started by the server and by nobody else.

It maps the arena and accepts connections on a socket that the server opened, a thread each: what they do is done by the
kernel, without the interpreter's lock. Settings, the key among them, come as one line of JSON on standard input, which
stays open as long as the server lives: a worker ends with it, at once, whatever it was doing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

import numpy as np

from kvpool.data_port import MAGIC, NO_ROOM, Signer
from kvpool.segment import Segment
from kvpool.types import SegmentInfo
from kvpool_server.data_plane.connection import Connection

MAX_CONNECTIONS = 256
ACCEPT_AGAIN_S = 0.1
TALLY_COLUMNS = 2
"""Payload bytes read, and written."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is told.

    Args:
        listen_fd: of the listening socket.
        tally_fd: of the memory where bytes are counted: uint64 [workers, TALLY_COLUMNS].
        row: this worker's in it.
        key: of permits.
        nonce: of greetings.
    """

    path: str
    nbytes: int
    segment_nonce: bytes
    listen_fd: int
    tally_fd: int
    row: int
    key: bytes
    nonce: bytes

    def encode(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self), default=bytes.hex).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Order:
        fields = json.loads(line)
        secret = {name: bytes.fromhex(fields[name]) for name in ("segment_nonce", "key", "nonce")}
        return cls(**{**fields, **secret})


class Worker:
    """Serves connections of one listening socket.

    Args:
        arena: all of it, writable.
        tally: uint64 [TALLY_COLUMNS], of this worker alone.
        max_connections: at once; whoever comes then is told that there is no room.
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
        self._watermark = threading.BoundedSemaphore(max_connections)

    def serve(self) -> None:
        """Returns when the listening socket is closed."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(ACCEPT_AGAIN_S)  # Too many files are open, or the client has gone already.
                continue
            if self._watermark.acquire(blocking=False):
                try:
                    threading.Thread(target=self._converse, args=(client,), name="kvpool-data", daemon=True).start()
                    continue
                except RuntimeError:  # No memory for a thread: those that are there go on.
                    self._watermark.release()
            with client:
                client.setblocking(False)
                _try_to_say(client, MAGIC + NO_ROOM)

    def _converse(self, client: socket.socket) -> None:
        try:
            with client:
                Connection(client, self._arena, self._signer, self._nonce, self._count).serve()
        finally:
            self._watermark.release()

    def _count(self, is_write: bool, nbytes: int) -> None:
        with self._counting:
            self._tally[int(is_write)] += np.uint64(nbytes)


def _try_to_say(client: socket.socket, words: bytes) -> None:
    try:
        client.send(words)
    except OSError:
        pass


def _end_with_the_server() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


def main() -> None:
    """Serves until the server has gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # The server gets them, too, and drains.
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    threading.Thread(target=_end_with_the_server, name="kvpool-end", daemon=True).start()
    order = Order.decode(line)
    segment = Segment.attach(SegmentInfo(order.path, order.nbytes, order.segment_nonce, order.nbytes))
    tallies = np.frombuffer(mmap.mmap(order.tally_fd, 0), np.uint64).reshape(-1, TALLY_COLUMNS)
    worker = Worker(
        socket.socket(fileno=order.listen_fd), segment.bytes.data, order.key, order.nonce, tallies[order.row]
    )
    with contextlib.suppress(BrokenPipeError):  # The server has gone, and this process goes in a moment.
        os.write(sys.stdout.fileno(), b"ready\n")
    segment.map_ahead()
    worker.serve()


if __name__ == "__main__":
    main()
