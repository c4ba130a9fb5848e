"""A slower tier under a real pool: of each run only the first blocks are up, and the others are on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvpool.client.rpc import Namespace, PendingLookup
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import BlockRun, Lookup
from vllm_plugin.session import Session


class Tier:
    """Stands between a session and its pool.

    Attributes:
        up: how many blocks of each run are up.
        coming: how many behind them are on their way.
        retry_ms: what an answer says of when to look up again.
        is_slow: answers do not come.
        error: what a lookup fails with.
        num_lookups: that were sent.
        waits_ms: of each lookup, how long its answer might wait.
    """

    def __init__(self, session: Session, up: int, coming: int, retry_ms: int = 20):
        self.up, self.coming, self.retry_ms = up, coming, retry_ms
        self.is_slow = False
        self.error: KVPoolError | None = None
        self.num_lookups = 0
        self.waits_ms: list[int] = []
        self._lookup: Callable[..., PendingLookup] = session.client.rpc.lookup_async
        session.client.rpc.lookup_async = self.lookup_async  # type: ignore[method-assign]

    def brought(self, count: int) -> None:
        """So many more blocks are up."""
        self.up, self.coming = self.up + count, self.coming - count

    def lookup_async(self, namespace: Namespace, runs: Sequence[BlockRun], **options: Any) -> PendingLookup:
        self.num_lookups += 1
        self.waits_ms.append(options["wait_ms"])

        return _Call(self, self._lookup(namespace, list(map(self._up, runs)), **options))

    def _up(self, run: BlockRun) -> BlockRun:
        """The same run, its later blocks under names that nobody has."""
        later = [bytes(255 - byte for byte in name) for name in run.block_hashes[self.up :]]
        return replace(run, block_hashes=[*run.block_hashes[: self.up], *later])


class _Call(PendingLookup):
    def __init__(self, tier: Tier, call: PendingLookup):
        self._tier, self._call, self._coming, self._retry_ms = tier, call, tier.coming, tier.retry_ms

    def result(self, timeout_s: float | None = None) -> Lookup | None:
        if self._tier.error is not None:
            raise self._tier.error
        found = None if self._tier.is_slow else self._call.result(timeout_s)
        if found is None or not self._coming:
            return found
        hits = tuple(replace(each, num_pending=self._coming) for each in found.hits)
        return replace(found, hits=hits, retry_after_ms=self._retry_ms)

    def done(self) -> bool:
        return self._tier.error is not None or (not self._tier.is_slow and self._call.done())

    def on_done(self, callback: Callable[[PendingLookup], None]) -> None:
        self._call.on_done(callback)
