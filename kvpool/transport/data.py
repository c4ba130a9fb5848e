"""The `stream` transport over a data port: batches striped over several TCP connections, each with a lane.

With many cores, each lane has a thread, so that several of them move bytes. With few, the caller moves them itself,
over one connection: while it does, the kernel and the worker carry what it has sent, or asked for.

One-sided, though the server's workers take part: once the caller hangs up, a worker may still write what is on its way,
for a moment. So a ticket whose write did not end well is never given back: it expires, and its slots wait.

A connection outlives its batches, and is replaced where it has died, or was hung up on to end a batch that nobody waits
for any more. It is also replaced before the worker would find that it has been idle for too long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from kvpool.data_port import (
    GREETING_BYTES,
    MAGIC,
    NO_ROOM,
    REPLY_BYTES,
    Header,
    Kind,
    Reply,
    Status,
    pack_offsets,
    pieces,
    receive_exactly,
    receive_some,
    send_some,
    time_out,
)
from kvpool.errors import (
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
)
from kvpool.transport.base import BATCH_BYTES, Drain, Fill
from kvpool.transport.direct import Ways
from kvpool.transport.lanes import Batch, Bytes, Lanes, Transfer
from kvpool.transport.trip import Trip
from kvpool.types import DataPortInfo

IDLE_S = 60.0
"""A connection that was idle for so long is not used again; workers wait twice as long."""

THREADS_FROM_CORES = 4

_ERROR_OF: dict[Status, type[KVPoolError]] = {
    Status.INVALID: InvalidRequestError,
    Status.REFUSED: TransferError,
    Status.EXPIRED: LeaseExpiredError,
    Status.BUSY: UnavailableError,
}


class DataTransport:
    """Regions that data workers bring from and to the arena.

    Args:
        host: where the server is, unless `info` names another.
        num_connections: batches of one call under way at once, a connection each, where lanes have threads.
        connect_timeout_s: for a connection and its greeting.
        stall_timeout_s: a read that brings nothing for so long is given up.
        direct: the caller moves the bytes itself; by default where cores are few.
    """

    name = "stream"
    memory = None
    one_sided = True
    in_place = True

    def __init__(
        self,
        info: DataPortInfo,
        host: str,
        num_connections: int,
        connect_timeout_s: float,
        stall_timeout_s: float,
        direct: bool | None = None,
    ):
        self._address = (info.host or host, info.port)
        self._num_connections = num_connections
        address, nonce = self._address, info.nonce

        def make(closed: threading.Event) -> _Connection:
            return _Connection(address, nonce, connect_timeout_s, stall_timeout_s, closed)

        self._ways: Ways | _Striped
        if len(os.sched_getaffinity(0)) < THREADS_FROM_CORES if direct is None else direct:
            self._ways = Ways(make, self.place)
        else:
            self._ways = _Striped(Lanes(make, self.place), num_connections, stall_timeout_s)
        self._end = weakref.finalize(self, _close_in, os.getpid(), self._ways)

    def __repr__(self) -> str:
        return f"DataTransport({self.place}, {self._num_connections} connections)"

    @property
    def place(self) -> str:
        """The data port, for people."""
        return f"the data port {self._address[0]}:{self._address[1]}"

    @property
    def route(self) -> str:
        """How bytes travel, for people: a caller's own thread takes one connection, others share some."""
        return self.place if isinstance(self._ways, Ways) else f"{self.place}, {self._num_connections} connections"

    def write(
        self,
        ticket_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        fill: Fill,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        transfer = Transfer(True, ticket_id, pack_offsets(offsets), region_bytes, permit)  # type: ignore[arg-type]
        self._ways.write(transfer, fill, batch_bytes, timeout_s)

    def read(
        self,
        lease_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        drain: Drain,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        transfer = Transfer(False, lease_id, pack_offsets(offsets), region_bytes, permit)  # type: ignore[arg-type]
        self._ways.read(transfer, drain, batch_bytes, timeout_s)

    def close(self) -> None:
        self._end()


def _close_in(process_id: int, ways: Ways | _Striped) -> None:
    """Only in the process that opened them: to hang up in a fork of it would end its parent's transfers."""
    if os.getpid() == process_id:
        ways.close()


class _Striped:
    """Several batches of a call under way at once, each on a lane of its own."""

    def __init__(self, lanes: Lanes, depth: int, stall_timeout_s: float):
        self._lanes = lanes
        self._depth = depth
        self._stall_timeout_s = stall_timeout_s
        self.close = lanes.close

    def write(self, transfer: Transfer, fill: Fill, batch_bytes: int, timeout_s: float) -> None:
        with Trip(self._lanes, self._depth, time.monotonic, timeout_s, float("inf")) as trip:
            trip.write(transfer, fill, batch_bytes)

    def read(self, transfer: Transfer, drain: Drain, batch_bytes: int, timeout_s: float) -> None:
        with Trip(self._lanes, self._depth, time.monotonic, timeout_s, self._stall_timeout_s) as trip:
            trip.read(transfer, drain, batch_bytes)


def prove(info: DataPortInfo, host: str, timeout_s: float) -> None:
    """Connects once, and hears the greeting.

    Raises:
        TransferError, UnavailableError: this is not the way to the server's data port.
    """
    connect((info.host or host, info.port), info.nonce, timeout_s).close()


def connect(address: tuple[str, int], nonce: bytes, timeout_s: float) -> socket.socket:
    """A connection that has been greeted. Raises TransferError, UnavailableError."""
    place = f"the data port {address[0]}:{address[1]}"
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection(address, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = receive_exactly(connection, GREETING_BYTES)
        connection.settimeout(None)
    except (OSError, EOFError) as error:
        if connection is not None:
            connection.close()
        raise UnavailableError(
            f"cannot reach {place} ({_reason(error)}); is it open to this host? See --data-listen"
        ) from None
    if greeting == MAGIC + nonce:
        return connection
    connection.close()
    if greeting == MAGIC + NO_ROOM:
        raise UnavailableError(f"{place} has no room for another connection; give --data-workers more, or stream fewer")
    raise TransferError(f"{place} is another server's")


class _Connection:
    """Carries by one TCP connection, made when it is needed. Batches are answered in the order in which they began."""

    def __init__(
        self,
        address: tuple[str, int],
        nonce: bytes,
        connect_timeout_s: float,
        stall_timeout_s: float,
        closed: threading.Event,
    ):
        self._address = address
        self._place = f"the data port {address[0]}:{address[1]}"
        self._nonce = nonce
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._closed = closed
        self._changing = threading.Lock()
        self._socket: socket.socket | None = None
        self._under_way: deque[Batch] = deque()
        self._shown: Transfer | None = None
        self._used_at = 0.0

    def grow(self, old: Bytes, nbytes: int) -> Bytes:
        return np.empty(max(BATCH_BYTES, 1 << (nbytes - 1).bit_length()), np.uint8)

    def begin(self, batch: Batch, here: Bytes) -> None:
        connection = self._connected(batch)
        with self._dropped_on_error(batch):
            self._bound_wait(connection, batch)
            is_write = batch.transfer.is_write
            # Words that travel with the bytes behind them wake the worker once.
            connection.sendall(self._words(batch), socket.MSG_MORE if is_write else 0)
            source = [here] if batch.source is None else batch.source
            for piece in pieces([each.data for each in source]) if is_write else ():
                while piece:
                    self._bound_wait(connection, batch)
                    piece = send_some(connection, piece)

    def finish(self, batch: Batch, here: Bytes) -> None:
        connection = self._socket
        with self._dropped_on_error(batch):
            if connection is None:
                raise EOFError("the way was closed")
            self._bound_wait(connection, batch)
            self._hear(connection, batch)
            for piece in () if batch.transfer.is_write else pieces([here.data]):
                while piece:
                    self._bound_wait(connection, batch)
                    piece = receive_some(connection, piece)
                    batch.progressed()
            with self._changing:
                self._under_way.popleft()
            self._used_at = time.monotonic()

    @contextlib.contextmanager
    def _dropped_on_error(self, batch: Batch) -> Iterator[None]:
        """A connection in the middle of a conversation is of no use to the next batch."""
        try:
            yield
        except BlockingIOError:  # The wait was bounded by the deadline, or by how long it may stand still.
            self._drop()
            self._raise_late(batch)
        except (OSError, EOFError) as error:
            self._drop()
            raise TransferError(f"the connection to {self._place} ended: {_reason(error)}") from None
        except KVPoolError:
            self._drop()
            raise
        except (
            Exception
        ) as error:  # Nothing touches the buffers once the connection is closed: the way can be used again.
            self._drop()
            raise TransferError(f"the way to {self._place} broke down: {error!r}") from error
        except BaseException:
            self._drop()
            raise

    def _bound_wait(self, connection: socket.socket, batch: Batch) -> None:
        """Has the next wait end in time. Raises PoolTimeoutError where it is over."""
        remaining_s = batch.deadline - time.monotonic()
        if remaining_s <= 0:
            self._raise_late(batch)
        time_out(connection, remaining_s if batch.transfer.is_write else min(remaining_s, self._stall_timeout_s))

    def _raise_late(self, batch: Batch) -> NoReturn:
        if time.monotonic() < batch.deadline:
            raise PoolTimeoutError(f"{self._place} brought nothing for {self._stall_timeout_s:.3f} s")
        raise PoolTimeoutError(f"a transfer to or from {self._place} did not end before its deadline")

    def _connected(self, batch: Batch) -> socket.socket:
        if self._under_way and self._socket is not None:
            with self._changing:
                self._under_way.append(batch)
            return self._socket
        if self._socket is not None and (time.monotonic() - self._used_at > IDLE_S or _has_ended(self._socket)):
            self._drop()
        remaining_s = batch.deadline - time.monotonic()
        if remaining_s <= 0:
            self._raise_late(batch)
        timeout_s = min(self._connect_timeout_s, remaining_s)
        fresh = self._socket is None and connect(self._address, self._nonce, timeout_s)
        with self._changing:
            if fresh:
                self._socket = fresh
            assert self._socket is not None
            self._under_way.append(batch)
            if not (batch.given_up or self._closed.is_set()):
                return self._socket
        self._drop()
        raise UnavailableError(f"the way to {self._place} was closed")

    def _words(self, batch: Batch) -> bytes:
        """What goes ahead of a batch: the permit, unless this connection has shown it, and which regions."""
        transfer = batch.transfer
        move = Header(Kind.MOVE, batch.first, batch.stop).encode()
        if self._shown is transfer:
            return move
        self._shown = transfer
        kind, count = Kind.WRITE if transfer.is_write else Kind.READ, len(transfer.offsets)
        shown = Header(kind, 0, count, transfer.holding_id, transfer.region_bytes, transfer.permit).encode()
        return shown + pack_offsets(transfer.offsets).tobytes() + move

    def _hear(self, connection: socket.socket, batch: Batch) -> None:
        status, message_bytes, nbytes = Reply.decode(receive_exactly(connection, REPLY_BYTES))
        message = receive_exactly(connection, message_bytes).decode(errors="replace")
        if status is not Status.OK:
            raise _ERROR_OF[status](f"{self._place}: {message}")
        if nbytes != batch.nbytes:
            raise TransferError(f"the data port moves {nbytes} of {batch.nbytes} bytes")

    def give_up(self, batch: Batch) -> None:
        with self._changing:
            if batch in self._under_way and self._socket is not None:
                _hang_up(self._socket)

    def _drop(self) -> None:
        with self._changing:
            connection, self._socket, self._shown = self._socket, None, None
            self._under_way.clear()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self._drop()


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has hung up, or has said what nobody asked for."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EBADF):
            raise


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
