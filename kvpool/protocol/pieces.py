"""Requests in pieces: messages are small, so that a server bounds what a caller can make it buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        self._channel = channel
        self.stream_stream = channel.stream_stream

    def unary_unary(
        self, path: str, request_serializer: _Encode, response_deserializer: Any, **options: Any
    ) -> _Method:
        methods = (self._channel.unary_unary, self._channel.stream_unary)
        return _Method(request_serializer, *(each(path, None, response_deserializer, **options) for each in methods))

    def unary_stream(
        self, path: str, request_serializer: _Encode, response_deserializer: Any, **options: Any
    ) -> _Method:
        methods = (self._channel.unary_stream, self._channel.stream_stream)
        return _Method(request_serializer, *(each(path, None, response_deserializer, **options) for each in methods))

    def stream_unary(
        self, path: str, request_serializer: _Encode, response_deserializer: Any, **options: Any
    ) -> _Method:
        many = self._channel.stream_unary(path, None, response_deserializer, **options)
        return _Method(request_serializer, None, many)


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
            return self._many, self._pieces_of(request)
        encoded = self._encode(request)
        return (self._one, encoded) if len(encoded) < MESSAGE_BYTES else (self._many, pieces(encoded))

    def _pieces_of(self, requests: Iterable[Any]) -> Iterator[bytes]:
        for request in requests:
            yield from pieces(self._encode(request))
