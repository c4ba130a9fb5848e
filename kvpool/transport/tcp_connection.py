"""Connections to a server's data port, and the parts of transfers that travel over them.

A connection is made when it is needed, and outlives its parts. It is replaced after an error, after a part was given
up, and before a data worker would close it for being idle. Data workers answer parts in the order in which they began.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvpool.protocol.errors import (
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
)
from kvpool.protocol.text import escaped
from kvpool.protocol.types import PERMIT_BYTES, PERMIT_KEY_BYTES
from kvpool.transport.base import Bytes, Transfer
from kvpool.transport.data_port import (
    GREETING_BYTES,
    MAGIC,
    MAX_MESSAGE_BYTES,
    NO_ROOM,
    REPLY_BYTES,
    Header,
    Kind,
    MoveSome,
    Offsets,
    Reply,
    Status,
    Stream,
    pieces_behind,
    proof_of,
    receive_some,
    send_some,
    time_out,
)
from kvpool.transport.sealed_socket import RANDOM_BYTES, SealedSocket

IDLE_S = 60.0
"""A connection that was idle for so long is not used again; data workers close it after twice as long."""

_ERROR_OF: dict[Status, type[KVPoolError]] = {
    Status.INVALID: InvalidRequestError,
    Status.REFUSED: TransferError,
    Status.EXPIRED: LeaseExpiredError,
    Status.BUSY: UnavailableError,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A data port.

    Args:
        nonce: of its greeting.
        timeout_s: for a connection and its greeting; a read that receives nothing for so long fails.
        sealed: whether its connections are.
    """

    host: str
    port: int
    nonce: bytes
    timeout_s: float
    sealed: bool = False

    def __str__(self) -> str:
        return f"the data port {self.host}:{self.port}"

    def connect(self, timeout_s: float) -> tuple[socket.socket, bytes]:
        """A connection whose greeting has been checked, and the worker's random number if connections are sealed.

        Raises UnavailableError if the data port cannot be reached, TransferError if it belongs to another server.
        """
        deadline = time.monotonic() + timeout_s
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((self.host, self.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = [memoryview(received := bytearray(GREETING_BYTES + RANDOM_BYTES * self.sealed))]
            while left:
                if (remaining_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                connection.settimeout(remaining_s)
                left = receive_some(connection, left)
            connection.settimeout(None)
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            raise UnavailableError(
                f"cannot reach {self} ({_reason(error)}); open the port to this host, or move it with --data-listen"
            ) from None
        greeting, server_random = bytes(received[:GREETING_BYTES]), bytes(received[GREETING_BYTES:])
        if greeting == MAGIC + self.nonce:
            return connection, server_random
        connection.close()
        if greeting == MAGIC + NO_ROOM:
            raise UnavailableError(
                f"{self} accepts no more connections; raise --data-workers, or lower stream_connections of its clients"
            )
        raise TransferError(f"{self} belongs to another server; give this server another --data-listen")


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Regions [first, stop) of a transfer, which travel over one connection.

    Args:
        offsets: of all regions that were granted, as they are sent.
        deadline: by `time.monotonic`.
    """

    transfer: Transfer
    offsets: Offsets
    first: int
    stop: int
    deadline: float
    is_write: bool

    @property
    def nbytes(self) -> int:
        return (self.stop - self.first) * self.transfer.region_bytes

    def headers(self, with_permit: bool, channel_id: bytes) -> bytes:
        """What precedes the part: the permit, unless the connection has shown it already, and which regions move.

        On a sealed connection, which has a `channel_id`, the permit's key has to be proved.
        """
        transfer = self.transfer
        first, stop = transfer.first_permitted + self.first, transfer.first_permitted + self.stop
        move = Header(Kind.MOVE, first, stop, transfer.region_bytes, transfer.skip_bytes).encode()
        if not with_permit:
            return move
        kind, count = Kind.WRITE if self.is_write else Kind.READ, len(self.offsets)
        whole_bytes = transfer.permitted_bytes or transfer.region_bytes
        permit, key = transfer.permit[:PERMIT_BYTES], transfer.permit[PERMIT_BYTES:]
        shown = Header(kind, 0, count, whole_bytes, holding_id=transfer.holding_id, permit=permit)
        proof = proof_of(key, channel_id) if channel_id else b""
        return shown.encode() + self.offsets.tobytes() + proof + move


class Connection:
    """Belongs to one thread at a time; `hang_up` may be called from any."""

    def __init__(self, peer: Peer):
        self._peer = peer
        self._changing = threading.Lock()
        self._socket: Stream | None = None
        self._server_random = b""
        self._hung_up = False
        self._shown: Transfer | None = None
        self._used_at = 0.0
        self._wait_s = 0.0
        self._in_flight: deque[Part] = deque()

    def open(self, deadline: float) -> None:
        """Connects unless a sound connection is there. Raises as `Peer.connect`, and PoolTimeoutError."""
        if self._socket is not None and (time.monotonic() - self._used_at > IDLE_S or _has_ended(self._socket)):
            self.close()
        if self._socket is not None:
            return
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            self._raise_late()
        fresh, self._server_random = self._peer.connect(min(self._peer.timeout_s, remaining_s))
        with self._changing:
            if not self._hung_up:
                self._socket, self._wait_s, self._used_at = fresh, 0.0, time.monotonic()
                return
        fresh.close()
        raise UnavailableError(f"the transport to {self._peer} was closed; open the namespace again")

    @property
    def in_flight(self) -> int:
        """Parts that have begun and have not ended."""
        return len(self._in_flight)

    def request(self, part: Part) -> None:
        """Asks for the bytes of a part."""
        with self._closed_on_error(part) as connection:
            self._in_flight.append(part)
            self._move(send_some, connection, part, [memoryview(self._headers(part))])

    def receive(self, buffers: Sequence[Bytes]) -> None:
        """Receives the part that was requested first into `buffers`, of its size together."""
        part = self._in_flight[0]
        with self._closed_on_error(part) as connection:
            first, *others = pieces_behind(reply := bytearray(REPLY_BYTES), [buffer.data for buffer in buffers])
            left = receive_some(connection, first)
            self._check_reply(connection, part, reply, first[1:], left)
            for piece in [left, *others]:
                self._move(receive_some, connection, part, piece)
            self._in_flight.popleft()
            self._used_at = time.monotonic()

    def send(self, part: Part, buffers: Sequence[Bytes]) -> None:
        """Sends a part's bytes; they may change afterwards."""
        with self._closed_on_error(part) as connection:
            self._in_flight.append(part)
            # A header that travels together with the bytes wakes the worker once.
            try:
                for piece in pieces_behind(self._headers(part), [buffer.data for buffer in buffers]):
                    self._move(send_some, connection, part, piece)
            except ConnectionError:
                while self._in_flight:  # A worker tells why before it hangs up.
                    self.finish()
                raise

    def finish(self) -> None:
        """Waits until the part that was sent first has arrived."""
        self.receive(())  # Nothing follows the reply.

    def _move(self, move_some: MoveSome, connection: Stream, part: Part, buffers: list[memoryview]) -> None:
        """Sends all of the buffers, or fills them in order, before the part's deadline."""
        while buffers:
            self._bound_wait(connection, part)
            buffers = move_some(connection, buffers)

    @contextlib.contextmanager
    def _closed_on_error(self, part: Part) -> Iterator[Stream]:
        """The open socket. Closes it on an error: what it would receive next belongs to the failed part."""
        try:
            if self._socket is None:
                raise EOFError("the transport was closed")
            self._bound_wait(self._socket, part)
            if self._peer.sealed and isinstance(self._socket, socket.socket):
                self._socket = self._seal(self._socket, part.transfer.permit)
            yield self._socket
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):  # The deadline, or a read's stall timeout.
                self._raise_late(has_stalled=not part.is_write and time.monotonic() < part.deadline)
            if isinstance(error, (OSError, EOFError)):
                raise TransferError(f"the connection to {self._peer} ended: {_reason(error)}") from None
            if isinstance(error, Exception) and not isinstance(error, KVPoolError):
                raise TransferError(f"a transfer to or from {self._peer} failed: {error!r}") from error
            raise

    def _seal(self, plain: socket.socket, permit: bytes) -> SealedSocket:
        """Names a permit in clear, and derives the connection's keys from the permit's own, which stays secret."""
        if len(permit) != PERMIT_BYTES + PERMIT_KEY_BYTES:
            raise TransferError(f"{self._peer} is sealed, and the server gave a permit of {len(permit)} bytes: no key")
        client_random = os.urandom(RANDOM_BYTES)
        plain.sendall(client_random + permit[:PERMIT_BYTES])
        secret = permit[PERMIT_BYTES:]
        return SealedSocket(plain, secret, client_random, self._server_random, is_client=True)

    def _bound_wait(self, connection: Stream, part: Part) -> None:
        """Bounds the socket's next wait by the part's deadline. Raises PoolTimeoutError if the deadline has passed."""
        remaining_s = part.deadline - time.monotonic()
        if remaining_s <= 0:
            self._raise_late()
        wait_s = remaining_s if part.is_write else min(remaining_s, self._peer.timeout_s)
        # Two system calls, which most pieces need not make.
        if not wait_s <= self._wait_s <= wait_s * 1.02:
            time_out(connection, wait_s)
            self._wait_s = wait_s

    def _raise_late(self, has_stalled: bool = False) -> NoReturn:
        if has_stalled:
            raise PoolTimeoutError(f"{self._peer} sent nothing for {self._peer.timeout_s:.3f} s")
        raise PoolTimeoutError(f"a transfer to or from {self._peer} did not end before its deadline")

    def _headers(self, part: Part) -> bytes:
        with_permit, self._shown = self._shown is not part.transfer, part.transfer
        channel_id = self._socket.channel_id if isinstance(self._socket, SealedSocket) else b""
        return part.headers(with_permit, channel_id)

    def _check_reply(
        self, connection: Stream, part: Part, reply: bytearray, behind: list[memoryview], left: list[memoryview]
    ) -> None:
        """Raises the error that a reply tells.

        Args:
            behind: buffers for what follows the reply.
            left: what has not been received of these, behind what has not been received of the reply.
        """
        if len(left) > len(behind):
            self._move(receive_some, connection, part, [left.pop(0)])
        status, message_bytes, nbytes = Reply.decode(reply)
        if status is not Status.OK:
            begun = sum(map(len, behind)) - sum(map(len, left))
            message = b"".join(bytes(view[:message_bytes]) for view in behind)[: min(begun, message_bytes)]
            rest = bytearray(message_bytes - len(message))
            self._move(receive_some, connection, part, [memoryview(rest)] if rest else [])
            said = escaped((message + rest).decode(errors="replace"), MAX_MESSAGE_BYTES)
            raise _ERROR_OF[status](f"{self._peer}: {said}")
        if nbytes != part.nbytes or message_bytes:
            raise TransferError(f"{self._peer} moved {nbytes} of {part.nbytes} bytes")

    def hang_up(self) -> None:
        """Ends what another thread does with the connection, soon, with an error."""
        with self._changing:
            self._hung_up = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # The peer has disconnected.
                    self._socket.shutdown(socket.SHUT_RDWR)

    def reuse(self) -> None:
        """Makes the connection fit for another transfer; parts that nobody waits for end with their socket."""
        if self._in_flight or self._hung_up:
            self.close()
        self._hung_up = False

    def close(self) -> None:
        """Closes the socket; the next `open` makes another. Idempotent."""
        with self._changing:
            connection, self._socket, self._shown = self._socket, None, None
            self._in_flight.clear()
        if connection is not None:
            connection.close()


def _has_ended(connection: Stream) -> bool:
    """Whether the peer has closed an idle connection, or sent unrequested bytes."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
