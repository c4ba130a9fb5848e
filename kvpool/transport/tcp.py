"""The `tcp` transport: bytes travel over TCP connections to the server's data port, as many as pay.

`TcpWrite` and `TcpRead` are the transfers, `ConnectionPool` the connections that all transfers share, and `Movers`
the processes for transfers whose caller needs its own interpreter meanwhile.

After a client hangs up, a worker may still write bytes that were already received. So the ticket of a failed write is
revoked: the server frees its slots once the worker has left them, which is soon.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool.transport.base import Bytes, Local, Transfer
from kvpool.transport.helpers import Helpers, Staging
from kvpool.transport.mover import Movers
from kvpool.transport.tcp_connection import Connection, Peer
from kvpool.transport.tcp_transfer import Batch, ConnectionPool, Move, TcpTransfer

if TYPE_CHECKING:  # The processes that move bytes need no protobuf.
    from kvpool.v1 import pool_pb2 as pb


def peer_of(info: pb.DataPort, host: str, timeout_s: float) -> Peer:
    """The data port of a server that was reached at `host`, unless `info` names another host."""
    return Peer(info.host or host, info.port, info.nonce, timeout_s, info.sealed)


class TcpTransport:
    """Regions that the server's data workers read from and write to the arena.

    Args:
        num_connections: most connections of one transfer: one for the caller's thread, and one for each helper.

    Attributes:
        memory: what bytes of callbacks pass through, out of process.
    """

    name = "tcp"
    one_sided = False

    def __init__(self, peer: Peer, num_connections: int):
        self.peer = peer
        self._num_connections = num_connections
        self._connections = ConnectionPool(peer)
        self._helpers = Helpers(num_connections - 1)
        self._staging = Staging()
        self._movers = Movers(num_connections)
        self._end = weakref.finalize(self, _close_in, os.getpid(), self._movers, self._connections, self._helpers)

    def __repr__(self) -> str:
        return f"TcpTransport({self.route})"

    @property
    def memory(self) -> Bytes:
        return self._staging.memory if self._movers.memory is None else self._movers.memory

    @property
    def route(self) -> str:
        """For logs: the data port, and over how many connections a transfer goes."""
        return f"{self.peer}, {self._num_connections} connection{'s' * (self._num_connections > 1)}"

    def write(self, transfer: Transfer, local: Local) -> None:
        if not (transfer.out_of_process and self._movers.move(self.peer, transfer, local, is_write=True)):
            TcpWrite(transfer, local, self._connections, self._helpers).run(self._staging)

    def read(self, transfer: Transfer, local: Local) -> None:
        move = local.apart or self._movers.move
        if not (transfer.out_of_process and move(self.peer, transfer, local)):
            TcpRead(transfer, local, self._connections, self._helpers).run(self._staging)

    def close(self) -> None:
        self._end()


def _close_in(process_id: int, movers: Movers, connections: ConnectionPool, helpers: Helpers) -> None:
    """Closes only in the process that opened the connections: a fork that hangs up would end its parent's transfers."""
    if os.getpid() == process_id:
        movers.close()
        connections.close()
        helpers.close()


class TcpWrite(TcpTransfer):
    """One write."""

    is_write = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
        assert self._local.act is not None
        try:
            batch.wait = self._local.act(batch.start, self._in_rows(batch))
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
        self._local.sum(part.first, self._regions(part, batch))
        connection.send(part, self._views(part, batch))
        with self._changed:
            batch.parts_left -= 1
            if not batch.parts_left:
                self._free(batch)
        while connection.in_flight > self._ahead:
            connection.finish()


class TcpRead(TcpTransfer):
    """One read."""

    is_write = False

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self._local.sum(part.first, self._regions(part, batch))
        with self._changed:
            batch.parts_left -= 1
            if not batch.parts_left:
                self._changed.notify_all()

    def _drain(self, batch: Batch) -> None:
        assert self._local.act is not None
        batch.wait = self._local.act(batch.start, self._in_rows(batch))
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
