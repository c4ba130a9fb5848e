"""A data worker: `python -m kvpool_server.data_plane.worker`, started by `workers.py` alone.

A worker maps the arena, accepts connections on a socket that the server has opened, and ends with its server at once
(`child_process.py`). Each connection has a thread: the client sends permits, and the kernel copies bytes straight into
the arena or out of it, without the interpreter's lock.

Each MOVE is announced in the connection's word before its first byte, and the word is cleared after its last byte
(`permits.py`). Between two pieces, and at least every `LOOK_EVERY_S` while the client is slow, the connection looks
whether the permit is still in force, and hangs up if it is not. A worker that is stopped in the middle of a piece goes
on later: until then its word keeps the slots.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvpool.protocol.errors import InvalidRequestError, TransferError
from kvpool.protocol.types import PERMIT_BYTES
from kvpool.transport.child_process import exit_with_parent, receive_settings
from kvpool.transport.data_port import (
    HEADER_BYTES,
    MAGIC,
    NO_ROOM,
    PROOF_BYTES,
    WRITTEN_PIECE_BYTES,
    Header,
    Kind,
    MoveSome,
    Offsets,
    Reply,
    Signer,
    Status,
    Stream,
    Terms,
    pieces,
    pieces_behind,
    proof_of,
    receive_some,
    send_some,
    time_out,
)
from kvpool.transport.sealed_socket import RANDOM_BYTES, SealedSocket
from kvpool.transport.segment import Segment
from kvpool_server.data_plane.admission import MAX_SEATS, Admission, Seat
from kvpool_server.data_plane.permits import TransferWord, map_words

PROVE_S = 5.0
"""A client that has shown no permit in force after this time is disconnected."""
IDLE_S = 120.0
"""Idle clients are disconnected after this time; kvpool's own client disconnects sooner."""
STALL_S = 30.0
"""Longest wait for any byte of a transfer, and for all of a permit."""
LOOK_EVERY_S = 0.25
"""Longest time in a system call that moves bytes: so soon a connection leaves the regions of a permit that ended."""
REFUSAL_S = 1.0
REFUSAL_BYTES = 64 << 20
"""Bytes of a refused client that are read and discarded, so that the client gets to read the refusal."""
TALLY_COLUMNS = 2
"""Payload bytes read, and written."""
ACCEPT_AGAIN_S = 0.1


class _RefusedError(Exception):
    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.reply = Reply(status, 0, message)


@dataclass(frozen=True, slots=True)
class _Permit:
    """A permit whose signature and regions have been checked, with the header that it came with."""

    header: Header
    terms: Terms
    offsets: Offsets


@dataclass(frozen=True, slots=True)
class DataPort:
    """What all connections of a data worker share.

    Args:
        arena: all of the arena, writable.
        nonce: sent in greetings; names this boot of the server.
        tally: uint64 [TALLY_COLUMNS], written by this worker alone.
        entries: of the server's `PermitTable`.
        words: uint64 [MAX_SEATS], written by this worker alone.
        sealed: whether connections are encrypted: the client shows a permit in clear, and proves by the first record
            that it knows the permit's key.
    """

    arena: memoryview
    signer: Signer
    nonce: bytes
    tally: np.ndarray[tuple[int], np.dtype[np.uint64]]
    entries: memoryview
    words: memoryview
    sealed: bool = False
    admission: Admission = field(default_factory=Admission)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def count(self, is_write: bool, nbytes: int) -> None:
        with self._counting:
            self.tally[int(is_write)] += np.uint64(nbytes)


