"""A real pool in this process whose replies are altered on their way to a client, and what alters them.

The client is the real one: its calls, its stream of lookups, and the checks of replies. Only gRPC is missing: what it
would refuse for its size is refused here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.lookup_stream import LookupStream, StreamedError
from kvpool.client.rpc import PoolRpc
from kvpool.client.transport_choice import Choice
from kvpool.protocol.replies import CONTROL_LIMIT, METHOD_LIMITS
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.rpc.chunks import WRITTEN_BYTES
from kvpool_server.sharing import Limits
from tests.support.memory_transport import MemoryTransport
from tests.support.wire_service import METHODS, WireHouse

_CALLER = Principal(ALL_TENANTS, Role.OPERATOR)
_EXTENT_BYTES, _NUM_EXTENTS = 64 << 10, 16
_NONCE = bytes(range(16))
Alter = Callable[[str, Message], bytes]
"""What becomes of a method's reply."""


class LyingPool:
    """See the module.

    Attributes:
        alter: None while the pool is honest.
        clock: the pool's; leases and tickets that lies have left behind expire by it.
        num_altered: replies that were altered.
    """

    def __init__(self) -> None:
        size = _EXTENT_BYTES * _NUM_EXTENTS
        whole = {"nbytes": size, "nonce": _NONCE, "nonce_offset": size}
        offer = pb.PingResponse(
            piece_bytes=WRITTEN_BYTES,
            segment=pb.Segment(token=bytes(16), **whole),
            mooncake=pb.MooncakeEngine(session="127.0.0.1:12345", protocol="tcp", base_address=1 << 40, **whole),
            data_port=pb.DataPort(host="127.0.0.1", port=50_052, nonce=_NONCE),
        )
        self._house = WireHouse(size, _EXTENT_BYTES, Limits(max_batch_blocks=256), offer=offer)
        self.clock, self.pool, self.memory = self._house.clock, self._house.pool, self._house.memory
        self.alter: Alter | None = None
        self.num_altered = 0
        self._serving = threading.RLock()
        for name in METHODS:
            setattr(self, name, _Method(self, name))

    def client(self, config: ClientConfig) -> Client:
        rpc = PoolRpc(config, self, LookupStream(self), self)
        return Client(config, rpc, lambda *_: Choice(_Memory(self.memory), "memory"))

    def stream_stream(self, *_: object) -> Callable[..., _Replies]:
        """As of a channel: the stream of lookups."""
        return self._lookup_stream

    def close(self) -> None:
        """As of a channel: nothing to close."""

    def serve(self, method: str, *requests: Message) -> Sequence[Message]:
        """The replies, as a client parses them. Raises grpc.RpcError."""
        return [self._sent(method, reply) for reply in self._replies(method, *requests)]

    def _replies(self, method: str, *requests: Message) -> Sequence[Message]:
        with self._serving:
            answer = self._house.service.call(_CALLER, method, *requests)
        if answer.code is not grpc.StatusCode.OK:
            raise StreamedError(answer.code, answer.message)
        return answer.replies

    def _sent(self, method: str, reply: Message) -> Any:
        if self.alter is None:
            return reply
        packed = self._altered(method, reply)
        if len(packed) > METHOD_LIMITS.get(method, CONTROL_LIMIT):
            raise StreamedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max")
        try:
            return type(reply).FromString(packed)
        except DecodeError:
            raise StreamedError(grpc.StatusCode.INTERNAL, "Exception deserializing response!") from None

    def _altered(self, method: str, reply: Message) -> bytes:
        assert self.alter is not None
        self.num_altered += 1
        return self.alter(method, reply)

    def _lookup_stream(self, requests: Iterator[bytes], timeout: float) -> _Replies:
        def replies() -> Iterator[bytes]:
            for request in requests:
                for reply in self._replies("LookupStream", pb.LookupRequest.FromString(request)):
                    whole = reply.SerializeToString()
                    yield whole if self.alter is None else self._altered("LookupStream", reply)

        return _Replies(replies())


class _Memory(MemoryTransport):
    name = "shm"  # Engines count connections by the name.


class _Replies:
    """The part of a streaming call that clients use."""

    def __init__(self, replies: Iterator[Any]):
        self._replies = replies
        self._cancelled = threading.Event()

    def __iter__(self) -> _Replies:
        return self

    def __next__(self) -> Any:
        if self._cancelled.is_set():
            raise StreamedError(grpc.StatusCode.CANCELLED, "cancelled")
        return next(self._replies)

    def cancel(self) -> None:
        self._cancelled.set()


class _Method:
    def __init__(self, pool: LyingPool, name: str):
        self._pool, self._name = pool, name

    def __call__(self, request: Any, timeout: float) -> Any:
        method = METHODS[self._name]
        replies = self._pool.serve(self._name, *(request if method.client_streaming else [request]))
        return _Replies(iter(replies)) if method.server_streaming else replies[0]

    def future(self, request: Any, timeout: float) -> _Ended:
        try:
            return _Ended(self(request, timeout), None)
        except grpc.RpcError as error:
            return _Ended(None, error)


