"""What routers choose engines by: which blocks the pool has, and how long a load of them takes."""

from __future__ import annotations

from typing import Any

from kvpool import wire
from kvpool.errors import InvalidRequestError
from kvpool.types import Existence
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.usable import usable_tokens
from kvpool_server.reports.engines import EngineReports
from kvpool_server.services.served_pool import ServedPool


class RoutingService:
    """See the module.

    Args:
        reports: what engines have reported, for the seconds that a load takes.
    """

    def __init__(self, served: ServedPool, reports: EngineReports):
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._reader = served.reader
        self._run = served.run
        self._reports = reports

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        if any(run.parent_hash for run in runs):
            raise InvalidRequestError("a run has a parent_hash; give the blocks of a prompt from its first token on")
        # Not recorded: what routers ask for is neither a use of blocks nor a hit or miss of an engine.
        found = await self._run(self._pool.find_in_steps(fingerprint, runs, prefix_only=False, lease_ttl_ms=0))
        usable = usable_tokens(found.namespace.spec.groups, runs, found.hits)
        totals = self._reports.of_namespace(fingerprint)
        seconds = totals.load_seconds * usable / totals.loaded_tokens if totals and totals.loaded_tokens else 0.0
        return wire.encode_existence(Existence(found.hits, usable, seconds), runs, self._boot_token)
