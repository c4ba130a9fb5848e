"""The data port's wire format, and the permits that it asks for. Shared by the client and the server's data workers.

A worker maps the arena and knows nothing of the pool. What a client may touch is written in its permit: a keyed hash
over the ticket or lease, its deadline, and every region of it, made by the server when it granted them.
docs/protocol.md tells the conversation. Imports no gRPC: a worker is to start fast.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import itertools
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidRequestError

MAGIC = b"kvpool1\n"
NONCE_BYTES = 16
NO_ROOM = bytes(NONCE_BYTES)
"""A greeting's nonce where there are too many connections."""

GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAC_BYTES = 16
PERMIT_BYTES = 8 + MAC_BYTES
MAX_REGIONS = 65_536
MAX_MESSAGE_BYTES = 1_024
PIECE_BYTES = 1 << 20
"""Most bytes between two looks at the deadline."""

MAX_BUFFERS = 512
"""Of one call to the kernel, which takes 1,024."""

_HEADER = struct.Struct("<BxxxIIQQ24s")
_REPLY = struct.Struct("<BxxxIQ")
_SIGNED = struct.Struct("<BQqQI")
_DEADLINE = struct.Struct("<q")
HEADER_BYTES, REPLY_BYTES = _HEADER.size, _REPLY.size

Offsets = npt.NDArray[np.uint64]


class Kind(enum.IntEnum):
    """What a header is about."""

    WRITE = 1
    """A permit to write: `stop` offsets follow. Not answered."""
    READ = 2
    """A permit to read: `stop` offsets follow. Not answered."""
    MOVE = 3
    """Regions [first, stop) of the permit: their bytes follow, or are asked for. Answered."""


class Status(enum.IntEnum):
    """What a worker answers to a MOVE. After anything but OK it hangs up."""

    OK = 0
    INVALID = 1
    REFUSED = 2
    EXPIRED = 3
    BUSY = 4


@dataclass(frozen=True, slots=True)
class Header:
    """See `Kind` for what `first` and `stop` mean; the other fields are of permits only.

    Args:
        holding_id: of the ticket or lease.
        region_bytes: of every region.
        permit: `PERMIT_BYTES`, as the server gave it.
    """

    kind: Kind
    first: int
    stop: int
    holding_id: int = 0
    region_bytes: int = 0
    permit: bytes = bytes(PERMIT_BYTES)

    def encode(self) -> bytes:
        return _HEADER.pack(self.kind, self.first, self.stop, self.holding_id, self.region_bytes, self.permit)

    @classmethod
    def decode(cls, packed: bytes) -> Header:
        """Raises InvalidRequestError for what no client of this version sends."""
        kind, first, stop, holding_id, region_bytes, permit = _HEADER.unpack(packed)
        if kind not in Kind.__members__.values():
            raise InvalidRequestError(f"a header of kind {kind}; is this a client of another release?")
        if not first < stop <= MAX_REGIONS or (kind != Kind.MOVE and first):
            raise InvalidRequestError(f"regions [{first}, {stop}); give 1 to {MAX_REGIONS} of them")
        return cls(Kind(kind), first, stop, holding_id, region_bytes, permit)


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer.

    Args:
        nbytes: of the payload that was taken, or that follows.
        message: what was wrong.
    """

    status: Status
    nbytes: int = 0
    message: str = ""

    def encode(self) -> bytes:
        message = self.message.encode()[:MAX_MESSAGE_BYTES]
        return _REPLY.pack(self.status, len(message), self.nbytes) + message

    @staticmethod
    def decode(packed: bytes) -> tuple[Status, int, int]:
        """Status, bytes of the message that follows, bytes of the payload. Raises InvalidRequestError."""
        status, message_bytes, nbytes = _REPLY.unpack(packed)
        if status not in Status.__members__.values() or message_bytes > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(f"a reply of status {status}; is this a server of another release?")
        return Status(status), message_bytes, nbytes


def pack_offsets(offsets: Sequence[int]) -> Offsets:
    """As they travel: little-endian, 64 bits each."""
    return np.asarray(offsets, "<u8")


class Signer:
    """Makes permits and checks them.

    Args:
        key: 16 to 64 random bytes, the same in the server and in its workers; new with every boot.
    """

    def __init__(self, key: bytes):
        self._key = key

    def permit(self, kind: Kind, holding_id: int, deadline_ns: int, region_bytes: int, offsets: Offsets) -> bytes:
        """The right to touch these regions until `deadline_ns` of the server's CLOCK_MONOTONIC."""
        mac = self._mac(kind, holding_id, deadline_ns, region_bytes, offsets)
        return _DEADLINE.pack(deadline_ns) + mac

    def deadline_ns(self, header: Header, offsets: Offsets) -> int | None:
        """Until when a permit is good; None for one that this signer did not make."""
        (deadline_ns,) = _DEADLINE.unpack_from(header.permit)
        expected = self._mac(header.kind, header.holding_id, deadline_ns, header.region_bytes, offsets)
        return int(deadline_ns) if hmac.compare_digest(expected, header.permit[_DEADLINE.size :]) else None

    def _mac(self, kind: Kind, holding_id: int, deadline_ns: int, region_bytes: int, offsets: Offsets) -> bytes:
        hashed = hashlib.blake2b(key=self._key, digest_size=MAC_BYTES)
        hashed.update(_SIGNED.pack(kind, holding_id, deadline_ns, region_bytes, len(offsets)))
        hashed.update(offsets.tobytes())
        return hashed.digest()


def pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cuts buffers into lists of at most `PIECE_BYTES` and `MAX_BUFFERS`; neighbours in the sequence stay so."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for view in views:
        for at in itertools.count(0, PIECE_BYTES):
            part = view[at : at + PIECE_BYTES]
            if not part:
                break
            if len(part) > room or len(piece) == MAX_BUFFERS:
                yield piece
                piece, room = [], PIECE_BYTES
            piece.append(part)
            room -= len(part)
    if piece:
        yield piece


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Raises EOFError where the other side has hung up, OSError where the connection has ended."""
    taken = bytearray(nbytes)
    receive(connection, [memoryview(taken)] if nbytes else [])
    return bytes(taken)


def receive(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Fills buffers in order; raises as `receive_exactly` does."""
    while buffers:
        buffers = receive_some(connection, buffers)


def receive_some(connection: socket.socket, buffers: list[memoryview]) -> list[memoryview]:
    """Fills buffers in order, or what it can of them before the socket's time is over; what is left of them."""
    if len(buffers) == 1:
        taken = connection.recv_into(buffers[0], 0, socket.MSG_WAITALL)
    else:
        taken = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    if not taken:
        raise EOFError("the other side has hung up")
    return _rest(buffers, taken)


def send(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Sends all of the buffers. Raises OSError."""
    while buffers:
        buffers = send_some(connection, buffers)


def send_some(connection: socket.socket, buffers: list[memoryview]) -> list[memoryview]:
    """Sends buffers, or what it can of them before the socket's time is over; what is left of them."""
    taken = connection.send(buffers[0]) if len(buffers) == 1 else connection.sendmsg(buffers)
    return _rest(buffers, taken)


def _rest(buffers: list[memoryview], taken: int) -> list[memoryview]:
    for nth, buffer in enumerate(buffers):
        if taken < len(buffer):
            return [buffer[taken:], *buffers[nth + 1 :]]
        taken -= len(buffer)
    return []


def time_out(connection: socket.socket, seconds: float) -> None:
    """Bounds each later wait of a blocking socket, in the kernel: without a call to `poll` before each of its own."""
    microseconds = max(1_000, int(seconds * 1e6))  # 0 would be for ever.
    limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
