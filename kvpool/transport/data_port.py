"""The data port's wire format, and the permits that it requires. Shared by the client and the server's data workers.

A data worker maps the arena and does not know the pool's state. A permit says which regions a client may access: a
keyed hash over the ticket or lease, its deadline, and every region, made by the server when it granted them. The permit
ends with its ticket or lease, or at the deadline: it names an entry of a table in which the server says which are live.
docs/reference/protocol.md describes the protocol. This module does not import gRPC, so that a data worker starts fast.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import NONCE_BYTES, PERMIT_BYTES, PERMIT_KEY_BYTES
from kvpool.transport.sealed_socket import SealedSocket, without

MAGIC = b"kvpool3\n"
NO_ROOM = bytes(NONCE_BYTES)
"""The greeting's nonce if the data port accepts no more connections."""

GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAC_BYTES = 16
PROOF_BYTES = 16
MAX_REGIONS = 65_536
MAX_MESSAGE_BYTES = 1_024
PIECE_BYTES = 16 << 20
"""Most bytes of a system call: each gives up Python's lock, which many threads may want, and waits to get it back."""

WRITTEN_PIECE_BYTES = 1 << 20
"""The same for a data worker that writes into the arena: most bytes between two looks at the clock."""

MAX_BUFFERS = 512
"""Most buffers of one system call; Linux accepts 1,024."""

_HEADER = struct.Struct("<BxxxIIQQQ28s")
_REPLY = struct.Struct("<BxxxIQ")
_SIGNED = struct.Struct("<BQqIQI")
_TERMS = struct.Struct("<qI")
HEADER_BYTES, REPLY_BYTES = _HEADER.size, _REPLY.size

Offsets = npt.NDArray[np.uint64]
Stream = socket.socket | SealedSocket
MoveSome = Callable[[Stream, list[memoryview]], list[memoryview]]
"""`send_some`, or `receive_some`."""


class Kind(enum.IntEnum):
    """What a header announces."""

    WRITE = 1
    """A permit to write: `stop` offsets follow. Not answered."""
    READ = 2
    """A permit to read: `stop` offsets follow. Not answered."""
    MOVE = 3
    """Bytes [skip_bytes, skip_bytes + region_bytes) of each of the permit's regions [first, stop): they follow (write)
    or are requested (read). Answered."""


class Status(enum.IntEnum):
    """A worker's answer to a MOVE. After any other than OK the worker closes the connection."""

    OK = 0
    INVALID = 1
    REFUSED = 2
    EXPIRED = 3
    BUSY = 4


