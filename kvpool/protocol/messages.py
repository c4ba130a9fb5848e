"""Messages of any type: requests are sent in pieces, replies to operators' calls are checked, and shown as JSON.

Messages to a server are small, so that it bounds what a caller can make it buffer.

A server may be broken, hostile or of another release. `checked` bounds what a reply holds, by the type of each field,
and escapes text, which ends up in logs and on terminals. No field has a check of its own. Time is in proportion to
`MAX_PARTS`, never to what a reply claims; the size of a reply that is parsed at all is bounded by `METHOD_LIMITS`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvpool.protocol.errors import InvalidReplyError
from kvpool.protocol.text import escaped
from kvpool.protocol.types import HASH_BYTES, MAX_DRAIN_MS

MESSAGE_BYTES = 128 << 10
"""Largest message to a server: 4,000 blocks. One of so many bytes is a piece of a request, whose next piece follows."""
MAX_PARTS = 500_000
"""Elements of all lists and maps of one reply together."""
MAX_ELEMENTS = 4_096
"""Elements of one list or map, outside of a namespace's spec."""
MAX_TEXT_CHARS = 2_000
MAX_SPEC_CHARS = 256 << 10
"""Longest text of a namespace's spec: engines choose it, and no engine may spoil an operator's list."""
_OF_SPEC = ("NamespaceSpec", "GroupSpec", "ExtraEntry")
MAX_NUMBER = 1e18
"""Largest number with a fraction: seconds, tokens, multiples."""
MAX_UNIX_S = 253_402_300_799
"""End of the year 9999, the latest that `datetime` knows. Only Unix times have the type int64."""
_MOST = {"http_port": 65_535, "hit_ratio": 1, "hit_ratio_with_tiers": 1, "remaining_ms": MAX_DRAIN_MS}
"""Numbers with a bound below that of their type, by name."""

_M = TypeVar("_M", bound=Message)


def checked(reply: _M) -> _M:
    """The same reply, all of whose fields are in bounds and whose texts can be printed.

    Raises InvalidReplyError, which names the field, its value and its bound.
    """
    left = MAX_PARTS

    def check(message: Message, path: str) -> None:
        nonlocal left
        for field, value in message.ListFields():
            where = f"{path}.{field.name}"
            if isinstance(value, Message):
                check(value, where)
                continue
            if isinstance(value, str | bytes | int | float):
                if (shown := _checked(field, value, where)) != value:
                    setattr(message, field.name, shown)
                continue
            most = left if _is_of_spec(field) else min(MAX_ELEMENTS, left)
            left -= len(value)
            if len(value) > most:
                raise InvalidReplyError(f"the server's {where} has {len(value)} elements, too many")
            if isinstance(value, Mapping):
                _check_map(field, value, where)
                continue
            for nth, each in enumerate(value):
                if isinstance(each, Message):
                    check(each, where)
                elif (shown := _checked(field, each, where)) != each:
                    value[nth] = shown

    check(reply, reply.DESCRIPTOR.name)
    return reply


def _check_map(field: FieldDescriptor, found: Any, where: str) -> None:
    assert field.message_type is not None
    of_key, of_value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for key, value in list(found.items()):
        if not isinstance(value, str) and not key.isidentifier():
            raise InvalidReplyError(f"the server's {where} has {escaped(repr(key), 64)}, which is no name")
        shown_key, shown = _checked(of_key, key, where), _checked(of_value, value, where)
        if (shown_key, shown) != (key, value):
            del found[key]
            found[shown_key] = shown


def _checked(field: FieldDescriptor, value: Any, where: str) -> Any:
    """A value in its bounds; text without anything that cannot be printed."""
    if isinstance(value, str):
        most = MAX_SPEC_CHARS if _is_of_spec(field) else MAX_TEXT_CHARS
        if len(value) > most:
            raise InvalidReplyError(f"the server's {where} has {len(value)} characters, more than {most}")
        return escaped(value, most)
    if isinstance(value, bytes):
        if len(value) != HASH_BYTES:  # Of a fingerprint: these replies have no other bytes.
            raise InvalidReplyError(f"the server's {where} has {len(value)} bytes, not {HASH_BYTES}")
    elif field.enum_type is not None:
        if value not in field.enum_type.values_by_number:
            raise InvalidReplyError(f"the server's {where} is {value}, which this release does not know")
    elif not 0 <= value <= _most(field):  # NaN is in no range.
        raise InvalidReplyError(f"the server's {where} is {value}, not within 0 to {_most(field)}")
    return value


def _is_of_spec(field: FieldDescriptor) -> bool:
    return field.containing_type is not None and field.containing_type.name in _OF_SPEC


def _most(field: FieldDescriptor) -> float:
    if field.name in _MOST:
        return _MOST[field.name]
    if field.type == FieldDescriptor.TYPE_INT64:
        return MAX_UNIX_S
    return MAX_NUMBER if field.type == FieldDescriptor.TYPE_DOUBLE else 1 << 64


def fields_of(message: Message, text: Callable[[str], str] = str) -> dict[str, Any]:
    """The fields of a message by name, those with default values too, for JSON; without `boot_token`, which has more
    digits than JavaScript's numbers. Messages that are not set are None.

    `MessageToDict` would make texts of 64-bit numbers. `text` shows a text that is of no `checked` reply.
    """
    time.sleep(0)  # In a server: lets the event loop have the interpreter, which a thread may keep for 5 ms otherwise.

    def plain(value: Any) -> Any:
        if isinstance(value, Message):
            return fields_of(value, text)
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, str):
            return text(value)
        return value if math.isfinite(value) else None

    found: dict[str, Any] = {}
    for field in (each for each in message.DESCRIPTOR.fields if each.name != "boot_token"):
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            found[field.name] = {text(name): plain(each) for name, each in value.items()}
        elif isinstance(value, str | bytes | int | float | Message):
            is_set = not field.has_presence or message.HasField(field.name)
            found[field.name] = plain(value) if is_set else None
        else:
            found[field.name] = [plain(each) for each in value]
    return found


def pieces(request: bytes) -> Iterator[bytes]:
    """The messages of an encoded request. The last one is shorter than `MESSAGE_BYTES`, and may be empty."""
    for at in range(0, len(request) + 1, MESSAGE_BYTES):
        yield request[at : at + MESSAGE_BYTES]


class PiecedChannel:
    """The methods of a `grpc.Channel` that stubs call; requests travel in pieces.

    Streams of requests and replies are left as they are.
    """

    def __init__(self, channel: Any):
        self.unary_unary = partial(_Method, channel.unary_unary, channel.stream_unary)
        self.unary_stream = partial(_Method, channel.unary_stream, channel.stream_stream)
        self.stream_unary = partial(_Method, None, channel.stream_unary)
        self.stream_stream = channel.stream_stream


class _Method:
    """A method, with the ways to call it that clients use.

    Args:
        one: the channel's way to send a request in one message; None: requests come as a stream.
        many: its way to send the pieces of requests.
    """

    def __init__(
        self, one: Any, many: Any, path: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ):
        self._encode = request_serializer
        self._one = one and one(path, None, response_deserializer, **options)
        self._many = many(path, None, response_deserializer, **options)

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
