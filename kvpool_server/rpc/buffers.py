"""Bounds what the messages of callers hold: requests that come slowly or in pieces, and replies that nobody reads.

gRPC buffers a message until its last byte has come, and waits for that byte for ever. A handler of one request is
called only after that; therefore the server registers handlers of streams for all methods, which are the same on the
wire, and reads the messages itself. A large request comes in pieces, of which a client sends one before the server
asks for it.

A client that reads nothing leaves each of its calls waiting for room in its window. Small replies are bounded by the
number of calls; the bytes of all others together, and those of one caller, are bounded here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any

import grpc

from kvpool.protocol.errors import BusyError, InvalidRequestError
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.text import size_text
from kvpool_server.access.authentication import Context
from kvpool_server.access.caller import CALLER
from kvpool_server.rpc.turns import when_ended
from kvpool_server.sharing import Shares
from kvpool_server.sharing.fair_slots import FairSlots, Pace

MAX_REQUEST_BYTES = 4 << 20
MAX_DATA_BYTES = MAX_REQUEST_BYTES + (64 << 10)
"""A request with 4 MiB of payload, and with what surrounds it."""
MAX_LARGE, MAX_OWN_LARGE_WAITING = 16, 4
"""Requests in pieces that have not been answered, whose callers take turns, and first pieces that wait for that."""
MESSAGE_S = 10.0
"""How long the first message of a call may be on its way, from when its call was accepted."""
MAX_STREAM_S = 600.0
"""Longest deadline of a call that has a stream, which may otherwise last as long as its client."""
PIECE_S = 30.0
"""How long a call may wait for its client to send the rest of a request or to move data, and anew with each
`PACE_BYTES` that have moved."""
PACE_BYTES = 1 << 20
MAX_DATA_STREAMS = 64
"""Streams of data that are received or sent at once."""
FEW_DATA_STREAMS = 4
"""While no more are under way, their messages take no turns beside those of the event loop."""
MAX_OWN_DATA_STREAMS, MAX_OWN_DATA_WAITING = 16, 256
"""Of them, one identity's, where callers are authenticated: more of one caller's are no faster together. An identity
has no more than are left, either. As many more wait, each with a message that is not decoded."""

SMALL_BYTES = 16 << 10
"""A reply of no more is not counted."""
MAX_UNSENT_BYTES = 128 << 20
"""Of all callers; gRPC holds a reply twice, as bytes and as what it sends. A caller may have as much as is left."""

REQUEST: ContextVar[Any] = ContextVar("kvpool request", default=None)
"""The request of the call that the running handler serves, once it has arrived, for those around the handler."""
_PACE: ContextVar[Pace] = ContextVar("the pace of the running call")


class Inbox:
    """The requests that one server awaits."""

    def __init__(self) -> None:
        self._streams = FairSlots(MAX_DATA_STREAMS, MAX_OWN_DATA_STREAMS, MAX_OWN_DATA_WAITING)
        self._large = FairSlots(MAX_LARGE, MAX_LARGE, MAX_OWN_LARGE_WAITING)

    async def receive(self, context: Context, max_bytes: int) -> bytes:
        """The only request of a call.

        Raises:
            BusyError: the caller has too many large ones under way.
            PoolTimeoutError: its last byte has not come in time.
            InvalidRequestError: there is none, or it is larger than `max_bytes`.
        """
        first = await Pace(MESSAGE_S, 1).wait(context.read())
        if first is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise InvalidRequestError("the call has no request; send one message")
        request, give_back = await self.whole(context, first, max_bytes)
        if give_back is not None:
            when_ended(give_back)
        return request

    async def whole(self, context: Context, first: bytes, max_bytes: int) -> tuple[bytes, Callable[[], object] | None]:
        """A request by its first message, and what ends its place among the large ones, if it has one.

        Raises as `receive`.
        """
        if len(first) < MESSAGE_BYTES:
            _check_size(first, max_bytes)
            return first, None
        give_back = await self._large.take(_caller() or context.peer(), MESSAGE_S, pace=pace())
        try:
            request, piece = bytearray(first), first
            while len(piece) == MESSAGE_BYTES:
                _check_size(request, max_bytes)
                if (piece := await pace().wait(context.read())) is grpc.aio.EOF:  # type: ignore[attr-defined]
                    break
                request += piece
            pace().moved(len(request))
            _check_size(request, max_bytes)
            return bytes(request), give_back
        except BaseException:
            give_back()
            raise

    @property
    def has_many_streams(self) -> bool:
        """Whether the messages of streams of data are to take turns."""
        return self._streams.num_taken > FEW_DATA_STREAMS

    async def stream(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The messages of a stream of data, each of which has to come in time. Raises as `receive`."""
        async with self.slot(context):
            while True:
                message = await pace().wait(context.read())
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                pace().moved(len(message))
                request, give_back = await self.whole(context, message, MAX_DATA_BYTES)
                try:
                    yield request
                finally:
                    if give_back is not None:
                        give_back()

    def slot(self, context: Context) -> AbstractAsyncContextManager[None]:
        """A place among the streams of data. Raises BusyError if none becomes free in time."""
        check_deadline(context)
        return self._streams.slot(_caller(), MESSAGE_S, pace=pace())


class Unsent:
    """A reply's bytes that count, from when it is made until gRPC has sent it, or the call has ended."""

    __slots__ = ("_caller", "_shares", "nbytes")

    def __init__(self, shares: Shares, caller: str, nbytes: int):
        self._shares, self._caller, self.nbytes = shares, caller, nbytes
        shares.add(caller, nbytes)

    def end(self) -> None:
        """The bytes do not count any more. Idempotent."""
        if self.nbytes:
            self._shares.add(self._caller, -self.nbytes)
            self.nbytes = 0


class Outbox:
    """The replies of one server that gRPC has not sent yet. The event loop owns it."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._small = Unsent(self._shares, "", 0)

    def hold(self, caller: str, reply: bytes, undo: Callable[[], object] = lambda: None) -> Unsent:
        """Counts a reply for an identity or a connection.

        Raises BusyError if the caller reads too little, after `undo` of what the caller will not hear of.
        """
        if len(reply) <= SMALL_BYTES:
            return self._small
        if not self._shares.has_room(caller, len(reply), MAX_UNSENT_BYTES):
            undo()
            raise BusyError(
                f"this caller has not read {self._shares.of(caller)} bytes of replies, and this one has {len(reply)}; "
                "read them first"
            )
        return Unsent(self._shares, caller, len(reply))


def pace() -> Pace:
    """The time that the running call has for its client."""
    if (found := _PACE.get(None)) is None:
        _PACE.set(found := Pace(PIECE_S, PACE_BYTES))
    return found


def _caller() -> str:
    """Whose call the running handler serves; empty where callers are not authenticated."""
    return str(CALLER.get() or "")


def _check_size(message: bytes | bytearray, max_bytes: int) -> None:
    """Raises InvalidRequestError if a message, which is not decoded yet, is too large."""
    if len(message) > max_bytes:
        raise InvalidRequestError(
            f"the request has {len(message)} bytes; the limit is {size_text(max_bytes)}: split it, or shorten its names"
        )


def check_deadline(context: Context) -> None:
    """Raises InvalidRequestError unless gRPC ends the call, which has a stream, within MAX_STREAM_S."""
    if (context.time_remaining() or math.inf) > 1.02 * MAX_STREAM_S:  # gRPC rounds deadlines up on their way.
        raise InvalidRequestError(f"a call with a stream needs a deadline; give it one within {MAX_STREAM_S:.0f} s")