class Connection:
    """Serves one client, which `admission` has given a seat, until it disconnects. One thread."""

    def __init__(self, seat: Seat, port: DataPort):
        self._client: Stream = seat.client
        self._seat = seat
        self._port = port
        self._word = TransferWord(port.entries, port.words[seat.number : seat.number + 1])
        self._timeout_s = 0.0

    def serve(self) -> None:
        """Returns when the client has disconnected, was refused, was idle for IDLE_S, or proved nothing in PROVE_S."""
        try:
            self._serve_requests()
        except _RefusedError as refusal:
            self._refuse(refusal.reply)
        except InvalidRequestError as error:
            self._refuse(Reply(Status.INVALID, 0, str(error)))
        except (EOFError, OSError, TransferError):
            pass  # The client has disconnected, its network fails, or it does not know the secret of its permit.

    def _serve_requests(self) -> None:
        prove_by = time.monotonic() + PROVE_S
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._time_out(PROVE_S)
        if self._port.sealed:
            self._client = self._seal(prove_by)
        else:
            self._client.sendall(MAGIC + self._port.nonce)
        permit: _Permit | None = None
        while True:
            now = self._seat.idle_since = time.monotonic()
            header = Header.decode(self._receive(HEADER_BYTES, now + IDLE_S if permit else prove_by))
            self._seat.idle_since = time.monotonic()  # The client may withhold the offsets.
            if header.kind is not Kind.MOVE:
                permit = self._check(header, now + IDLE_S + STALL_S if permit else prove_by)
            elif permit is None:
                raise InvalidRequestError("a transfer was requested before any permit; send a permit first")
            else:
                self._move(permit, header)

    def _seal(self, prove_by: float) -> SealedSocket:
        """Greets the client, and derives the connection's keys from the permit that it names."""
        server_random = secrets.token_bytes(RANDOM_BYTES)
        self._client.sendall(MAGIC + self._port.nonce + server_random)
        hello = self._receive(RANDOM_BYTES + PERMIT_BYTES, prove_by)
        client_random, permit = hello[:RANDOM_BYTES], hello[RANDOM_BYTES:]
        secret = self._port.signer.key_of(permit)
        return SealedSocket(self._seat.client, secret, client_random, server_random, is_client=False)

    def _receive(self, nbytes: int, ends_at: float) -> bytes:
        """The next `nbytes`. Raises TimeoutError if they are not there at `ends_at`, EOFError, OSError."""
        received = bytearray(nbytes)
        left = [memoryview(received)]
        while left:
            remaining_s = ends_at - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            self._time_out(remaining_s)
            left = receive_some(self._client, left)
        return bytes(received)

    def _check(self, header: Header, ends_at: float) -> _Permit:
        """Receives a permit's offsets; raises unless this server signed the permit, for this arena, and it is live."""
        offsets = np.frombuffer(self._receive(8 * header.stop, ends_at), "<u8")
        terms = self._port.signer.terms(header, offsets)
        if isinstance(self._client, SealedSocket):
            # Permits are shown in clear when connections begin: who has seen one must not be able to use it.
            proof = proof_of(self._port.signer.key_of(header.permit), self._client.channel_id)
            if not hmac.compare_digest(proof, self._receive(PROOF_BYTES, ends_at)):
                terms = None
        if terms is None:
            raise _RefusedError(Status.REFUSED, "the permit is not for these regions, or of another boot")
        if int(offsets.max()) + header.region_bytes > len(self._port.arena):
            raise InvalidRequestError(
                f"regions of {header.region_bytes} bytes reach beyond the arena of {len(self._port.arena)} bytes"
            )
        permit = _Permit(header, terms, offsets)
        bound = self._word.bound(terms)
        self._remaining_s(permit)
        if not self._port.admission.prove(self._seat, bound):
            raise _RefusedError(
                Status.BUSY, "this caller's share of the data worker's connections is moving bytes; try again later"
            )
        return permit

    def _move(self, permit: _Permit, header: Header) -> None:
        if header.stop > len(permit.offsets):
            raise InvalidRequestError(f"regions [{header.first}, {header.stop}) of a permit for {len(permit.offsets)}")
        if header.skip_bytes + header.region_bytes > (most := permit.header.region_bytes):
            raise InvalidRequestError(
                f"{header.region_bytes} bytes from {header.skip_bytes} on of regions of {most} bytes"
            )
        views = self._views(permit, header)
        nbytes = (header.stop - header.first) * header.region_bytes
        is_write = permit.header.kind is Kind.WRITE
        reply = Reply(Status.OK, nbytes).encode()
        self._seat.idle_since = None
        self._word.begin(permit.header.holding_id)
        try:
            self._remaining_s(permit)
            if is_write:
                self._move_all(permit, receive_some, pieces(views, WRITTEN_PIECE_BYTES))
            else:
                self._move_all(permit, send_some, pieces_behind(reply, views))
        finally:
            self._word.end()
        if is_write:  # Not before the word is cleared: what the client does next may end the ticket.
            self._client.sendall(reply)
        self._port.count(is_write, nbytes)

    def _move_all(self, permit: _Permit, move_some: MoveSome, cut: Iterable[list[memoryview]]) -> None:
        """Moves pieces while the permit is in force, and the client is not silent for STALL_S."""
        is_begun = False
        moved_at = time.monotonic()
        for piece in cut:
            while piece:
                self._time_out(min(self._remaining_s(permit, is_begun), LOOK_EVERY_S))
                try:
                    piece = move_some(self._client, piece)
                except BlockingIOError:
                    self._seat.idle_since = moved_at
                    if time.monotonic() - moved_at > STALL_S:
                        raise
                else:
                    moved_at, self._seat.idle_since = time.monotonic(), None
                    is_begun = permit.header.kind is Kind.READ

    def _views(self, permit: _Permit, header: Header) -> list[memoryview]:
        """The bytes to move; those that adjoin are one view."""
        runs: list[tuple[int, int]] = []
        for region in permit.offsets[header.first : header.stop].tolist():
            start = region + header.skip_bytes
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + header.region_bytes)
            else:
                runs.append((start, start + header.region_bytes))
        return [self._port.arena[start:stop] for start, stop in runs]

    def _remaining_s(self, permit: _Permit, is_begun: bool = False) -> float:
        """Time until the permit's deadline. Raises if that has passed, or if the ticket or lease has ended.

        `is_begun`: a read, of which the client has got bytes of the payload.
        """
        remaining_s = (permit.terms.deadline_ns - time.monotonic_ns()) / 1e9
        if remaining_s > 0 and self._word.is_live(permit.header.holding_id, permit.terms):
            return remaining_s
        ended = "was ended" if remaining_s > 0 else "has expired"
        if is_begun:
            raise EOFError(f"the ticket or lease {ended} in the middle of a payload, where no status fits")
        raise _RefusedError(Status.EXPIRED, f"the ticket or lease of this permit {ended}")

    def _time_out(self, seconds: float) -> None:
        """Bounds the next waits. Two system calls, which most waits need not make."""
        if not seconds <= self._timeout_s <= seconds * 1.02:
            time_out(self._client, seconds)
            self._timeout_s = seconds

    def _refuse(self, reply: Reply) -> None:
        """Sends a refusal and reads on for a moment: the kernel discards a reply if unread bytes remain at close."""
        client = self._client
        with contextlib.suppress(OSError, EOFError):
            time_out(client, REFUSAL_S)
            client.sendall(reply.encode())
            client.shutdown(socket.SHUT_WR)
            ends_at, bytes_left = time.monotonic() + REFUSAL_S, REFUSAL_BYTES
            while bytes_left > 0 and time.monotonic() < ends_at and (received := len(client.recv(1 << 18))):
                bytes_left -= received


