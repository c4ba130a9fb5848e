"""Reads requests: checks their counts before work in proportion to them, and which namespaces the caller may name."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool import wire
from kvpool.errors import InvalidRequestError
from kvpool.types import BlockRun, PoolKey
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import is_visible
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.cache.pool import Pool


class RequestReader:
    """See the module. One for each pool."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._limits = pool.limits

    def namespace(self, name: bytes) -> bytes:
        """The fingerprint in a request. Raises as `visible`."""
        return self.visible(wire.decode_namespace(name))

    def visible(self, fingerprint: bytes) -> bytes:
        """The same fingerprint.

        Raises UnknownNamespaceError for a namespace of another tenant, as for one that is not open: nobody can tell
        them apart.
        """
        namespace = self._pool.namespace(fingerprint)
        if not is_visible(namespace.spec.tenant if namespace is not None else None):
            raise unknown_namespace(fingerprint)
        return fingerprint

    def key(self, message: pb.PoolKey) -> PoolKey:
        """A chunk's address. Raises as `visible`."""
        key = wire.decode_key(message)
        self.visible(key.namespace)
        return key

    def runs(self, runs: Sequence[pb.BlockRun], max_blocks: int = 0) -> list[BlockRun]:
        """The runs of a request, of `max_batch_blocks` blocks at most by default. Raises InvalidRequestError."""
        most = self._limits.max_runs
        if len(runs) > most:
            raise InvalidRequestError(f"{len(runs)} runs in one message; give at most {most}, and split larger ones")
        return wire.decode_runs(runs, max_blocks or self._limits.max_batch_blocks)

    def check_count(self, count: int, what: str) -> None:
        """Raises InvalidRequestError if a request names more things than `max_batch_blocks`."""
        most = self._limits.max_batch_blocks
        if count > most:
            raise InvalidRequestError(f"{count} {what} in one message; give at most {most}, and split larger ones")
