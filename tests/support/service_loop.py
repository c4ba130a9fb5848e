"""Calls a `PoolService`'s handlers without gRPC: an event loop that runs for one call at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from typing import Any

CALL_S = 60.0


class ServiceLoop:
    """Runs handlers to their end. One thread at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._end = weakref.finalize(self, self._loop.close)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What a handler returns; raises what it raises."""
        return self._loop.run_until_complete(asyncio.wait_for(call, CALL_S))


class CallContext:
    """What a handler asks of gRPC.

    Args:
        peer: whose leases and tickets count together.
    """

    def __init__(self, peer: str = "ipv4:127.0.0.1:1"):
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float:
        return 5.0
