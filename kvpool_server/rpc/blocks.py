"""The RPCs of blocks: Lookup, LookupStream, Get, Release; PutStart, PutEnd, PutRevoke; Exists, Hint."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import Message

from kvpool.protocol import wire
from kvpool.protocol.errors import BusyError, InvalidRequestError, KVPoolError
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.types import HintKind, Slots
from kvpool.security.principal import Role
from kvpool.transport.data_port import Kind, Offsets, pack_offsets
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Context
from kvpool_server.access.caller import CALLER
from kvpool_server.cache.hints import MAX_PIN_S
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.lookups import usable_tokens
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, STEP_BLOCKS, Steps
from kvpool_server.data_plane.permits import NO_BOUND, Bound
from kvpool_server.process.runtime import begun
from kvpool_server.reports.usage_ledger import count_evictions
from kvpool_server.rpc.buffers import MAX_REQUEST_BYTES, Unsent, check_deadline
from kvpool_server.rpc.handlers import Handlers, attributes_of_caller, decoded, owner_of

Call = asyncio.Task[Any]

MAX_BROUGHT_UP = 4 * LOOKUP_STEP_BLOCKS
"""Blocks that one call brings up for a server that hands its own over."""
MAX_LEASES_OF_SERVERS, MAX_OWN_LEASES, SERVER_LEASE_MS = 16, 8, 5_000
"""Leases of other servers at once, and of one of their connections, and their longest time. Servers share a name, and
each has one connection to another. The wire is first of all for the engines of this server, and a server that is
refused asks the next one that has the blocks."""


class _Answer(NamedTuple):
    """One reply of a stream of lookups."""

    reply: bytes
    unsent: Unsent
    is_error: bool = False

    async def send(self, context: Context) -> None:
        await context.write(self.reply)
        self.unsent.end()


class BlockHandlers(Handlers):
    """Lookups with their leases, puts with their tickets, and what clients say of blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.streams = LookupStreams(self.pool.limits.max_streams)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, owner_of(context), context, request.wait_ms)

    def forget(self, reply: Message, owner: Owner) -> None:
        """Ends the lease or ticket of a reply that nobody will hear of."""
        self.pool.release([getattr(reply, "lease_id", 0)], owner)
        self.pool.put_revoke(getattr(reply, "ticket_id", 0), owner)

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
        sending: asyncio.Task[None] | None = None
        unsent = deque[Unsent](maxlen=2)  # Of the reply that is being sent, and the one that waits for that.
        try:
            while not streams.is_ended(task):
                streams.wait(task)
                # Takes a third less time than the iterators of requests and replies.
                message = await context.read()
                streams.work(task)
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    break
                if (answer := await self._answer(message, owner, context)) is not None:
                    unsent.append(answer.unsent)
                    if sending is not None:
                        await sending
                    sending = await begun(answer.send(context))
                    if sending is not None:
                        streams.work(task)
                        sending.add_done_callback(lambda _: streams.wait(task), context=contextvars.Context())
                    if len(message) == MESSAGE_BYTES and answer.is_error:
                        break  # More pieces of the request may follow.
                    del answer  # The stream may be idle for long.
        except asyncio.CancelledError:
            if not streams.is_ended(task):
                raise  # The client has hung up.
        finally:
            try:
                if sending is not None:
                    await asyncio.gather(sending, return_exceptions=True)
            finally:
                streams.finish(task)
                for each in unsent:
                    each.end()

    async def _answer(self, first: bytes, owner: Owner, context: Context) -> _Answer | None:
        """The answer to one request of a stream, by its first message; None to one that only releases leases."""
        give_back = None
        try:
            message, give_back = await self.inbox.whole(context, first, MAX_REQUEST_BYTES)
            request = await decoded(self.turns, pb.LookupRequest, message)
            with self.metrics.timed("Lookup" if request.runs else "Release"):
                found = await self._lookup(request, owner, context)
            if request.release and not request.runs:
                return None
            reply = pb.LookupReply(found=found).SerializeToString()
            return _Answer(reply, self.outbox.hold(owner.name, reply, lambda: self.forget(found, owner)))
        except KVPoolError as error:
            reply = wire.encode_lookup_error(error).SerializeToString()
            return _Answer(reply, self.outbox.hold("", reply), is_error=True)
        finally:
            if give_back is not None:
                give_back()

    async def _lookup(
        self, request: pb.LookupRequest, owner: Owner, context: Context, wait_ms: int = 0
    ) -> pb.LookupResponse:
        """As `_found`, with a span where calls are traced."""
        if self.tracing is None or not request.runs:
            return await self._found(request, owner, context, wait_ms)
        attributes: dict[str, str | int] = {
            "rpc.method": "Lookup",
            "kvpool.runs": len(request.runs),
            **attributes_of_caller(),
        }
        with self.tracing.span("kvpool.lookup", request.traceparent, attributes, kind="SERVER") as span:
            reply = await self._found(request, owner, context, wait_ms)
            span.set_attribute("kvpool.leading_blocks", sum(hit.num_leading for hit in reply.hits))
            span.set_attribute("kvpool.pending_blocks", sum(hit.num_pending for hit in reply.hits))
            span.set_attribute("kvpool.leased", reply.lease_id != 0)
            return reply

    async def _found(
        self, request: pb.LookupRequest, owner: Owner, context: Context, wait_ms: int
    ) -> pb.LookupResponse:
        """Releases the leases that a request names, then looks up its runs."""
        if request.release:
            self.check_count(len(request.release), "leases")
            await self.run(self._released(request.release, owner))
            if not request.runs:
                return pb.LookupResponse(boot_token=self.boot_token)
        role = None if (principal := CALLER.get()) is None else principal.role
        here = role is Role.PEER or (request.here and role in (None, Role.OPERATOR))
        bring_up = here and request.bring_up
        self.drain.check(of_server=here and request.lease_ttl_ms > 0)
        fingerprint = self.fingerprint(request.namespace)
        most = self.pool.limits.max_lookup_blocks
        runs = self.runs(request.runs, min(most, MAX_BROUGHT_UP) if bring_up else most)
        now_ns = time.monotonic_ns()
        if bring_up:
            found = await self.run(self.tiered.bring_up(fingerprint, runs, request.prefix_only))
            return wire.encode_lookup(found, runs, self.boot_token)
        ttl_ms, peer = request.lease_ttl_ms, ""
        if here:
            peer = context.peer()  # Not known any more once the caller has hung up.
            leases = {each: theirs for each, theirs in self.leases_of_servers.items() if each in self.pool.leases}
            self.leases_of_servers = leases
            if len(leases) >= MAX_LEASES_OF_SERVERS or list(leases.values()).count(peer) >= MAX_OWN_LEASES:
                raise BusyError(f"{len(leases)} leases of other servers are not released yet; ask another server")
            ttl_ms = min(ttl_ms, SERVER_LEASE_MS)
        found = await self.tiered.lookup(
            fingerprint, runs, request.prefix_only, ttl_ms, request.locate, owner, wait_ms, here
        )
        if here and found.lease_id:
            self.leases_of_servers[found.lease_id] = peer
        if request.explain:
            found = dataclasses.replace(found, hits=self.pool.explanations.misses(fingerprint, runs, found.hits))
            if self.ledger is not None and not found.retry_after_ms:  # Else the lookup is going to be repeated.
                count_evictions(self.pool, fingerprint, runs, found.hits, self.ledger)
        if found.slots and self.permits is not None:
            deadline_ns = now_ns + found.lease_ttl_ms * 1_000_000
            slots = []
            for run, each in zip(runs, found.slots, strict=True):
                if each.offsets:
                    offsets = np.frombuffer(each.offsets, "<u8")
                    slot_bytes = self.pool.group_spec(fingerprint, run).slot_bytes
                    permit = self._permit(Kind.READ, found.lease_id, deadline_ns, slot_bytes, offsets, owner)
                    each = Slots(each.offsets, each.checksums, permit)
                slots.append(each)
            found = dataclasses.replace(found, slots=tuple(slots))
        return wire.encode_lookup(found, runs, self.boot_token)

    def _permit(
        self, kind: Kind, hold_id: int, deadline_ns: int, region_bytes: int, offsets: Sequence[int] | Offsets, by: Owner
    ) -> bytes:
        """A permit for the data port to move a ticket's or lease's regions until the deadline; empty without the port.

        Also empty if the ticket or lease has ended since the call's last step: nothing would end the permit.
        """
        if self.permits is None or hold_id not in (self.pool.leases if kind is Kind.READ else self.pool.tickets):
            return b""
        bound = Bound.of(by.name, self.pool.limits_of(by.name).connections) if by.tenant else NO_BOUND
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
        released = await self.run(self._released(request.lease_ids, owner_of(context)))
        return pb.ReleaseResponse(boot_token=self.boot_token, num_released=released)

    def _released(self, lease_ids: Sequence[int], owner: Owner) -> Steps[int]:
        """Ends leases; returns how many were live."""
        released = 0
        for start in range(0, len(lease_ids), STEP_BLOCKS):
            if start:
                yield
            released += self.pool.release(lease_ids[start : start + STEP_BLOCKS], owner)
        return released

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        self.drain.check()
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        shards, owner = wire.decode_shards(request.shards), owner_of(context)
        grant = await self.run(self.put_start(fingerprint, runs, shards, request.ticket_ttl_ms, owner))
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


