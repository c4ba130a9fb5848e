"""The RPCs of blocks: Lookup, LookupStream, Get, Release; PutStart, PutEnd, PutRevoke; Exists, Hint, Verify."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np

from kvpool.protocol import wire
from kvpool.protocol.errors import BusyError, InvalidRequestError, KVPoolError
from kvpool.protocol.pieces import MESSAGE_BYTES
from kvpool.protocol.types import BlockRun, HintKind, Slots
from kvpool.transport.data_port import Kind, Offsets, pack_offsets
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Context
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.pins import MAX_PIN_S
from kvpool_server.cache.usable import usable_tokens
from kvpool_server.data_plane.permits import NO_BOUND, Bound
from kvpool_server.reports.usage_ledger import count_evictions
from kvpool_server.rpc.call_spans import describe_lookup, lookup_span
from kvpool_server.rpc.handlers import Handlers, owner_of
from kvpool_server.rpc.inbox import MAX_REQUEST_BYTES, check_deadline
from kvpool_server.rpc.method_handlers import decoded


class BlockHandlers(Handlers):
    """Lookups with their leases, puts with their tickets, and what clients say of blocks."""

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, owner_of(context), request.wait_ms)

    async def LookupStream(self, _: AsyncIterator[pb.LookupRequest], context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        streams, owner = self.streams, owner_of(context)
        check_deadline(context)
        most = self.pool.limits.max_streams
        own = self.pool.limits_of(owner.name).streams if owner.tenant else most
        if not streams.begin(task, owner.name, own):
            raise BusyError(
                f"{most} streams of lookups, or {own} of this caller, are under way, and none is idle; use Lookup"
            )
        try:
            while not streams.is_ended(task):
                streams.wait(task)
                # Takes a third less time than the iterators of requests and replies.
                message = await context.read()
                streams.work(task)
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    break
                if (reply := await self._answer(message, owner, context)) is not None:
                    await context.write(reply)
                    if len(message) == MESSAGE_BYTES and reply.HasField("error"):
                        break  # More pieces of the request may follow.
        except asyncio.CancelledError:
            if not streams.is_ended(task):
                raise  # The client has hung up.
        finally:
            streams.finish(task)

    async def _answer(self, first: bytes, owner: Owner, context: Context) -> pb.LookupReply | None:
        """The answer to one request of a stream, by its first message; None to one that only releases leases."""
        give_back = None
        try:
            message, give_back = await self.inbox.whole(context, first, MAX_REQUEST_BYTES)
            request = await decoded(self.turns, pb.LookupRequest, message)
            with self.metrics.timed("Lookup" if request.runs else "Release"):
                found = await self._lookup(request, owner)
        except KVPoolError as error:
            return wire.encode_lookup_error(error)
        finally:
            if give_back is not None:
                give_back()
        return pb.LookupReply(found=found) if request.runs or not request.release else None

    async def _lookup(self, request: pb.LookupRequest, owner: Owner, wait_ms: int = 0) -> pb.LookupResponse:
        """As `_found`, with a span where calls are traced."""
        if self.tracing is None or not request.runs:
            return await self._found(request, owner, wait_ms)
        with lookup_span(self.tracing, request) as span:
            reply = await self._found(request, owner, wait_ms)
            describe_lookup(span, reply)
            return reply

    async def _found(self, request: pb.LookupRequest, owner: Owner, wait_ms: int) -> pb.LookupResponse:
        """Releases the leases that a request names, then looks up its runs."""
        if request.release:
            self.check_count(len(request.release), "leases")
            self.pool.release(request.release, owner)
            if not request.runs:
                return pb.LookupResponse(boot_token=self.boot_token)
        self.drain.check()
        fingerprint = self.fingerprint(request.namespace)
        runs = self.runs(request.runs, self.pool.limits.max_lookup_blocks)
        now_ns = time.monotonic_ns()
        found = await self.tiered.lookup(
            fingerprint, runs, request.prefix_only, request.lease_ttl_ms, request.locate, owner, wait_ms
        )
        if request.explain:
            found = dataclasses.replace(found, hits=self.pool.misses.explain(fingerprint, runs, found.hits))
            if self.ledger is not None and not found.retry_after_ms:  # Else the lookup is going to be repeated.
                count_evictions(self.pool, fingerprint, runs, found.hits, self.ledger)
        if found.slots and self.permits is not None:
            deadline_ns = now_ns + found.lease_ttl_ms * 1_000_000
            slots = self._with_permits(found.slots, found.lease_id, fingerprint, runs, deadline_ns, owner)
            found = dataclasses.replace(found, slots=slots)
        return wire.encode_lookup(found, runs, self.boot_token)

    def _with_permits(
        self,
        slots: Sequence[Slots],
        lease_id: int,
        fingerprint: bytes,
        runs: Sequence[BlockRun],
        deadline_ns: int,
        owner: Owner,
    ) -> tuple[Slots, ...]:
        """The same slots, with permits to read each run's."""
        permitted = []
        for run, each in zip(runs, slots, strict=True):
            if each.offsets:
                offsets, slot_bytes = (
                    np.frombuffer(each.offsets, "<u8"),
                    self.pool.group_spec(fingerprint, run).slot_bytes,
                )
                permit = self._permit(Kind.READ, lease_id, deadline_ns, slot_bytes, offsets, owner)
                each = Slots(each.offsets, each.checksums, permit)
            permitted.append(each)
        return tuple(permitted)

    def _permit(
        self,
        kind: Kind,
        hold_id: int,
        deadline_ns: int,
        region_bytes: int,
        offsets: Sequence[int] | Offsets,
        owner: Owner,
    ) -> bytes:
        """A permit for the data port to move a ticket's or lease's regions until the deadline.

        Empty without a data port, and if the ticket or lease has ended since the call's last step, because nothing
        would end the permit.
        """
        if self.permits is None or hold_id not in (self.pool.leases if kind is Kind.READ else self.pool.tickets):
            return b""
        bound = Bound.of(owner.name, self.pool.limits_of(owner.name).connections) if owner.tenant else NO_BOUND
        return self.permits.permit(kind, hold_id, deadline_ns, region_bytes, pack_offsets(offsets), bound)

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        shards, owner = wire.decode_shards(request.shards), owner_of(context)
        now_ns = time.monotonic_ns()
        located = await self.run(self.pool.lookups.get(request.lease_id, fingerprint, runs, shards, owner))
        if located.offsets:
            region_bytes = shards.count * self.pool.group_spec(fingerprint, runs[0]).chunk_bytes
            deadline_ns = now_ns + located.lease_remaining_ms * 1_000_000
            permit = self._permit(Kind.READ, request.lease_id, deadline_ns, region_bytes, located.offsets, owner)
            located = dataclasses.replace(located, permit=permit)
        return wire.encode_located(located, self.boot_token)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.check_count(len(request.lease_ids), "leases")
        released = self.pool.release(request.lease_ids, owner_of(context))
        return pb.ReleaseResponse(boot_token=self.boot_token, num_released=released)

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        self.drain.check()
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        shards, owner = wire.decode_shards(request.shards), owner_of(context)
        steps = self.pool.put_start_in_steps(fingerprint, runs, shards, request.ticket_ttl_ms, owner)
        grant = await self.run(steps)
        if grant.offsets:
            region_bytes = shards.count * self.pool.group_spec(fingerprint, runs[0]).chunk_bytes
            deadline_ns = time.monotonic_ns() + grant.ticket_ttl_ms * 1_000_000
            permit = self._permit(Kind.WRITE, grant.ticket_id, deadline_ns, region_bytes, grant.offsets, owner)
            grant = dataclasses.replace(grant, permit=permit)
        return wire.encode_grant(grant, self.boot_token)

    async def PutEnd(self, request: pb.PutEndRequest, context: Any) -> pb.PutEndResponse:
        receipt = await self.run(self.pool.put_end_in_steps(request.ticket_id, request.checksums, owner_of(context)))
        return wire.message_of(receipt, pb.PutEndResponse, boot_token=self.boot_token)

    async def PutRevoke(self, request: pb.PutRevokeRequest, context: Any) -> pb.PutRevokeResponse:
        revoked = self.pool.put_revoke(request.ticket_id, owner_of(context))
        return pb.PutRevokeResponse(boot_token=self.boot_token, revoked=revoked)

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:
        fingerprint = self.fingerprint(request.namespace)
        runs = self.runs(request.runs, self.pool.limits.max_lookup_blocks)
        if any(run.parent_hash for run in runs):
            raise InvalidRequestError("a run has a parent_hash; give the blocks of a prompt from its first token on")
        # Not recorded: what routers ask for is neither a use of blocks nor a hit or miss of an engine.
        found = await self.run(self.pool.lookups.find(fingerprint, runs, prefix_only=False))
        usable = usable_tokens(found.namespace.spec.groups, runs, found.hits)
        totals = self.reports.of_namespace(fingerprint)
        seconds = totals.load_seconds * usable / totals.loaded_tokens if totals and totals.loaded_tokens else 0.0
        hits = wire.encode_hits(found.hits, runs)
        return pb.ExistsResponse(boot_token=self.boot_token, hits=hits, usable_tokens=usable, load_seconds=seconds)

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintResponse:
        fingerprint = self.fingerprint(request.namespace)
        runs = self.runs(request.runs, self.pool.limits.max_lookup_blocks)
        kind, hints = wire.decode_hint_kind(request.kind), self.pool.hints
        pin_seconds = min(request.pin_seconds, MAX_PIN_S) if kind is HintKind.PIN else 0
        if kind is HintKind.PREFETCH:
            self.drain.check()
            result = await self.tiered.prefetch(fingerprint, runs)
        elif kind is HintKind.EXPIRE:
            result = await self.run(hints.expire_in_steps(fingerprint, runs))
        elif pin_seconds:
            result = await self.run(hints.pin_in_steps(fingerprint, runs, pin_seconds))
        else:
            result = await self.run(hints.unpin_in_steps(fingerprint, runs))
        return wire.message_of(result, pb.HintResponse, boot_token=self.boot_token, pin_seconds=pin_seconds)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        checked, dropped = await self.verifier.verify(fingerprint, runs, owner_of(context).name)
        return pb.VerifyResponse(boot_token=self.boot_token, num_checked=checked, num_dropped=dropped)
