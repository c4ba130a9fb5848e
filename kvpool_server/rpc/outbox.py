"""Bounds the bytes of replies that gRPC holds until their clients read them.

A client that reads nothing leaves each of its calls waiting for room in its window. Small replies are bounded by the
number of calls; the bytes of all others together, and those of one caller, are bounded here.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpool.protocol.errors import BusyError
from kvpool_server.sharing import Shares

SMALL_BYTES = 16 << 10
"""A reply of no more is not counted."""
MAX_UNSENT_BYTES = 128 << 20
"""Of all callers; gRPC holds a reply twice, as bytes and as what it sends. A caller may have as much as is left."""


class Unsent:
    """A reply's bytes, from when it is made until gRPC has sent it, or the call has ended.

    Attributes:
        nbytes: that count; 0 of a small reply.
    """

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
