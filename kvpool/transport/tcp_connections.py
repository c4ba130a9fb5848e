"""The connections of one transport to a server's data port."""

from __future__ import annotations

import threading

from kvpool.protocol.errors import PoolTimeoutError, TransferError
from kvpool.transport.tcp_connection import Connection, Peer

MAX_CONNECTIONS = 32
"""Of one client, for all of its callers."""


class ConnectionPool:
    """Connections to one peer, each used by one thread at a time. Thread-safe.

    Args:
        max_connections: to have at once.
    """

    def __init__(self, peer: Peer, max_connections: int = MAX_CONNECTIONS):
        self.peer = peer
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._used: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False

    def acquire(self, timeout_s: float) -> Connection:
        """A connection of the caller's own until `release`.

        Raises:
            TransferError: the pool is closed.
            PoolTimeoutError: all stay busy for `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(self._can_acquire, max(timeout_s, 0))
            if self._closed:
                raise TransferError(f"the transport to {self.peer} is closed; open the namespace again")
            if not self._can_acquire():
                raise PoolTimeoutError(
                    f"all {self._max_connections} connections to {self.peer} stayed busy for {timeout_s:.3f} s"
                )
            connection = self._idle.pop() if self._idle else Connection(self.peer)
            self._used.add(connection)
            return connection

    def release(self, connection: Connection) -> None:
        """Returns a connection."""
        with self._changed:
            self._used.discard(connection)
            connection.reuse()
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
            self._changed.notify()

    def close(self) -> None:
        """Ends transfers under way, which then fail, and closes the connections. Idempotent."""
        with self._changed:
            self._closed = True
            for connection in self._used:
                connection.hang_up()
            for connection in self._idle:
                connection.close()
            self._idle = []
            self._changed.notify_all()

    def _can_acquire(self) -> bool:
        return self._closed or bool(self._idle) or len(self._used) < self._max_connections