def serve(listener: socket.socket, port: DataPort) -> None:
    """Serves the connections of a listening socket, a thread each; returns when the socket is closed."""
    while True:
        try:
            client, address = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            time.sleep(ACCEPT_AGAIN_S)  # Too many open files, or the client has disconnected already.
            continue
        seat = port.admission.admit(client, address[0])
        if seat is not None:
            try:
                threading.Thread(target=_serve_client, args=(seat, port), name="kvpool-data", daemon=True).start()
                continue
            except RuntimeError:  # No memory for another thread: the connections that exist go on.
                port.admission.leave(seat)
        with client:
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.send(MAGIC + NO_ROOM + bytes(RANDOM_BYTES * port.sealed))


def _serve_client(seat: Seat, port: DataPort) -> None:
    with seat.client:
        try:
            Connection(seat, port).serve()
        finally:
            port.admission.leave(seat)


def main() -> None:
    """Serves until the server ends."""
    settings = receive_settings()
    exit_with_parent()
    segment = Segment(settings["segment_fd"], settings["nbytes"])
    segment.hold()
    row = settings["row"]
    port = DataPort(
        segment.bytes.data,
        Signer(bytes.fromhex(settings["key"])),
        bytes.fromhex(settings["nonce"]),
        np.frombuffer(mmap.mmap(settings["tally_fd"], 0), np.uint64).reshape(-1, TALLY_COLUMNS)[row],
        map_words(settings["entries_fd"], writable=False),
        map_words(settings["words_fd"], writable=True)[row * MAX_SEATS : (row + 1) * MAX_SEATS],
        settings["sealed"],
    )
    listener = socket.socket(fileno=settings["listen_fd"])
    with contextlib.suppress(BrokenPipeError):  # The server has ended, and this process ends in a moment.
        os.write(sys.stdout.fileno(), b"ready\n")
    segment.map_ahead()
    serve(listener, port)


if __name__ == "__main__":
    main()
