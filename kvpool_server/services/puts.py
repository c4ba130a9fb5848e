"""Puts: a ticket for the slots of new blocks, and its end."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvpool import wire
from kvpool.data_port import Kind
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.services.call import owner_of
from kvpool_server.services.region_permits import RegionPermits
from kvpool_server.services.served_pool import ServedPool


class PutService:
    """See the module.

    Args:
        permits: None if the server has no data port.
    """

    def __init__(self, served: ServedPool, permits: RegionPermits | None):
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._drain = served.drain
        self._run = served.run
        self._reader = served.reader
        self._permits = permits

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        self._drain.check()
        namespace, runs = self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        shards = wire.decode_shards(request.shards)
        ttl_ms, owner = request.ticket_ttl_ms, owner_of(context)
        grant = await self._run(self._pool.put_start_in_steps(namespace, runs, shards, ttl_ms, owner))
        if grant.offsets and self._permits is not None:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = time.monotonic_ns() + grant.ticket_ttl_ms * 1_000_000
            permit = self._permits.of_regions(
                Kind.WRITE, grant.ticket_id, deadline_ns, region_bytes, grant.offsets, owner
            )
            grant = dataclasses.replace(grant, permit=permit)
        return wire.encode_grant(grant, self._boot_token)

    async def PutEnd(self, request: pb.PutEndRequest, context: Any) -> pb.PutEndResponse:
        steps = self._pool.put_end_in_steps(request.ticket_id, request.checksums, owner_of(context))
        receipt = await self._run(steps)
        return wire.encode_receipt(receipt, self._boot_token)

    async def PutRevoke(self, request: pb.PutRevokeRequest, context: Any) -> pb.PutRevokeResponse:
        revoked = self._pool.put_revoke(request.ticket_id, owner_of(context))
        return pb.PutRevokeResponse(boot_token=self._boot_token, revoked=revoked)
