"""Receives the messages of calls within a time and a size, so that callers that withhold bytes, or send many, hold
little memory.

gRPC buffers a message until its last byte has come, and waits for that byte for ever. A handler of one request is
called only after that; therefore the server registers handlers of streams for all methods, which are the same on the
wire, and reads the messages itself. What it has not asked for does not come: gRPC lets a client send `SMALL_BYTES`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any

import grpc

from kvpool.protocol.errors import InvalidRequestError, PoolTimeoutError
from kvpool.report.quotas import size_text
from kvpool_server.access.authentication import Context
from kvpool_server.access.caller import CALLER
from kvpool_server.cache.fair_slots import FairSlots
from kvpool_server.rpc.turns import when_ended

SMALL_BYTES = 128 << 10
"""What a client may have sent on a call before the server asks for a message: more than engines need, which name 2,048
blocks in one. gRPC would widen the window for fast senders, without a bound that could be told."""
MAX_REQUEST_BYTES = 4 << 20
MAX_DATA_BYTES = MAX_REQUEST_BYTES + (64 << 10)
"""A message with 4 MiB of payload, and with what surrounds it."""
MAX_LARGE = 16
"""Messages that the server has asked for, and larger ones than `SMALL_BYTES` whose calls are under way, beside one of
every caller."""
MESSAGE_S = 10.0
"""How long the one message of a call may be on its way, from when its call was accepted."""
CROWDED = 32
CROWDED_S = 0.5
"""How long, if `CROWDED` others are on their way."""
MAX_AWAITED = 512
"""Messages on their way at once. One more, and the one that has been awaited longest is given up; where callers
are authenticated, of the caller from whom most are awaited."""
MAX_CHECKS = 8
"""Of health checks, which never take the place of other calls' messages, nor lose theirs to them."""
MAX_STREAM_S = 600.0
"""Longest deadline of a call that has a stream, which may otherwise last as long as its client."""
PIECE_S = 30.0
"""How long a stream of data, either way, may wait for its client, and anew with each `PACE_BYTES` that have moved."""
PACE_BYTES = 1 << 20
MAX_DATA_STREAMS = 64
"""Streams of data that are received or sent at once."""
FEW_DATA_STREAMS = 4
"""So many need not take turns with their messages: a pass of the event loop makes one of each."""
MAX_OWN_DATA_STREAMS = 16
"""Of them, one identity's, where callers are authenticated: more of one caller's are no faster together. An identity
has no more than are left, either."""

REQUEST: ContextVar[Any] = ContextVar("kvpool request", default=None)
"""The request of the call that the running handler serves, once it has arrived, for those around the handler."""


class Inbox:
    """The messages that one server awaits, `most` or `MAX_AWAITED` at once."""

    def __init__(self, most: int = 0) -> None:
        self._most = most or MAX_AWAITED
        self._awaited: dict[asyncio.Timeout, str] = {}  # With the caller, oldest first.
        self._streams = FairSlots(MAX_DATA_STREAMS, MAX_OWN_DATA_STREAMS)
        self._large = FairSlots(MAX_LARGE, MAX_LARGE, 1)

    async def receive(self, context: Context, max_bytes: int) -> bytes:
        """The only message of a call.

        Raises:
            UnavailableError: the caller has too many large ones under way.
            PoolTimeoutError: its last byte has not come in time.
            InvalidRequestError: there is none, or it is larger than `max_bytes`.
        """
        give_back = await self._large.take(_caller() or context.peer(), MESSAGE_S)
        is_kept = False
        try:
            message = check_size(await self._arrival(context), max_bytes)
            is_kept = len(message) > SMALL_BYTES
        finally:
            if not is_kept:
                give_back()
        if is_kept:
            when_ended(give_back)
        return message

    @property
    def has_many_streams(self) -> bool:
        """Whether the messages of streams of data are to take turns."""
        return self._streams.num_taken > FEW_DATA_STREAMS

    async def _arrival(self, context: Context) -> bytes:
        seconds = MESSAGE_S if len(self._awaited) < CROWDED else CROWDED_S
        if len(self._awaited) >= self._most:
            self._give_one_up()
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self._awaited[deadline] = _caller()
                message = await context.read()
        except TimeoutError:
            raise PoolTimeoutError(f"the request did not arrive within {seconds:g} s; send it again") from None
        finally:
            self._awaited.pop(deadline, None)
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise InvalidRequestError("the call has no request; send one message")
        return message  # type: ignore[no-any-return]

    def _give_one_up(self) -> None:
        ((most, _),) = Counter(self._awaited.values()).most_common(1)
        oldest = next(deadline for deadline, caller in self._awaited.items() if caller == most)
        del self._awaited[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())

    async def stream(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The messages of a stream of data, each of which has to come in time. Raises as `receive`."""
        pace = Pace()
        async with self.slot(context):
            while True:
                message = await pace.wait(context.read())
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                yield check_size(message, MAX_DATA_BYTES)

    def slot(self, context: Context) -> AbstractAsyncContextManager[None]:
        """A place among the streams of data. Raises UnavailableError if none becomes free in time."""
        check_deadline(context)
        return self._streams.slot(_caller(), MESSAGE_S)


class Pace:
    """How long a stream of data may still wait for its client, which each message lengthens by its bytes."""

    def __init__(self) -> None:
        self._left_s = PIECE_S

    async def wait(self, moving: Awaitable[Any], nbytes: int = 0) -> Any:
        """Waits for a message to go, or for one to come. Raises PoolTimeoutError when the time is used up."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                message = await moving
        except TimeoutError:
            raise PoolTimeoutError(f"the client moved less than {PACE_BYTES} bytes in {PIECE_S:g} s") from None
        earned_s = PIECE_S * (nbytes + len(message or b"")) / PACE_BYTES
        self._left_s = min(PIECE_S, self._left_s + began - time.monotonic() + earned_s)
        return message


def _caller() -> str:
    """Whose call the running handler serves; empty where callers are not authenticated."""
    return str(CALLER.get() or "")


def check_size(message: bytes, max_bytes: int) -> bytes:
    """Raises InvalidRequestError if a message, which is not decoded yet, is too large."""
    if len(message) > max_bytes:
        raise InvalidRequestError(
            f"the request has {len(message)} bytes; the limit is {size_text(max_bytes)}: split it, or shorten its names"
        )
    return message


def check_deadline(context: Context) -> None:
    """Raises InvalidRequestError unless gRPC ends the call, which has a stream, within MAX_STREAM_S."""
    if (context.time_remaining() or math.inf) > 1.02 * MAX_STREAM_S:  # gRPC rounds deadlines up on their way.
        raise InvalidRequestError(f"a call with a stream needs a deadline; give it one within {MAX_STREAM_S:.0f} s")
