"""What a test's own connection tells of a server."""

from __future__ import annotations

import socket


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed it. Does not wait; the connection does not block afterwards."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