class Header(NamedTuple):
    """A request's header, in the order of its bytes. `Kind` says what `first` and `stop` mean.

    Args:
        region_bytes: of every region; of a MOVE: how many of them move.
        skip_bytes: of a MOVE: where in every region they begin.
        holding_id: of the permit's ticket or lease.
        permit: `PERMIT_BYTES`, as the server gave it.
    """

    kind: Kind
    first: int
    stop: int
    region_bytes: int
    skip_bytes: int = 0
    holding_id: int = 0
    permit: bytes = bytes(PERMIT_BYTES)

    def encode(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def decode(cls, packed: bytes) -> Header:
        """Raises InvalidRequestError for a header that no client of this release sends."""
        header = cls._make(_HEADER.unpack(packed))
        kind, first, stop = header[:3]
        if kind not in Kind.__members__.values():
            raise InvalidRequestError(f"unknown header kind {kind}; install the same release of kvpool on both sides")
        if not first < stop <= MAX_REGIONS or (kind != Kind.MOVE and first):
            raise InvalidRequestError(f"invalid regions [{first}, {stop}); give 1 to {MAX_REGIONS} of them")
        if not header.region_bytes:
            raise InvalidRequestError("regions of 0 bytes; give the bytes of each region")
        return header._replace(kind=Kind(kind))


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer.

    Args:
        nbytes: of the payload that was written, or that follows.
        message: the error.
    """

    status: Status
    nbytes: int = 0
    message: str = ""

    def encode(self) -> bytes:
        message = self.message.encode()[:MAX_MESSAGE_BYTES]
        return _REPLY.pack(self.status, len(message), self.nbytes) + message

    @staticmethod
    def decode(packed: bytes | bytearray) -> tuple[Status, int, int]:
        """Status, bytes of the message that follows, bytes of the payload. Raises InvalidRequestError."""
        status, message_bytes, nbytes = _REPLY.unpack(packed)
        if status not in Status.__members__.values() or message_bytes > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"unknown reply status {status}; install the same release of kvpool on both sides"
            )
        return Status(status), message_bytes, nbytes


def pack_offsets(offsets: Sequence[int] | Offsets) -> Offsets:
    """Offsets in the form in which they are sent: little-endian, 64 bits each."""
    return np.asarray(offsets, "<u8")


class Terms(NamedTuple):
    """What a permit says of its ticket or lease.

    Args:
        deadline_ns: of the server's CLOCK_MONOTONIC.
        entry: index in the server's table of live tickets and leases.
    """

    deadline_ns: int
    entry: int


class Signer:
    """Makes permits and checks them, by 16 to 64 random bytes that server and workers share; new with every boot."""

    def __init__(self, key: bytes):
        self._key = key

    def permit(self, kind: Kind, holding_id: int, terms: Terms, region_bytes: int, offsets: Offsets) -> bytes:
        """A permit for these regions."""
        return _TERMS.pack(*terms) + self._mac(kind, holding_id, terms, region_bytes, offsets)

    def key_of(self, permit: bytes) -> bytes:
        """The secret that a client gets together with a permit, inside TLS: whoever knows it may use the permit."""
        return hashlib.blake2b(permit, key=self._key, digest_size=PERMIT_KEY_BYTES, person=b"kvpool-seal").digest()

    def terms(self, header: Header, offsets: Offsets) -> Terms | None:
        """The terms of a header's permit; None if this signer did not make the permit for these regions."""
        terms = Terms._make(_TERMS.unpack_from(header.permit))
        expected = self._mac(header.kind, header.holding_id, terms, header.region_bytes, offsets)
        return terms if hmac.compare_digest(expected, header.permit[_TERMS.size :]) else None

    def _mac(self, kind: Kind, holding_id: int, terms: Terms, region_bytes: int, offsets: Offsets) -> bytes:
        hashed = hashlib.blake2b(key=self._key, digest_size=MAC_BYTES)
        hashed.update(_SIGNED.pack(kind, holding_id, *terms, region_bytes, len(offsets)))
        hashed.update(offsets.tobytes())
        return hashed.digest()


def proof_of(permit_key: bytes, channel_id: bytes) -> bytes:
    """Shows, on one sealed connection, that its sender knows a permit's key."""
    return hashlib.blake2b(channel_id, key=permit_key, digest_size=PROOF_BYTES, person=b"kvpool-proof").digest()


def pieces(views: Sequence[memoryview], piece_bytes: int = PIECE_BYTES) -> Iterator[list[memoryview]]:
    """Cuts buffers into lists of at most `piece_bytes` and `MAX_BUFFERS`, in order."""
    piece: list[memoryview] = []
    room = piece_bytes
    for view in views:
        for at in range(0, len(view), piece_bytes):
            part = view[at : at + piece_bytes]
            if len(part) > room or len(piece) == MAX_BUFFERS:
                yield piece
                piece, room = [], piece_bytes
            piece.append(part)
            room -= len(part)
    if piece:
        yield piece


def pieces_behind(head: bytes | bytearray, views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """`pieces` of some buffers, the first of them behind a header."""
    cut = pieces(views)
    yield [memoryview(head), *next(cut, [])]
    yield from cut


def receive_some(connection: Stream, buffers: list[memoryview]) -> list[memoryview]:
    """Fills buffers in order until the socket's timeout; returns what is left to fill.

    Raises EOFError if the peer has closed the connection, OSError if it has failed.
    """
    if isinstance(connection, SealedSocket):
        return connection.receive_some(buffers)
    if len(buffers) == 1:
        received = connection.recv_into(buffers[0], 0, socket.MSG_WAITALL)
    else:
        received = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    if not received:
        raise EOFError("the peer has closed the connection")
    return without(buffers, received)


def send_some(connection: Stream, buffers: list[memoryview]) -> list[memoryview]:
    """Sends buffers in order until the socket's timeout; returns what is left to send. Raises OSError."""
    if isinstance(connection, SealedSocket):
        return connection.send_some(buffers)
    sent = connection.send(buffers[0]) if len(buffers) == 1 else connection.sendmsg(buffers)
    return without(buffers, sent)


def time_out(connection: Stream, seconds: float) -> None:
    """Bounds each later wait of a blocking socket in the kernel, which saves a `poll` before each system call."""
    microseconds = max(1_000, int(seconds * 1e6))  # 0 would mean no timeout.
    limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
