"""What the server and Mooncake's client process tell each other: msgpack with a length before it, over a stream socket.

Mooncake parses what comes from the network, so its process may have been taken over: whatever it sends is bounded in
length and checked for its type before the server uses it, and cannot make the server wait beyond a deadline.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 1 << 20
MAX_KEYS = 1024
"""Keys of one call: Mooncake's puts of 4,096 keys at once fail over TCP."""
MAX_KEY_CHARS = 512
MAX_TEXT_CHARS = 4096
SEND_S = 10.0
"""A peer that does not read is given up after so long. The socket's buffer holds the longest request of a tier."""

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16

Call = Literal["ping", "exist", "put", "get", "remove", "clear"]
Key = Annotated[str, Meta(max_length=MAX_KEY_CHARS)]
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call.

    Args:
        keys: of objects; for "clear" patterns of keys.
        offsets, sizes: in the staging memory, bytes, for each key of a call that moves bytes.
    """

    what: Call
    keys: Annotated[list[Key], Meta(max_length=MAX_KEYS)] = []
    offsets: Annotated[list[Size], Meta(max_length=MAX_KEYS)] = []
    sizes: Annotated[list[Size], Meta(max_length=MAX_KEYS)] = []


REQUEST = msgspec.msgpack.Decoder(Request)
CODES = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]], Meta(max_length=MAX_KEYS)]
)
"""Mooncake's code for each key of a call."""
TEXT = msgspec.msgpack.Decoder(Annotated[str, Meta(max_length=MAX_TEXT_CHARS)])
"""Why the process cannot start; empty if it has."""


class MessageError(Exception):
    """The peer has sent something that is no message of the expected type."""


class MessageSocket:
    """One end of a channel, for one thread at a time."""

    def __init__(self, end: socket.socket):
        self._socket = end
        self._received = bytearray()

    def send(self, message: Any) -> None:
        """Raises OSError if the peer has ended, or does not read."""
        payload = msgspec.msgpack.encode(message)
        assert len(payload) <= MAX_MESSAGE_BYTES, "no peer accepts this message"
        self._socket.settimeout(SEND_S)
        self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], timeout_s: float | None) -> T | None:
        """The next message; None if it is not complete in time. `timeout_s` None: no deadline.

        Raises MessageError, EOFError if the peer has ended, or OSError.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        while (payload := self._pop()) is None:
            left_s = None if ends_at is None else ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._socket.settimeout(left_s)
            try:
                received = self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                return None
            if not received:
                raise EOFError("the peer has ended")
            self._received += received
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"an invalid message ({error})") from None

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _pop(self) -> bytes | None:
        """The next whole message's bytes."""
        if len(self._received) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._received)
        if nbytes > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message of {nbytes} bytes")
        end = _LENGTH.size + nbytes
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return payload
