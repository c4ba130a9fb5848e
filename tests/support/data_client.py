"""A client of the data port that sends what it likes, whenever it likes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType

from kvpool.transport.data_port import (
    GREETING_BYTES,
    MAGIC,
    NO_ROOM,
    REPLY_BYTES,
    Header,
    Kind,
    Reply,
    Status,
    Stream,
    pack_offsets,
    receive_some,
)


def receive_exactly(connection: Stream, nbytes: int) -> bytes:
    """The next `nbytes`. Raises EOFError if the peer has closed the connection, OSError if it has failed."""
    received = bytearray(nbytes)
    left = [memoryview(received)] if nbytes else []
    while left:
        left = receive_some(connection, left)
    return bytes(received)


class DataClient:
    """One connection, with a deadline on each wait. Raises ConnectionRefusedError if there is no room for it.

    Raises (every method): OSError, EOFError if the worker hangs up.
    """

    def __init__(self, port: int, nonce: bytes):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        greeting = self.receive(GREETING_BYTES)
        if greeting == MAGIC + NO_ROOM:
            self.socket.close()
            raise ConnectionRefusedError("the data port has no room")
        assert greeting == MAGIC + nonce

    def __enter__(self) -> DataClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def show(self, kind: Kind, holding_id: int, offsets: Sequence[int], region_bytes: int, permit: bytes) -> None:
        header = Header(kind, 0, len(offsets), region_bytes, holding_id=holding_id, permit=permit)
        self.socket.sendall(header.encode() + pack_offsets(offsets).tobytes())

    def move(self, first: int, stop: int, nbytes: int, payload: bytes = b"") -> None:
        """Requests bytes [0, nbytes) of each region, or announces them and sends the first of them."""
        self.socket.sendall(Header(Kind.MOVE, first, stop, nbytes).encode() + payload)

    def receive(self, nbytes: int) -> bytes:
        return receive_exactly(self.socket, nbytes)

    def reply(self) -> Status:
        status, message_bytes, _ = Reply.decode(self.receive(REPLY_BYTES))
        self.receive(message_bytes)
        return status
