"""Lookups that are under way, and the runs that are looked up again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from kvpool.client.channel import CALL_ERRORS
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import BlockRun, Lookup
from kvpool.v1 import pool_pb2 as pb


class KeptRuns(tuple[BlockRun, ...]):
    """Runs that are looked up several times: the blocks' names on the wire are computed once.

    Attributes:
        encoded: the runs as messages, by the digest of the key that names the blocks.
    """

    encoded: dict[str, list[pb.BlockRun]]

    def __new__(cls, runs: Iterable[BlockRun] = ()) -> KeptRuns:
        kept = super().__new__(cls, runs)
        kept.encoded = {}
        return kept


class PendingLookup:
    """A lookup that was sent and may have been answered.

    Args:
        call: of gRPC.
        answer: what its reply means.
        error_of: what an error of the call means.
    """

    def __init__(
        self, call: Any, answer: Callable[[pb.LookupResponse], Lookup], error_of: Callable[[Exception], KVPoolError]
    ):
        self._call = call
        self._answer = answer
        self._error_of = error_of

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return bool(self._call.done())

    def result(self, timeout_s: float | None = None) -> Lookup | None:
        """The answer; None if it has not arrived within `timeout_s`. Raises what `Client.lookup` raises."""
        try:
            reply = self._call.result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            return None
        except CALL_ERRORS as error:
            raise self._error_of(error) from None
        return self._answer(reply)

    def on_done(self, callback: Callable[[PendingLookup], None]) -> None:
        """Calls back from another thread once the lookup has ended."""
        self._call.add_done_callback(lambda _: callback(self))
