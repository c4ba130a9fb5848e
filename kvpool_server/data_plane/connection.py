"""One connection of a data port: the client sends permits, and bytes move straight into the arena or out of it.

Late writers: a connection writes nothing after its permit's deadline. Each wait for bytes ends at the deadline, and the
clock is checked between two pieces. A process that is stopped in the middle of a piece can still write late, as a
client with shared memory can; the server's quarantine covers both.
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
    WRITTEN_PIECE_BYTES,
    Header,
    Kind,
    Offsets,
    Reply,
    Signer,
    Status,
    pieces,
    pieces_behind,
    receive_exactly,
    receive_some,
    send,
    send_some,
    time_out,
)
from kvpool.errors import InvalidRequestError

IDLE_S = 120.0
"""Idle clients are disconnected after this time; kvpool's own client disconnects sooner."""

STALL_S = 30.0
"""Longest wait for any byte of a transfer."""

REFUSAL_S = 1.0
REFUSAL_BYTES = 64 << 20
"""Bytes of a refused client that are read and discarded, so that the client gets to read the refusal."""


class _RefusedError(Exception):
    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.reply = Reply(status, 0, message)


@dataclass(frozen=True, slots=True)
class _Permit:
    """A permit whose signature and regions have been checked."""

    kind: Kind
    deadline_ns: int
    region_bytes: int
    offsets: Offsets


class Connection:
    """Serves one client until it disconnects. One thread.

    Args:
        arena: all of the arena, writable.
        nonce: sent in the greeting.
        count: called after each payload with (is_write, bytes).
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
        """Returns when the client has disconnected, was refused, or was idle for IDLE_S."""
        try:
            self._serve_requests()
        except _RefusedError as refusal:
            self._refuse(refusal.reply)
        except InvalidRequestError as error:
            self._refuse(Reply(Status.INVALID, 0, str(error)))
        except (EOFError, OSError):
            pass  # The client has disconnected, or its network fails.

    def _serve_requests(self) -> None:
        client = self._client
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time_out(client, IDLE_S)
        client.sendall(MAGIC + self._nonce)
        permit: _Permit | None = None
        while True:
            header = Header.decode(receive_exactly(client, HEADER_BYTES))
            if header.kind is not Kind.MOVE:
                permit = self._check(header)
                continue
            if permit is None:
                raise InvalidRequestError("a transfer was requested before any permit; send a permit first")
            self._move(permit, header)
            time_out(client, IDLE_S)

    def _check(self, header: Header) -> _Permit:
        """Receives a permit's offsets; raises unless this server signed the permit, for this arena."""
        offsets = np.frombuffer(receive_exactly(self._client, 8 * header.stop), "<u8")
        deadline_ns = self._signer.deadline_ns(header, offsets)
        if deadline_ns is None:
            raise _RefusedError(Status.REFUSED, "the permit is not for these regions, or of another boot")
        if int(offsets.max()) + header.region_bytes > len(self._arena):
            raise InvalidRequestError(
                f"regions of {header.region_bytes} bytes reach beyond the arena of {len(self._arena)} bytes"
            )
        return _Permit(header.kind, deadline_ns, header.region_bytes, offsets)

    def _move(self, permit: _Permit, header: Header) -> None:
        if header.stop > len(permit.offsets):
            raise InvalidRequestError(f"regions [{header.first}, {header.stop}) of a permit for {len(permit.offsets)}")
        if header.skip_bytes + header.region_bytes > permit.region_bytes:
            raise InvalidRequestError(
                f"{header.region_bytes} bytes from {header.skip_bytes} on of regions of {permit.region_bytes} bytes"
            )
        views = self._views(permit, header)
        nbytes = (header.stop - header.first) * header.region_bytes
        is_write = permit.kind is Kind.WRITE
        self._bound_wait(permit)
        if is_write:
            for piece in pieces(views, WRITTEN_PIECE_BYTES):
                while piece:
                    self._bound_wait(permit)
                    piece = self._receive(permit, piece)
        reply = Reply(Status.OK, nbytes).encode()
        if is_write:
            self._client.sendall(reply)
        else:
            for piece in pieces_behind(reply, views):
                while piece:
                    self._bound_wait(permit, is_begun=True)
                    piece = send_some(self._client, piece)
        self._count(is_write, nbytes)

    def _receive(self, permit: _Permit, piece: list[memoryview]) -> list[memoryview]:
        try:
            return receive_some(self._client, piece)
        except BlockingIOError:
            self._bound_wait(permit)  # Raises "expired" if the deadline ended the wait.
            raise

    def _views(self, permit: _Permit, header: Header) -> list[memoryview]:
        """The bytes to move; those that adjoin are one view."""
        runs: list[tuple[int, int]] = []
        for region in permit.offsets[header.first : header.stop].tolist():
            start = region + header.skip_bytes
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + header.region_bytes)
            else:
                runs.append((start, start + header.region_bytes))
        return [self._arena[start:stop] for start, stop in runs]

    def _bound_wait(self, permit: _Permit, is_begun: bool = False) -> None:
        """Makes the next wait end at the permit's deadline. Raises if the deadline has passed."""
        remaining_s = (permit.deadline_ns - self._clock_ns()) / 1e9
        if remaining_s <= 0:
            if is_begun:
                raise EOFError("the permit expired in the middle of a payload, where no status fits")
            raise _RefusedError(Status.EXPIRED, "the ticket or lease of this permit has expired")
        time_out(self._client, min(remaining_s, STALL_S))

    def _refuse(self, reply: Reply) -> None:
        """Sends a refusal and reads on for a moment: the kernel discards a reply if unread bytes remain at close."""
        client = self._client
        with contextlib.suppress(OSError, EOFError):
            time_out(client, REFUSAL_S)
            send(client, [memoryview(reply.encode())])
            client.shutdown(socket.SHUT_WR)
            ends_at, bytes_left = time.monotonic() + REFUSAL_S, REFUSAL_BYTES
            while bytes_left > 0 and time.monotonic() < ends_at and (received := len(client.recv(1 << 18))):
                bytes_left -= received
