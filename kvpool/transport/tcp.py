"""The `tcp` transport: bytes travel over TCP connections to the server's data port.

With many cores, each connection has a thread (`ThreadedPipeline`) and a call uses several of them. With few cores, the
caller moves the bytes itself over one connection (`DirectPipeline`): meanwhile the kernel and the server's data worker
carry what it has sent or requested.

One-sided, although data workers take part: after a client hangs up, a worker may still write bytes that were already
received. So the ticket of a failed write is never revoked: it expires, and its slots wait in quarantine.

A connection outlives its batches. It is replaced after an error, after a batch was given up, and before a data worker
would close it for being idle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
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
from kvpool.transport.base import BATCH_BYTES, Drain, Fill, Transfer
from kvpool.transport.direct_pipeline import DirectPipeline
from kvpool.transport.pipeline import Bytes, TransferBatch, TransferPipeline
from kvpool.transport.threaded_pipeline import ThreadedPipeline
from kvpool.types import DataPortInfo

IDLE_S = 60.0
"""A connection that was idle for so long is not used again; data workers close it after twice as long."""

THREADS_FROM_CORES = 4
"""With fewer cores than this, callers move the bytes themselves."""

_ERROR_OF: dict[Status, type[KVPoolError]] = {
    Status.INVALID: InvalidRequestError,
    Status.REFUSED: TransferError,
    Status.EXPIRED: LeaseExpiredError,
    Status.BUSY: UnavailableError,
}


class TcpTransport:
    """Regions that the server's data workers read from and write to the arena.

    Args:
        host: the server's host, unless `info` names another one.
        num_connections: most batches of one call in flight, each on a connection of its own, where channels have
            threads.
        connect_timeout_s: for a connection and its greeting.
        stall_timeout_s: a read that receives nothing for so long fails.
        direct: True: the caller's thread moves the bytes; None: only where cores are few.
    """

    name = "tcp"
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
        self._address = address = (info.host or host, info.port)
        self._num_connections = num_connections
        make = functools.partial(_TcpChannel, address, info.nonce, connect_timeout_s, stall_timeout_s)
        pipeline: TransferPipeline
        if len(os.sched_getaffinity(0)) < THREADS_FROM_CORES if direct is None else direct:
            pipeline = DirectPipeline(make, self.peer)
        else:
            pipeline = ThreadedPipeline(make, self.peer, num_connections, stall_timeout_s)
        self._pipeline = pipeline
        self._end = weakref.finalize(self, _close_in, os.getpid(), pipeline)

    def __repr__(self) -> str:
        return f"TcpTransport({self.peer}, {self._num_connections} connections)"

    @property
    def peer(self) -> str:
        """The data port's name in errors."""
        return _name_of(self._address)

    @property
    def route(self) -> str:
        """For logs: the data port, and over how many connections a call goes if over more than one."""
        several = f", {self._num_connections} connections" if isinstance(self._pipeline, ThreadedPipeline) else ""
        return f"{self.peer}{several}"

    def write(self, transfer: Transfer, fill: Fill) -> None:
        self._pipeline.write(_packed(transfer), fill)

    def read(self, transfer: Transfer, drain: Drain) -> None:
        self._pipeline.read(_packed(transfer), drain)

    def close(self) -> None:
        self._end()


def _packed(transfer: Transfer) -> Transfer:
    """The same transfer, with its offsets in the form in which every connection sends them."""
    return dataclasses.replace(transfer, offsets=pack_offsets(transfer.offsets))  # type: ignore[arg-type]


def _close_in(process_id: int, pipeline: TransferPipeline) -> None:
    """Closes only in the process that opened the connections: a fork that hangs up would end its parent's transfers."""
    if os.getpid() == process_id:
        pipeline.close()


def _name_of(address: tuple[str, int]) -> str:
    return f"the data port {address[0]}:{address[1]}"


def prove(info: DataPortInfo, host: str, timeout_s: float) -> None:
    """Connects to the data port once, and checks its greeting. Raises as `connect`."""
    connect((info.host or host, info.port), info.nonce, timeout_s).close()


def connect(address: tuple[str, int], nonce: bytes, timeout_s: float) -> socket.socket:
    """A connection whose greeting has been checked.

    Raises UnavailableError if the data port cannot be reached, TransferError if it belongs to another server.
    """
    peer = _name_of(address)
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
            f"cannot reach {peer} ({_reason(error)}); open the port to this host, or move it with --data-listen"
        ) from None
    if greeting == MAGIC + nonce:
        return connection
    connection.close()
    if greeting == MAGIC + NO_ROOM:
        raise UnavailableError(
            f"{peer} accepts no more connections; raise --data-workers, or lower stream_connections of its clients"
        )
    raise TransferError(f"{peer} belongs to another server; give this server another --data-listen")