class LookupStreams:
    """The LookupStream calls of one server, `max_streams` at once. A call is named by its task. The event loop owns it.

    An idle call makes room for another one: its client opens a new one when it needs it.
    """

    def __init__(self, max_streams: int):
        self._max_streams = max_streams
        self._owner_of: dict[Call, str] = {}  # Without those in `_ended`.
        self._num_busy: Counter[Call] = Counter()  # What each has to do, of those in `_owner_of`.
        self._idle: dict[Call, None] = {}  # The one that has been idle longest is first.
        self._ended: set[Call] = set()
        self._is_stopping = False

    def begin(self, call: Call, owner: str, most: int) -> bool:
        """Counts a call among those of its owner, who may have `most`; ends idle ones if there are too many.

        False, and the call does not count, if too many are not idle.
        """
        while list(self._owner_of.values()).count(owner) >= most:
            if not self._end_longest_idle(owner):
                return False
        if len(self._owner_of) >= self._max_streams and not self._end_longest_idle():
            return False
        self._owner_of[call] = owner
        self._num_busy[call] = 1
        return True

    def wait(self, call: Call) -> None:
        """The call awaits a message, or has sent a reply: it is idle once it has done both."""
        self._num_busy[call] -= 1
        if not self._num_busy[call]:
            self._idle[call] = None
            if self._is_stopping:
                call.cancel()

    def work(self, call: Call) -> None:
        """A message has come, or a reply is being sent."""
        self._num_busy[call] += 1
        self._idle.pop(call, None)

    def is_ended(self, call: Call) -> bool:
        """Whether the call was cancelled to make room, or because the server stops."""
        return self._is_stopping or call in self._ended

    def finish(self, call: Call) -> None:
        """The call returns. Call it once for each call that has begun."""
        self._forget(call)
        self._ended.discard(call)

    def stop(self) -> None:
        """Ends all calls, which would otherwise last as long as their clients; those that send, after their reply.

        gRPC does not end a call that is cancelled while a reply is being sent.
        """
        self._is_stopping = True
        for call in list(self._idle):
            call.cancel()

    def _end_longest_idle(self, owner: str | None = None) -> bool:
        """Ends the call that has been idle longest, of an owner or of all. False if none is idle."""
        call = next((call for call in self._idle if owner is None or self._owner_of[call] == owner), None)
        if call is None:
            return False
        self._forget(call)
        self._ended.add(call)
        call.cancel()
        return True

    def _forget(self, call: Call) -> None:
        self._idle.pop(call, None)
        self._owner_of.pop(call, None)
        self._num_busy.pop(call, None)
