"""What callers keep between calls: an open namespace, runs that are looked up again, and lookups under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvpool.client.channel import CALL_ERRORS
from kvpool.protocol.errors import InvalidRequestError, KVPoolError
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import MAX_BATCH_CHUNKS, BlockRun, Lookup, ShardRange
from kvpool.transport.base import Transport
from kvpool.v1 import pool_pb2 as pb


@dataclass(frozen=True, slots=True)
class Namespace:
    """An open namespace, valid for one boot of the server.

    Args:
        fingerprint: its name, `HASH_BYTES`.
        transport: how its bytes travel.
        max_batch_blocks: most blocks of one request; a lookup may have more, and a get is split.
        arena_bytes: bound of every region.
    """

    spec: NamespaceSpec
    fingerprint: bytes
    boot_token: int
    transport: Transport
    max_batch_blocks: int
    arena_bytes: int

    def max_blocks(self, shards: ShardRange) -> int:
        """Most blocks of which one put or get can move these shards."""
        return max(1, min(self.max_batch_blocks, MAX_BATCH_CHUNKS // max(1, shards.count)))

    def group(self, group_idx: int) -> GroupSpec:
        """Raises InvalidRequestError if there is no such group."""
        if not 0 <= group_idx < len(self.spec.groups):
            raise InvalidRequestError(
                f"group_idx {group_idx}: the namespace has groups 0 to {len(self.spec.groups) - 1}"
            )
        return self.spec.groups[group_idx]


class KeptRuns(tuple[BlockRun, ...]):
    """Runs that are looked up several times: the blocks' names on the wire are computed once."""

    def __init__(self, _: Iterable[BlockRun]):
        self.encoded: dict[str, list[pb.BlockRun]] = {}
        """The runs as messages, by the digest of the key that names the blocks."""


@dataclass(frozen=True, eq=False)
class PendingLookup:
    """A lookup that was sent and may have been answered. Thread-safe: the reply is decoded once.

    Args:
        call: of gRPC.
        answer: what its reply means.
        error_of: what an error of the call means.
    """

    call: Any
    answer: Callable[[pb.LookupResponse], Lookup]
    error_of: Callable[[Exception], KVPoolError]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _decoded: list[Lookup] = field(default_factory=list, init=False)

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return bool(self.call.done())

    def result(self, timeout_s: float | None = None) -> Lookup | None:
        """The answer; None if it has not arrived within `timeout_s`. Raises what `Client.lookup` raises."""
        try:
            reply = self.call.result(timeout=timeout_s)
        except CALL_ERRORS as error:
            if isinstance(error, grpc.FutureTimeoutError) and timeout_s is not None:
                return None
            raise self.error_of(error) from None
        with self._lock:
            if not self._decoded:
                self._decoded.append(self.answer(reply))
            return self._decoded[0]

    def on_done(self, callback: Callable[[PendingLookup], None]) -> None:
        """Calls back from another thread once the lookup has ended."""
        self.call.add_done_callback(lambda _: callback(self))
