"""What goes wrong outside the engine: stopped servers, memory that changes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvpool.segment import PREFIX, TRAILER_BYTES
from tests.support.processes import ServerProcess


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """The server's process is there and does nothing: no answer, no closed connection."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def flip_arena(server: ServerProcess, shm_dir: str) -> None:
    """Inverts every byte that the server holds."""
    (path,) = Path(shm_dir).glob(f"{PREFIX}{server.pid}-*")
    arena = np.memmap(path, np.uint8, "r+", shape=(path.stat().st_size - TRAILER_BYTES,))
    np.invert(arena, out=arena)


def free_endpoint() -> str:
    """HOST:PORT that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
