"""The LookupStream calls under way: an idle one makes room for another, whose client opens a new one when it needs it.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

Call = asyncio.Task[Any]


class LookupStreams:
    """The calls of one server, `max_streams` at once. A call is named by its task."""

    def __init__(self, max_streams: int):
        self._max_streams = max_streams
        self._owner_of: dict[Call, str] = {}  # Without those in `_ended`.
        self._idle: dict[Call, None] = {}  # The one that has been idle longest is first.
        self._ended: set[Call] = set()
        self._is_stopping = False

    def begin(self, call: Call, owner: str, most: int) -> bool:
        """Counts a call among those of its owner, who may have `most`; ends idle ones if there are too many.

        False, and the call does not count, if too many are not idle.
        """
        while list(self._owner_of.values()).count(owner) >= most:
            if not self._end_longest_idle(owner):
                return False
        if len(self._owner_of) >= self._max_streams and not self._end_longest_idle():
            return False
        self._owner_of[call] = owner
        return True

    def wait(self, call: Call) -> None:
        """The call is idle: it awaits a message."""
        self._idle[call] = None

    def work(self, call: Call) -> None:
        """A message has come."""
        self._idle.pop(call, None)

    def is_ended(self, call: Call) -> bool:
        """Whether the call was cancelled to make room, or because the server stops."""
        return self._is_stopping or call in self._ended

    def finish(self, call: Call) -> None:
        """The call returns. Call it once for each call that has begun."""
        self._forget(call)
        self._ended.discard(call)

    def stop(self) -> None:
        """Ends all calls, which would otherwise last as long as their clients."""
        self._is_stopping = True
        # Only idle calls are cancelled: gRPC does not end a call that is cancelled while a reply is being sent. The
        # other calls end after their reply.
        for call in list(self._idle):
            call.cancel()

    def _end_longest_idle(self, owner: str | None = None) -> bool:
        """Ends the call that has been idle longest, of an owner or of all. False if none is idle."""
        call = next((call for call in self._idle if owner is None or self._owner_of[call] == owner), None)
        if call is None:
            return False
        self._forget(call)
        self._ended.add(call)
        call.cancel()
        return True

    def _forget(self, call: Call) -> None:
        self._idle.pop(call, None)
        self._owner_of.pop(call, None)
