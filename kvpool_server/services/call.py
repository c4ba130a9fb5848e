"""What a handler asks of its call: whose it is, and when it ends."""

from __future__ import annotations

from typing import Any

import grpc

from kvpool.errors import InvalidRequestError
from kvpool_server.access.caller import CALLER
from kvpool_server.cache.leases import Owner

MAX_STREAM_S = 600.0
"""Longest deadline of a call whose replies are a stream. Nothing but its deadline ends the call, with what it holds in
memory, while its client is connected and does not read."""

Context = grpc.aio.ServicerContext[Any, Any]


def owner_of(context: Context) -> Owner:
    """Whose leases and tickets a call's are: the caller's, or where callers are not authenticated, the connection's."""
    caller = CALLER.get()
    return Owner(context.peer()) if caller is None else Owner(str(caller), caller.tenant)


def check_deadline(context: Context) -> None:
    """Raises InvalidRequestError unless gRPC ends the call within MAX_STREAM_S."""
    remaining_s = context.time_remaining()
    if remaining_s is None or remaining_s > 1.02 * MAX_STREAM_S:  # gRPC rounds deadlines up on their way.
        has = "no deadline" if remaining_s is None else f"a deadline in {remaining_s:.0f} s"
        raise InvalidRequestError(f"a call with a stream of replies has {has}; give it one within {MAX_STREAM_S:.0f} s")
