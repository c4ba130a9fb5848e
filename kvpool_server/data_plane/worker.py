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

from kvpool.transport.child_process import exit_with_parent, receive_settings
from kvpool.transport.data_port import MAGIC, NO_ROOM, Signer
from kvpool.transport.sealed_socket import RANDOM_BYTES
from kvpool.transport.segment import Segment
from kvpool_server.data_plane.admission import MAX_SEATS, Admission, Seat
from kvpool_server.data_plane.connection import Connection
from kvpool_server.data_plane.permits import TransferWord, map_words

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
        entries_fd: descriptor of the table of live tickets and leases, see `permits.py`.
        words_fd: descriptor of the words that announce transfers: uint64 [workers, MAX_SEATS].
        row: this worker's row in tally and words.
        key: signs permits.
        nonce: sent in greetings; names this boot of the server.
        sealed: whether connections are.
    """

    segment_fd: int
    nbytes: int
    listen_fd: int
    tally_fd: int
    entries_fd: int
    words_fd: int
    row: int
    key: bytes
    nonce: bytes
    sealed: bool

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
        entries: the table of live tickets and leases, see `PermitTable`.
        words: uint64 [MAX_SEATS], written by this worker alone.
        admission: which connections are served; others are refused with `NO_ROOM`.
        sealed: whether connections are.
    """

    def __init__(
        self,
        listener: socket.socket,
        arena: memoryview,
        key: bytes,
        nonce: bytes,
        tally: np.ndarray[tuple[int], np.dtype[np.uint64]],
        entries: memoryview,
        words: memoryview,
        admission: Admission | None = None,
        *,
        sealed: bool = False,
    ):
        self._listener = listener
        self._arena = arena
        self._signer = Signer(key)
        self._nonce = nonce
        self._tally = tally
        self._counting = threading.Lock()
        self._entries = entries
        self._words = words
        self._admission = admission or Admission()
        self._sealed = sealed

    def serve(self) -> None:
        """Returns when the listening socket is closed."""
        while True:
            try:
                client, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(ACCEPT_AGAIN_S)  # Too many open files, or the client has disconnected already.
                continue
            seat = self._admission.admit(client, address[0])
            if seat is not None:
                try:
                    threading.Thread(target=self._serve_client, args=(seat,), name="kvpool-data", daemon=True).start()
                    continue
                except RuntimeError:  # No memory for another thread: the connections that exist go on.
                    self._admission.leave(seat)
            with client:
                client.setblocking(False)
                with contextlib.suppress(OSError):
                    client.send(MAGIC + NO_ROOM + bytes(RANDOM_BYTES * self._sealed))

    def _serve_client(self, seat: Seat) -> None:
        word = TransferWord(self._entries, self._words[seat.number : seat.number + 1])
        with seat.client:
            try:
                Connection(
                    seat,
                    self._admission,
                    word,
                    self._arena,
                    self._signer,
                    self._nonce,
                    self._count,
                    sealed=self._sealed,
                ).serve()
            finally:
                self._admission.leave(seat)

    def _count(self, is_write: bool, nbytes: int) -> None:
        with self._counting:
            self._tally[int(is_write)] += np.uint64(nbytes)


def main() -> None:
    """Serves until the server ends."""
    settings = WorkerSettings.from_json(receive_settings())
    exit_with_parent()
    segment = Segment(settings.segment_fd, settings.nbytes)
    tallies = np.frombuffer(mmap.mmap(settings.tally_fd, 0), np.uint64).reshape(-1, TALLY_COLUMNS)
    listener = socket.socket(fileno=settings.listen_fd)
    entries = map_words(settings.entries_fd, writable=False)
    words = map_words(settings.words_fd, writable=True)[settings.row * MAX_SEATS : (settings.row + 1) * MAX_SEATS]
    worker = DataWorker(
        listener,
        segment.bytes.data,
        settings.key,
        settings.nonce,
        tallies[settings.row],
        entries,
        words,
        sealed=settings.sealed,
    )
    with contextlib.suppress(BrokenPipeError):  # The server has ended, and this process ends in a moment.
        os.write(sys.stdout.fileno(), b"ready\n")
    segment.map_ahead()
    worker.serve()


if __name__ == "__main__":
    main()
