"""One read over the connections to a data port; see `TcpTransfer`."""

from __future__ import annotations

from collections import deque

from kvpool.transport.base import Sink, Transfer
from kvpool.transport.helpers import Helpers
from kvpool.transport.staging import Staging
from kvpool.transport.tcp_connection import Connection
from kvpool.transport.tcp_connections import ConnectionPool
from kvpool.transport.tcp_transfer import Batch, Move, TcpTransfer


class TcpRead(TcpTransfer):
    """One read."""

    def __init__(self, transfer: Transfer, sink: Sink, connections: ConnectionPool, helpers: Helpers):
        super().__init__(transfer, sink.rows, connections, helpers, False)
        self._sink = sink
        self._num_freed = 0
        self._draining: deque[Batch] = deque()

    def run(self, staging: Staging) -> None:
        if not self._batches:
            return
        with self._buffered(staging):
            self._run(self._lead, self._follow)
            self._finish_draining()

    def _lead(self, connection: Connection) -> None:
        requested: deque[Move] = deque()
        for batch in self._batches:
            if not self._has_room(batch):
                self._finish_draining()
            while batch.parts_left:
                self._request(connection, requested)
                if requested and self._has_room(requested[0][1]):
                    self._receive(connection, requested.popleft())
                elif not self._wait(lambda: not batch.parts_left or (requested and self._has_room(requested[0][1]))):  # noqa: B023
                    return
            self._check_deadline()
            if self._rows is None:
                self._drain(batch)

    def _follow(self, connection: Connection) -> None:
        requested: deque[Move] = deque()
        while True:
            self._request(connection, requested)
            if not requested or not self._wait(lambda: self._has_room(requested[0][1])):
                return
            self._receive(connection, requested.popleft())

    def _has_room(self, batch: Batch) -> bool:
        """Whether a batch has a buffer, or can have one: batches before it must not lack it."""
        return self._rows is not None or batch.nth < self._num_freed + self._num_buffers

    def _request(self, connection: Connection, requested: deque[Move]) -> None:
        """Requests parts ahead; the last parts are left to connections that have none."""
        while connection.in_flight < self._ahead:
            with self._changed:
                if self._is_ending or not self._moves:
                    return
                if connection.in_flight and len(self._moves) <= self._num_helpers:
                    return
                requested.append(self._moves.popleft())
            connection.request(requested[-1][0])

    def _receive(self, connection: Connection, move: Move) -> None:
        part, batch = move
        with self._changed:
            if self._rows is None and batch.buffer is None:
                batch.buffer = self._buffers.pop()
        connection.receive(self._views(part, batch))
        self._sink.sum(part.first, self._regions(part, batch))
        with self._changed:
            batch.parts_left -= 1
            if not batch.parts_left:
                self._changed.notify_all()

    def _drain(self, batch: Batch) -> None:
        assert self._sink.drain is not None
        batch.wait = self._sink.drain(batch.start, self._in_rows(batch))
        self._draining.append(batch)
        self._finish_draining(keep=0 if batch.wait is None else 1)

    def _finish_draining(self, keep: int = 0) -> None:
        """Waits for the drains that still read their buffers, but for the last `keep`."""
        while len(self._draining) > keep:
            batch = self._draining.popleft()
            wait, batch.wait = batch.wait, None
            if wait is not None:
                wait()
            with self._changed:
                self._num_freed += 1
                self._free(batch)
