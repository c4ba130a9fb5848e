"""Receives the messages of calls within a time and a size, so that callers that withhold bytes hold little memory.

gRPC buffers a message until its last byte has come, and waits for that byte for ever. A handler of one request is
called only after that; therefore the server registers handlers of streams for all methods, which are the same on the
wire, and reads the messages itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import grpc

from kvpool.errors import InvalidRequestError, PoolTimeoutError, UnavailableError
from kvpool.quotas import size_text
from kvpool_server.access.caller import CALLER

MAX_CONTROL_BYTES = 1 << 20
MAX_DATA_BYTES = (4 << 20) + (64 << 10)
"""A message with 4 MiB of payload, and with what surrounds it."""
MAX_LOOKUP_BYTES = 4 << 20
MAX_CHECK_BYTES = 256
"""Of a health check: a service's name."""
MESSAGE_S = 10.0
"""How long the one message of a call may be on its way, from when its call was accepted."""
CROWDED = 64
CROWDED_S = 1.0
"""How long, if `CROWDED` others are on their way."""
MAX_AWAITED = 512
"""Messages on their way at once. One more, and the one that has been awaited longest is given up; where callers
are authenticated, of the caller from whom most are awaited."""
MAX_CHECKS = 8
"""Of health checks, which never take the place of other calls' messages, nor lose theirs to them."""
PIECE_S = 30.0
"""How long the next message of a stream of data, either way, may be on its way."""
MAX_DATA_STREAMS = 64
"""Streams of data that are received or sent at once."""
MAX_OWN_DATA_STREAMS = 16
"""Of them, one identity's, where callers are authenticated: more of one caller's are no faster together."""

REQUEST: ContextVar[Any] = ContextVar("kvpool request", default=None)
"""The request of the call that the running handler serves, once it has arrived, for those around the handler."""

Context = grpc.aio.ServicerContext[Any, Any]


class Inbox:
    """The messages that one server awaits, `most` or `MAX_AWAITED` at once."""

    def __init__(self, most: int = 0) -> None:
        self._most = most or MAX_AWAITED
        self._awaited: dict[asyncio.Timeout, str] = {}  # With the caller, oldest first.
        self._streams = asyncio.Semaphore(MAX_DATA_STREAMS)
        self._own_streams: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def receive(self, context: Context, max_bytes: int) -> bytes:
        """The only message of a call.

        Raises:
            PoolTimeoutError: its last byte has not come in time.
            InvalidRequestError: there is none, or it is larger than `max_bytes`.
        """
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
        return check_size(message, max_bytes)

    def _give_one_up(self) -> None:
        ((most, _),) = Counter(self._awaited.values()).most_common(1)
        oldest = next(deadline for deadline, caller in self._awaited.items() if caller == most)
        del self._awaited[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())

    async def stream(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The messages of a stream of data, each of which has to come in time. Raises as `receive`."""
        async with self.slot():
            while True:
                try:
                    async with asyncio.timeout(PIECE_S):
                        message = await context.read()
                except TimeoutError:
                    raise PoolTimeoutError(f"the next message did not arrive within {PIECE_S:g} s") from None
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                yield check_size(message, MAX_DATA_BYTES)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A place among the streams of data. Raises UnavailableError if none becomes free in time."""
        most = MAX_OWN_DATA_STREAMS if _caller() else MAX_DATA_STREAMS
        own = self._own_streams.setdefault(_caller(), asyncio.Semaphore(most))
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(MESSAGE_S):
                    for slots in (own, self._streams):
                        await stack.enter_async_context(slots)
            except TimeoutError:
                raise UnavailableError(
                    f"{MAX_DATA_STREAMS} streams of data, or {most} of this caller, are under way; try again later"
                ) from None
            yield


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
