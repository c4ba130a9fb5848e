"""What a client knows better than any eviction policy: which prefixes come back, which do not, and which come soon.

A hint changes the order of evictions, or what is in memory; nothing else. It names a prefix from its beginning, one run
a group: blocks behind one that is not stored, or that the tenant's budget has no room for, are not pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.client.open_namespace import Namespace
from kvpool.client.rpc import PoolRpc
from kvpool.protocol.types import BlockRun, HintKind
from kvpool.v1 import pool_pb2 as pb


class Hints:
    """Hints for the blocks of a namespace, on a client's connection. Thread-safe.

    Raises (every method): UnavailableError, PoolTimeoutError, InvalidReplyError, InvalidRequestError,
    UnknownNamespaceError, PermissionDeniedError, and what its docstring names.
    """

    def __init__(self, rpc: PoolRpc):
        self._rpc = rpc

    def pin(self, namespace: Namespace, runs: Sequence[BlockRun], seconds: int) -> pb.HintResponse:
        """Has the stored blocks of a prefix evicted after all that are not pinned.

        Args:
            seconds: how long, 1 or more; the server cuts it to a day. A pin that ends later stays as it is.
        """
        return self._hint(namespace, runs, HintKind.PIN, max(1, seconds))

    def unpin(self, namespace: Namespace, runs: Sequence[BlockRun]) -> pb.HintResponse:
        """Ends the pins of a prefix, from its end to where other stored prefixes branch off."""
        return self._hint(namespace, runs, HintKind.PIN)

    def expire(self, namespace: Namespace, runs: Sequence[BlockRun]) -> pb.HintResponse:
        """Has the blocks of a prefix evicted before all others, until they are used again.

        From its end to where other stored prefixes branch off, or to a pinned block.
        """
        return self._hint(namespace, runs, HintKind.EXPIRE)

    def prefetch(self, namespace: Namespace, runs: Sequence[BlockRun]) -> pb.HintResponse:
        """Has the server bring the blocks of a prefix up from its tiers; does not wait until they are up.

        Args:
            runs: one a group; the server refuses more.

        Repeat it to learn how far the server has come. Raises OutOfSpaceError if too many prefetches are under way.
        """
        return self._hint(namespace, runs, HintKind.PREFETCH)

    def _hint(
        self, namespace: Namespace, runs: Sequence[BlockRun], kind: HintKind, pin_seconds: int = 0
    ) -> pb.HintResponse:
        return self._rpc.hint(namespace.fingerprint, self._rpc.encode_runs(runs), kind, pin_seconds)
