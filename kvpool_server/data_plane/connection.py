"""One connection of a data port: permits come in, and bytes go straight into the arena or out of it.

Late writers: nothing is written once a permit's deadline has passed, as far as this process runs: each wait for bytes
ends at the deadline, and between two pieces there is a look at the clock. What is left of that race (the process is
stopped in the middle of a piece) is what is left of it with shared memory, and the server's quarantine covers both.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpool.data_port import (
    HEADER_BYTES,
    MAGIC,
    Header,
    Kind,
    Offsets,
    Reply,
    Signer,
    Status,
    pieces,
    receive_exactly,
    receive_some,
    send,
    send_some,
    time_out,
)
from kvpool.errors import InvalidRequestError

IDLE_S = 120.0
"""A client that asks for nothing for so long is hung up on; clients themselves go sooner."""

STALL_S = 30.0
"""As long as one piece may stand still."""

HANG_UP_S = 1.0
HANG_UP_BYTES = 64 << 20
"""What is read, and thrown away, of a client that was refused: else it might never see why."""


class _RefusedError(Exception):
    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.reply = Reply(status, 0, message)


@dataclass(frozen=True, slots=True)
class _Grant:
    """A permit that was checked."""

    kind: Kind
    deadline_ns: int
    region_bytes: int
    offsets: Offsets


class Connection:
    """Serves one client until it goes. One thread.

    Args:
        arena: all of it, writable.
        count: is told each payload: whether it was written, and its bytes.
        clock_ns: CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        client: socket.socket,
        arena: memoryview,
        signer: Signer,
        nonce: bytes,
        count: Callable[[bool, int], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ):
        self._client = client
        self._arena = arena
        self._signer = signer
        self._nonce = nonce
        self._count = count
        self._clock_ns = clock_ns

    def serve(self) -> None:
        """Returns when the client has gone, was refused, or said nothing for too long."""
        try:
            self._converse()
        except _RefusedError as refusal:
            self._hang_up(refusal.reply)
        except InvalidRequestError as error:
            self._hang_up(Reply(Status.INVALID, 0, str(error)))
        except (EOFError, OSError):
            pass  # Gone, or as good as gone.

    def _converse(self) -> None:
        client = self._client
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time_out(client, IDLE_S)
        client.sendall(MAGIC + self._nonce)
        grant: _Grant | None = None
        while True:
            header = Header.decode(receive_exactly(client, HEADER_BYTES))
            if header.kind is not Kind.MOVE:
                grant = self._check(header)
                continue
            if grant is None:
                raise InvalidRequestError("bytes were to move, and no permit came before")
            self._move(grant, header)
            time_out(client, IDLE_S)

    def _check(self, header: Header) -> _Grant:
        """Takes the permit's offsets in; raises unless the server made it, for this arena."""
        offsets = np.frombuffer(receive_exactly(self._client, 8 * header.stop), "<u8")
        deadline_ns = self._signer.deadline_ns(header, offsets)
        if deadline_ns is None:
            raise _RefusedError(Status.REFUSED, "the permit is not for these regions, or of another boot")
        if not header.region_bytes or int(offsets.max()) + header.region_bytes > len(self._arena):
            raise InvalidRequestError(f"regions of {header.region_bytes} bytes beyond the arena's {len(self._arena)}")
        return _Grant(header.kind, deadline_ns, header.region_bytes, offsets)

    def _move(self, grant: _Grant, header: Header) -> None:
        if header.stop > len(grant.offsets):
            raise InvalidRequestError(f"regions [{header.first}, {header.stop}) of {len(grant.offsets)}")
        views = self._views(grant, header)
        nbytes = (header.stop - header.first) * grant.region_bytes
        is_write = grant.kind is Kind.WRITE
        self._bound_wait(grant)
        if is_write:
            for piece in pieces(views):
                while piece:
                    self._bound_wait(grant)
                    piece = self._receive(grant, piece)
        self._client.sendall(Reply(Status.OK, nbytes).encode(), 0 if is_write else socket.MSG_MORE)
        if not is_write:
            for piece in pieces(views):
                while piece:
                    self._bound_wait(grant, begun=True)
                    piece = send_some(self._client, piece)
        self._count(is_write, nbytes)

    def _receive(self, grant: _Grant, piece: list[memoryview]) -> list[memoryview]:
        try:
            return receive_some(self._client, piece)
        except BlockingIOError:
            self._bound_wait(grant)  # Was it the deadline?
            raise

    def _views(self, grant: _Grant, header: Header) -> list[memoryview]:
        """The regions' bytes; neighbours are one."""
        runs: list[tuple[int, int]] = []
        for offset in grant.offsets[header.first : header.stop].tolist():
            if runs and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], offset + grant.region_bytes)
            else:
                runs.append((offset, offset + grant.region_bytes))
        return [self._arena[start:stop] for start, stop in runs]

    def _bound_wait(self, grant: _Grant, begun: bool = False) -> None:
        """Has the next wait end with the permit. Raises where that has ended."""
        remaining_s = (grant.deadline_ns - self._clock_ns()) / 1e9
        if remaining_s <= 0:
            if begun:
                raise EOFError("its payload has begun: nothing else can be said")
            raise _RefusedError(Status.EXPIRED, "the ticket or lease of this permit has expired")
        time_out(self._client, min(remaining_s, STALL_S))

    def _hang_up(self, reply: Reply) -> None:
        """Says why, and lets the client read it: bytes that nobody reads would make the kernel forget the answer."""
        client = self._client
        with contextlib.suppress(OSError, EOFError):
            time_out(client, HANG_UP_S)
            send(client, [memoryview(reply.encode())])
            client.shutdown(socket.SHUT_WR)
            ends_at, left = time.monotonic() + HANG_UP_S, HANG_UP_BYTES
            while left > 0 and time.monotonic() < ends_at and (taken := len(client.recv(1 << 18))):
                left -= taken
