"""What the pool has of a prompt, under a lease: lookups, where the leased blocks lie, and the lease's release."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvpool import wire
from kvpool.data_port import Kind
from kvpool.errors import KVPoolError, OutOfSpaceError
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS
from kvpool_server.inbox import MAX_LOOKUP_BYTES, check_size
from kvpool_server.lookup_streams import LookupStreams
from kvpool_server.method_handlers import decode
from kvpool_server.metrics import RpcMetrics
from kvpool_server.reports.evictions import count_evictions
from kvpool_server.reports.usage_ledger import UsageLedger
from kvpool_server.services.call import check_deadline, owner_of
from kvpool_server.services.region_permits import RegionPermits
from kvpool_server.services.served_pool import ServedPool


class LeaseService:
    """See the module.

    Args:
        streams: the LookupStream calls under way.
        permits: None if the server has no data port.
        ledger: gets what lookups have missed because of other tenants; None: there is none.
    """

    def __init__(
        self,
        served: ServedPool,
        streams: LookupStreams,
        permits: RegionPermits | None,
        metrics: RpcMetrics,
        ledger: UsageLedger | None,
    ):
        self._tiered = served.tiered
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._drain = served.drain
        self._run = served.run
        self._reader = served.reader
        self._streams = streams
        self._permits = permits
        self._metrics = metrics
        self._ledger = ledger

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, owner_of(context), request.wait_ms)

    async def _lookup(self, request: pb.LookupRequest, owner: Owner, wait_ms: int = 0) -> pb.LookupResponse:
        if request.release:
            self._reader.check_count(len(request.release), "leases")
            self._pool.release(request.release, owner)
            if not request.runs:
                return pb.LookupResponse(boot_token=self._boot_token)
        self._drain.check()
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        options = request.prefix_only, request.lease_ttl_ms, request.locate, owner
        now_ns = time.monotonic_ns()
        if sum(map(len, runs)) > LOOKUP_STEP_BLOCKS:  # Not worth a wait: each look costs a turn of the loop.
            await asyncio.sleep(0)
            found = await self._run(self._tiered.lookup_in_steps(fingerprint, runs, *options))
            await asyncio.sleep(0)
        elif wait_ms:
            found = await self._tiered.lookup_once_up(fingerprint, runs, *options, wait_ms=wait_ms)
        else:
            found = self._tiered.lookup(fingerprint, runs, *options)
        if request.explain:
            found = dataclasses.replace(found, hits=self._pool.misses.explain(fingerprint, runs, found.hits))
            if self._ledger is not None and not found.retry_after_ms:  # Else the lookup is going to be repeated.
                count_evictions(self._pool, fingerprint, runs, found.hits, self._ledger)
        if found.slots and self._permits is not None:
            deadline_ns = now_ns + found.lease_ttl_ms * 1_000_000
            found = self._permits.of_slots(found, fingerprint, runs, deadline_ns, owner)
        return wire.encode_lookup(found, runs, self._boot_token)

    async def LookupStream(self, _: AsyncIterator[pb.LookupRequest], context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        owner = owner_of(context)
        try:
            check_deadline(context)
            self._begin_stream(task, owner)
        except KVPoolError as error:
            await context.abort(wire.status_of(error), str(error))
        streams = self._streams
        try:
            while not streams.is_ended(task):
                streams.wait(task)
                # Takes a third less time than the iterators of requests and replies.
                message = await context.read()
                streams.work(task)
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    break
                if (reply := await self._answer(message, owner)) is not None:
                    await context.write(reply)
        except asyncio.CancelledError:
            if not streams.is_ended(task):
                raise  # The client has hung up.
        finally:
            streams.finish(task)

    def _begin_stream(self, task: asyncio.Task[Any], owner: Owner) -> None:
        """Raises OutOfSpaceError if there are too many streams of lookups."""
        most = self._pool.limits.max_streams
        own = self._pool.limits_of(owner.name).streams if owner.tenant else most
        if not self._streams.begin(task, owner.name, own):
            raise OutOfSpaceError(
                f"{most} streams of lookups, or {own} of this caller, are under way, and none is idle; use Lookup"
            )

    async def _answer(self, message: bytes, owner: Owner) -> pb.LookupReply | None:
        """The answer to one request of a stream; None to one that only releases leases."""
        try:
            request = decode(pb.LookupRequest, check_size(message, MAX_LOOKUP_BYTES))
            with self._metrics.timed("Lookup" if request.runs else "Release"):
                found = await self._lookup(request, owner)
        except KVPoolError as error:
            return wire.encode_lookup_error(error)
        return pb.LookupReply(found=found) if request.runs or not request.release else None

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        namespace, runs = self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        shards = wire.decode_shards(request.shards)
        now_ns, owner = time.monotonic_ns(), owner_of(context)
        steps = self._pool.get_in_steps(request.lease_id, namespace, runs, shards, owner)
        located = await self._run(steps)
        if located.offsets and self._permits is not None:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = now_ns + located.lease_remaining_ms * 1_000_000
            permit = self._permits.of_regions(
                Kind.READ, request.lease_id, deadline_ns, region_bytes, located.offsets, owner
            )
            located = dataclasses.replace(located, permit=permit)
        return wire.encode_located(located, self._boot_token)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self._reader.check_count(len(request.lease_ids), "leases")
        released = self._pool.release(request.lease_ids, owner_of(context))
        return pb.ReleaseResponse(boot_token=self._boot_token, num_released=released)