@dataclasses.dataclass(eq=False)
class _TcpChannel:
    """One TCP connection, made when it is needed. Data workers answer batches in the order in which they began."""

    address: tuple[str, int]
    nonce: bytes
    connect_timeout_s: float
    stall_timeout_s: float
    closed: threading.Event

    def __post_init__(self) -> None:
        self._peer = _name_of(self.address)
        self._changing = threading.Lock()
        self._socket: socket.socket | None = None
        self._in_flight: deque[TransferBatch] = deque()
        self._shown: Transfer | None = None
        self._used_at = 0.0

    def grow(self, old: Bytes, nbytes: int) -> Bytes:
        return np.empty(max(BATCH_BYTES, 1 << (nbytes - 1).bit_length()), np.uint8)

    def begin(self, batch: TransferBatch, buffer: Bytes) -> None:
        connection = self._connected(batch)
        with self._dropped_on_error(batch):
            self._bound_wait(connection, batch)
            # A header that travels together with the bytes wakes the worker once.
            connection.sendall(self._headers(batch), socket.MSG_MORE if batch.is_write else 0)
            source = [buffer] if batch.source is None else batch.source
            for piece in pieces([each.data for each in source]) if batch.is_write else ():
                while piece:
                    self._bound_wait(connection, batch)
                    piece = send_some(connection, piece)

    def finish(self, batch: TransferBatch, buffer: Bytes) -> None:
        connection = self._socket
        with self._dropped_on_error(batch):
            if connection is None:
                raise EOFError("the transport was closed")
            self._bound_wait(connection, batch)
            self._receive_reply(connection, batch)
            for piece in () if batch.is_write else pieces([buffer.data]):
                while piece:
                    self._bound_wait(connection, batch)
                    piece = receive_some(connection, piece)
                    batch.progressed()
            with self._changing:
                self._in_flight.popleft()
            self._used_at = time.monotonic()

    @contextlib.contextmanager
    def _dropped_on_error(self, batch: TransferBatch) -> Iterator[None]:
        """Closes the connection on an error: what it would receive next belongs to the failed batch."""
        try:
            yield
        except BaseException as error:
            self._drop()  # Nothing accesses the buffer once the connection is closed: the channel can be reused.
            if isinstance(error, BlockingIOError):  # The socket's timeout: the deadline, or the stall timeout.
                self._raise_late(batch)
            if isinstance(error, (OSError, EOFError)):
                raise TransferError(f"the connection to {self._peer} ended: {_reason(error)}") from None
            if isinstance(error, Exception) and not isinstance(error, KVPoolError):
                raise TransferError(f"a transfer channel to {self._peer} failed: {error!r}") from error
            raise

    def _bound_wait(self, connection: socket.socket, batch: TransferBatch) -> None:
        """Bounds the socket's next wait by the batch's deadline. Raises PoolTimeoutError if the deadline has passed."""
        remaining_s = batch.deadline - time.monotonic()
        if remaining_s <= 0:
            self._raise_late(batch)
        time_out(connection, remaining_s if batch.is_write else min(remaining_s, self.stall_timeout_s))

    def _raise_late(self, batch: TransferBatch) -> NoReturn:
        if time.monotonic() < batch.deadline:
            raise PoolTimeoutError(f"{self._peer} sent nothing for {self.stall_timeout_s:.3f} s")
        raise PoolTimeoutError(f"a transfer to or from {self._peer} did not end before its deadline")

    def _connected(self, batch: TransferBatch) -> socket.socket:
        if self._in_flight and self._socket is not None:
            with self._changing:
                self._in_flight.append(batch)
            return self._socket
        if self._socket is not None and (time.monotonic() - self._used_at > IDLE_S or _has_ended(self._socket)):
            self._drop()
        remaining_s = batch.deadline - time.monotonic()
        if remaining_s <= 0:
            self._raise_late(batch)
        timeout_s = min(self.connect_timeout_s, remaining_s)
        fresh = self._socket is None and connect(self.address, self.nonce, timeout_s)
        with self._changing:
            if fresh:
                self._socket = fresh
            assert self._socket is not None
            self._in_flight.append(batch)
            if not (batch.given_up or self.closed.is_set()):
                return self._socket
        self._drop()
        raise UnavailableError(f"the transport to {self._peer} was closed; open the namespace again")

    def _headers(self, batch: TransferBatch) -> bytes:
        """What precedes a batch: the permit, unless this connection has shown it already, and the batch's regions."""
        transfer = batch.transfer
        move = Header(Kind.MOVE, batch.first, batch.stop, transfer.region_bytes, transfer.skip_bytes).encode()
        if self._shown is transfer:
            return move
        self._shown = transfer
        kind, count = Kind.WRITE if batch.is_write else Kind.READ, len(transfer.offsets)
        whole_bytes = transfer.permitted_bytes or transfer.region_bytes
        shown = Header(kind, 0, count, whole_bytes, holding_id=transfer.holding_id, permit=transfer.permit).encode()
        return shown + pack_offsets(transfer.offsets).tobytes() + move

    def _receive_reply(self, connection: socket.socket, batch: TransferBatch) -> None:
        status, message_bytes, nbytes = Reply.decode(receive_exactly(connection, REPLY_BYTES))
        message = receive_exactly(connection, message_bytes).decode(errors="replace")
        if status is not Status.OK:
            raise _ERROR_OF[status](f"{self._peer}: {message}")
        if nbytes != batch.nbytes:
            raise TransferError(f"{self._peer} moved {nbytes} of {batch.nbytes} bytes")

    def give_up(self, batch: TransferBatch) -> None:
        with self._changing:
            if batch in self._in_flight and self._socket is not None:
                _hang_up(self._socket)

    def _drop(self) -> None:
        with self._changing:
            connection, self._socket, self._shown = self._socket, None, None
            self._in_flight.clear()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self._drop()


def _has_ended(connection: socket.socket) -> bool:
    """Whether the peer has closed an idle connection, or sent unrequested bytes."""
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
