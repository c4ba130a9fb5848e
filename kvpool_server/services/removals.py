"""What takes blocks out of the pool and its tiers: wrong bytes, a client's wish, an operator's."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import structlog

from kvpool.errors import UnavailableError
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.caller import check_all_tenants
from kvpool_server.services.served_pool import ServedPool
from kvpool_server.tiers.tier import TierError
from kvpool_server.verifier import Verifier

log = structlog.get_logger()


class RemovalService:
    """See the module."""

    def __init__(self, served: ServedPool, verifier: Verifier):
        self._tiered = served.tiered
        self._boot_token = served.boot_token
        self._reader = served.reader
        self._verifier = verifier

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        checked, dropped = await self._verifier.verify(
            self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        )
        return pb.VerifyResponse(boot_token=self._boot_token, num_checked=checked, num_dropped=dropped)

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        fingerprint, runs = self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        removed = await _removed(self._tiered.remove(fingerprint, runs))
        return pb.RemoveResponse(boot_token=self._boot_token, num_removed=removed)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        if not request.namespace:
            check_all_tenants("Clear of all namespaces")
        fingerprint = self._reader.namespace(request.namespace) if request.namespace else b""
        removed = await _removed(self._tiered.clear(fingerprint))
        log.info("cleared", namespace=fingerprint.hex()[:12] or "all", blocks=removed)
        return pb.ClearResponse(boot_token=self._boot_token, num_removed=removed)


async def _removed(removal: Awaitable[int]) -> int:
    """How many blocks the pool has removed. Raises UnavailableError if a tier has not removed its blocks."""
    try:
        return await removal
    except TierError as error:
        raise UnavailableError(
            f"the blocks were removed from memory, but not from every tier: {error}; repeat the call when the tier "
            "is back"
        ) from None
