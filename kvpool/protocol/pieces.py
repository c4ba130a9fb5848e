"""Requests in pieces: messages are small, so that a server bounds what a caller can make it buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

MESSAGE_BYTES = 128 << 10
"""Largest message to a server: 4,000 blocks. One of so many bytes is a piece of a request, whose next piece follows."""

_Encode = Callable[[Any], bytes]


def pieces(request: bytes) -> Iterator[bytes]:
    """The messages of an encoded request. The last one is shorter than `MESSAGE_BYTES`, and may be empty."""
    for at in range(0, len(request) + 1, MESSAGE_BYTES):
        yield request[at : at + MESSAGE_BYTES]


class PiecedChannel:
    """The methods of a `grpc.Channel` that stubs call; requests travel in pieces.

    Streams of requests and replies are left as they are.
    """

    def __init__(self, channel: Any):
        self.unary_unary = partial(_bind, channel.unary_unary, channel.stream_unary)
        self.unary_stream = partial(_bind, channel.unary_stream, channel.stream_stream)
        self.stream_unary = partial(_bind, None, channel.stream_unary)
        self.stream_stream = channel.stream_stream


def _bind(
    one: Any, many: Any, path: str, request_serializer: _Encode, response_deserializer: Any, **options: Any
) -> _Method:
    """The method at `path`, by a channel's way to send one message (None: not needed) and its way to send many."""
    ways = (each and each(path, None, response_deserializer, **options) for each in (one, many))
    return _Method(request_serializer, *ways)


class _Method:
    """A method, with the ways to call it that clients use.

    Args:
        encode: a request as bytes.
        one: takes a request in one message; None: requests come as a stream.
        many: takes the pieces of requests.
    """

    def __init__(self, encode: _Encode, one: Any, many: Any):
        self._encode, self._one, self._many = encode, one, many

    def __call__(self, request: Any, **options: Any) -> Any:
        method, sent = self._prepared(request)
        return method(sent, **options)

    def future(self, request: Any, **options: Any) -> Any:
        method, sent = self._prepared(request)
        return method.future(sent, **options)

    def _prepared(self, request: Any) -> tuple[Any, Any]:
        """What to call, and with what."""
        if self._one is None:
            return self._many, (piece for each in request for piece in pieces(self._encode(each)))
        encoded = self._encode(request)
        return (self._one, encoded) if len(encoded) < MESSAGE_BYTES else (self._many, pieces(encoded))
