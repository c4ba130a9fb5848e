"""The event loop of the server, with a mend for gRPC's.

gRPC's thread writes a byte to a socket for each event, and the loop's reader takes one byte, then handles all events.
So behind a burst bytes are left, and while they fill the socket (some 300 bytes) the thread waits: the loop then gets
one event a pass, and a small call takes as many passes as there were events before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any

MAX_BYTES = 64 << 10


class EventLoop(asyncio.SelectorEventLoop):
    """Empties the socket of gRPC's events before they are handled."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As asyncio's."""
        events = getattr(getattr(callback, "func", None), "__self__", None)
        if type(events).__module__.startswith("grpc."):
            callback = functools.partial(_handle, fd, callback)
        super().add_reader(fd, callback, *args)


def _handle(events: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
    """Leaves one byte, which `handle` takes. An event that comes later has a byte of its own."""
    with contextlib.suppress(BlockingIOError):
        count = len(events.recv(MAX_BYTES, socket.MSG_PEEK))
        if count > 1:
            events.recv(count - 1)
    handle(*args)
