"""What the server and Mooncake's client process tell each other: msgpack over sockets that keep messages whole.

Mooncake parses what comes from the network, so its process may have been taken over: whatever it sends is bounded in
length and checked for its type before the server uses it, and cannot make the server wait beyond a deadline.
"""

from __future__ import annotations

import socket
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 256 << 10
"""The socket's buffer holds the longest request of a tier."""
MAX_KEYS = 1024
"""Keys of one call: Mooncake's puts of 4,096 keys at once fail over TCP."""
MAX_KEY_CHARS = 512
MAX_TEXT_CHARS = 4096
SEND_S = 10.0
"""A peer that does not read is given up after so long."""

T = TypeVar("T")

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


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
    return ends


class MessageSocket:
    """One end of a channel, for one thread at a time."""

    def __init__(self, end: socket.socket):
        self._socket = end

    def send(self, message: Any) -> None:
        """Raises OSError if the peer has ended, or does not read."""
        self._socket.settimeout(SEND_S)
        self._socket.send(msgspec.msgpack.encode(message))

    def receive(self, decoder: msgspec.msgpack.Decoder[T], timeout_s: float | None) -> T | None:
        """The next message; None if there is none in time. `timeout_s` None: no deadline.

        Raises MessageError, EOFError if the peer has ended, or OSError.
        """
        self._socket.settimeout(timeout_s)
        try:
            payload = self._socket.recv(MAX_MESSAGE_BYTES)  # The rest of a longer message is dropped.
        except TimeoutError:
            return None
        if not payload:
            raise EOFError("the peer has ended")
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"an invalid message ({error})") from None

    def close(self) -> None:
        self._socket.close()