class _Ended:
    """The part of `grpc.Future` that clients use, of a call that has ended."""

    def __init__(self, reply: Any, error: grpc.RpcError | None):
        self._reply, self._error = reply, error

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._reply

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def cancel(self) -> None:
        """Nothing to end."""


# What alters replies

_INTS = (0, 1, 2, 7, 8, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_TEXTS = (
    "",
    "x",
    "a" * 5_000,
    "[/bold][red]",
    "one\ntwo\x1b[31m",
    "\u202etxt",
    "0.0.0.0:0",
    "[::]:99999",
    "/etc/passwd",
)
_FLOATS = (0.0, -1.0, 1e308, float("inf"), float("nan"))
_MAX_SIZE, _MAX_DIFFERENT = 300, 3
_MAX_LIST_BYTES = 1 << 20
"""Of lists in lists: without this bound some would have 100 MiB, which the test's process would have to make."""


def altered(message: Message, dice: random.Random) -> bytes:
    """A reply that is nearly like `message`, has only its type, or is no message at all."""
    roll = dice.random()
    if roll < 0.1:
        return _random_message(message, dice).SerializeToString()
    if roll < 0.25:
        return flipped(message.SerializeToString(), dice)
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(dice.choice((1, 1, 2, 4))):
        _alter_field(dice.choice(_messages(copy)), dice)
    return copy.SerializeToString()


def flipped(packed: bytes, dice: random.Random) -> bytes:
    """Bytes that differ from these in a few places, by flips, cuts and insertions."""
    mutable = bytearray(packed)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(mutable) + 1)
        match dice.randrange(4):
            case 0 if mutable:
                mutable[at % len(mutable)] ^= 1 << dice.randrange(8)
            case 1:
                del mutable[at : at + dice.randrange(1, 9)]
            case 2:
                mutable[at:at] = dice.randbytes(dice.randrange(1, 9))
            case _:
                mutable[at:at] = mutable[: dice.randrange(64)]
    return bytes(mutable)


def _messages(message: Message) -> list[Message]:
    """The message and those inside it."""
    found = [message]
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            for inner in value if field.is_repeated else [value]:
                found += _messages(inner)
    return found


def _random_message(like: Message, dice: random.Random, depth: int = 0) -> Message:
    made = type(like)()
    for field in made.DESCRIPTOR.fields:
        if dice.random() < 0.7:
            _alter_field(made, dice, field, depth)
    return made


def _alter_field(message: Message, dice: random.Random, field: FieldDescriptor | None = None, depth: int = 0) -> None:
    field = field or dice.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        match dice.randrange(5):
            case 0:
                message.ClearField(field.name)
            case 1 if len(value) and not _is_map(field):
                del value[dice.randrange(len(value))]
            case 2 if len(value) and not _is_map(field):
                value.extend(list(value))
            case _:
                _extend(value, field, dice, depth)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if dice.random() < 0.3 or depth > 3:
            message.ClearField(field.name)
        else:
            value.CopyFrom(_random_message(value, dice, depth + 1))
    elif field.type == FieldDescriptor.TYPE_BOOL:
        setattr(message, field.name, not value)
    else:
        setattr(message, field.name, _scalar(field, value, dice))


def _extend(value: Any, field: FieldDescriptor, dice: random.Random, depth: int) -> None:
    size = dice.choice((1, 2, 3, _MAX_SIZE))
    if _is_map(field):
        content = field.message_type.fields_by_name["value"]
        for nth in range(size):
            value[dice.choice(_TEXTS) + str(nth)[: dice.randrange(3)]] = _scalar(content, None, dice)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        like, size = GetMessageClass(field.message_type)(), size if depth < 2 else 1
        # Long lists repeat a few messages: to make each message at random takes most of the CPU time of a fuzz test.
        different = [_random_message(like, dice, depth + 1) for _ in range(min(size, _MAX_DIFFERENT))]
        most = 1 + _MAX_LIST_BYTES // (1 + max(each.ByteSize() for each in different))
        value.extend(different[nth % len(different)] for nth in range(min(size, most)))
    else:
        value.extend(_scalar(field, value[0] if len(value) else None, dice) for _ in range(size))


_BITS = {
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_ENUM: 31,
}
"""Of the largest value of a type; 64 for all others."""


def _scalar(field: FieldDescriptor, value: Any, dice: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return dice.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            old = value or b""
            return dice.choice((b"", old[:-1], old + b"\0", old + old, flipped(old, dice), dice.randbytes(_MAX_SIZE)))
        case FieldDescriptor.CPPTYPE_STRING:
            return dice.choice((*_TEXTS, (value or "") + dice.choice(_TEXTS)))
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
    most = (1 << _BITS.get(field.cpp_type, 64)) - 1
    near = (max(0, (value or 0) - 1), (value or 0) + 1)
    return min(most, dice.choice((*_INTS, *near)))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
