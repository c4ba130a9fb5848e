"""What routers choose engines by: which blocks the pool has, and the tokens that engines announce for KV events."""

from __future__ import annotations

from typing import Any

from kvpool import wire
from kvpool.errors import InvalidRequestError
from kvpool.types import MAX_ANNOUNCED_BLOCKS, MAX_ANNOUNCED_TOKENS, Existence
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.cache.usable import usable_tokens
from kvpool_server.events.streams import EventStreams
from kvpool_server.reports.engines import EngineReports
from kvpool_server.services.served_pool import ServedPool


class RoutingService:
    """See the module.

    Args:
        reports: what engines have reported, for the seconds that a load takes.
        events: gets the tokens that engines announce; None: nobody wants them.
    """

    def __init__(self, served: ServedPool, reports: EngineReports, events: EventStreams | None):
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._reader = served.reader
        self._run = served.run
        self._reports = reports
        self._events = events

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

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> pb.AnnounceResponse:
        fingerprint = self._reader.namespace(request.namespace)
        (run,) = self._reader.runs([request.run], MAX_ANNOUNCED_BLOCKS)
        if len(request.token_ids) > MAX_ANNOUNCED_TOKENS:
            raise InvalidRequestError(
                f"{len(request.token_ids)} token_ids in one call; announce at most {MAX_ANNOUNCED_TOKENS}"
            )
        if self._pool.namespace(fingerprint) is None:
            raise unknown_namespace(fingerprint)
        if self._events is not None:
            self._events.announced(fingerprint, run, request.token_ids)
        return pb.AnnounceResponse(boot_token=self._boot_token)
