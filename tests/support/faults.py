"""What goes wrong outside the engine: stopped servers, memory that changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvpool.transport.segment import TRAILER_BYTES
from tests.support.memory_files import arena_file
from tests.support.processes import ServerProcess


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """The server's process is there and does nothing: no answer, no closed connection."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def flip_arena(server: ServerProcess) -> None:
    """Inverts every byte that the server holds."""
    path = arena_file(server.pid)
    arena = np.memmap(path, np.uint8, "r+", shape=(path.stat().st_size - TRAILER_BYTES,))
    np.invert(arena, out=arena)
