"""One write over the connections to a data port; see `TcpTransfer`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvpool.transport.base import Source, Transfer
from kvpool.transport.helpers import Helpers
from kvpool.transport.staging import Staging
from kvpool.transport.tcp_connection import Connection
from kvpool.transport.tcp_connections import ConnectionPool
from kvpool.transport.tcp_transfer import Batch, Move, TcpTransfer


class TcpWrite(TcpTransfer):
    """One write."""

    def __init__(self, transfer: Transfer, source: Source, connections: ConnectionPool, helpers: Helpers):
        super().__init__(transfer, source.rows, connections, helpers, True)
        self._source = source
        self._filled: deque[Move] = deque()
        self._filling = True
        self._fill_error: Exception | None = None

    def run(self, staging: Staging) -> None:
        if not self._batches:
            return
        with self._buffered(staging):
            try:
                self._run(self._lead, self._follow)
            except BaseException as error:
                if self._fill_error is not None:
                    raise error from self._fill_error
                raise
        if self._fill_error is not None:
            raise self._fill_error

    def _lead(self, connection: Connection) -> None:
        for batch in self._batches:
            if self._rows is None and not self._fill(connection, batch):
                break
            with self._changed:
                self._filled += [self._moves.popleft() for _ in range(batch.parts_left)]
                self._changed.notify_all()
            while not self._num_helpers and self._filled:  # Its bytes are in this core's cache.
                self._send(connection, self._filled.popleft())
        with self._changed:
            self._filling = False
            self._changed.notify_all()
        self._follow(connection)

    def _fill(self, connection: Connection, batch: Batch) -> bool:
        """Fills a buffer; False if the callback has raised, or the transfer ends."""
        while batch.buffer is None:
            with self._changed:
                if self._buffers:
                    batch.buffer = self._buffers.pop()
                    break
            move = self._take(lambda: self._buffers)
            if move is not None:
                self._send(connection, move)
            elif self._is_ending:
                return False
        self._check_deadline()
        assert self._source.fill is not None
        try:
            batch.wait = self._source.fill(batch.start, self._in_rows(batch))
        except Exception as error:
            self._fill_error = error
            with self._changed:
                self._filled.clear()
            return False
        self._check_deadline()
        return True

    def _follow(self, connection: Connection) -> None:
        while (move := self._take(lambda: False)) is not None:
            self._send(connection, move)
        while connection.in_flight and self._failure is None:
            connection.finish()

    def _take(self, enough: Callable[[], object]) -> Move | None:
        """The next part to send; None once there will be none, or `enough`."""
        with self._changed:
            if self._wait(lambda: self._filled or not self._filling or enough()) and self._filled and not enough():
                return self._filled.popleft()
        return None

    def _send(self, connection: Connection, move: Move) -> None:
        part, batch = move
        if batch.wait is not None:
            batch.wait()
        self._source.sum(part.first, self._regions(part, batch))
        connection.send(part, self._views(part, batch))
        with self._changed:
            batch.parts_left -= 1
            if not batch.parts_left:
                self._free(batch)
        while connection.in_flight > self._ahead:
            connection.finish()
