"""What goes wrong outside the engine: stopped servers, memory that changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from kvpool.client.client import Client
from kvpool.protocol.offers import Offer
from kvpool.protocol.types import TOKEN_BYTES
from kvpool.protocol.wire import decode_offer
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


def offer_elsewhere(client: Client) -> Offer:
    """What a server offers to a client that does not share its network namespace."""
    offer = decode_offer(client.rpc.ping())
    assert offer.segment is not None
    return replace(offer, segment=replace(offer.segment, token=bytes(TOKEN_BYTES)))


def flip_arena(server: ServerProcess) -> None:
    """Inverts every byte that the server holds."""
    path = arena_file(server.pid)
    arena = np.memmap(path, np.uint8, "r+", shape=(path.stat().st_size - TRAILER_BYTES,))
    np.invert(arena, out=arena)
