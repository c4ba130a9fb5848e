"""The gRPC service: decode -> pool -> encode. All meaning is in the pool, all translation in `kvpool.wire`.

A handler raises `KVPoolError`s; `grpc_server` maps them to statuses and counts the calls. One event loop runs all
handlers, so a handler is atomic between two awaits. None holds the loop for long: counts and sizes are checked before
work that is proportional to them, and work on many blocks is done in steps (`turns.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from kvpool import types, wire
from kvpool.data_port import Kind, pack_offsets
from kvpool.errors import InvalidRequestError, KVPoolError, OutOfSpaceError, UnavailableError, UnknownNamespaceError
from kvpool.explanation import Explanation
from kvpool.explanation_messages import encode_explanation, encode_run
from kvpool.holdings import NamespaceInfo
from kvpool.principal import Role
from kvpool.quotas import beyond_memory
from kvpool.reports import MAX_STAGES
from kvpool.types import (
    MAX_ANNOUNCED_BLOCKS,
    MAX_ANNOUNCED_TOKENS,
    BlockRun,
    Existence,
    HintKind,
    Offer,
    OpenedNamespace,
    Piece,
    PoolStats,
    PutStatus,
    SegmentInfo,
    Slots,
)
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolServicer
from kvpool.value import ValueReport
from kvpool.version import __version__
from kvpool_server.access.authentication import Who
from kvpool_server.access.caller import (
    CALLER,
    check_all_tenants,
    check_measurement,
    check_tenant,
    is_visible,
    mapping_tenant,
    may_announce,
    may_create_namespaces,
    may_open_namespaces,
    may_see_quota,
    own_tenant,
)
from kvpool_server.access.permissions import CALLS
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.cache.pins import MAX_PIN_S
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Steps
from kvpool_server.cache.usable import usable_tokens
from kvpool_server.data_plane.permits import NO_BOUND, Bound, PermitTable
from kvpool_server.drain import Drain
from kvpool_server.events.streams import EventStreams
from kvpool_server.explainer import Explainer
from kvpool_server.inbox import MAX_LOOKUP_BYTES, check_size
from kvpool_server.inline_chunks import get_chunk, put_chunk
from kvpool_server.lookup_streams import LookupStreams
from kvpool_server.method_handlers import METHODS, decode
from kvpool_server.metrics import RpcMetrics
from kvpool_server.release_gate import ReleaseGate
from kvpool_server.reports.engines import EngineReports
from kvpool_server.reports.evictions import count_evictions
from kvpool_server.reports.usage_ledger import UsageLedger
from kvpool_server.request_reader import RequestReader
from kvpool_server.request_traces import RequestTraces
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.tier import TierError
from kvpool_server.turns import Turns
from kvpool_server.verifier import Verifier

log = structlog.get_logger()

PIECE_BYTES = 1 << 20
"""Largest payload of one Write or Read message. Larger messages copy no faster; smaller ones cost more calls."""

INLINE_CHUNKS_PER_TURN = 64
"""Chunks of one PutChunks message that are stored before other calls get a turn."""

MAX_STREAM_S = 600.0
"""Longest deadline of a call whose replies are a stream. Nothing but its deadline ends the call, with what it holds in
memory, while its client is connected and does not read."""

Context = grpc.aio.ServicerContext[Any, Any]


class PoolService(PoolServicer):
    """Serves one pool.

    Args:
        memory: the arena, uint8 [arena_bytes].
        offer: the ways that bytes can travel to and from the arena.
        stats: takes a snapshot of the pool and its tiers.
        permits: for the data port; None if the server has no data port.
        who: authenticates callers; None: callers are not authenticated.
        turns: runs the work in steps.
        memory_of: what a tenant's engines may map, where callers prove who they are; None: nothing.
        reports: gets what engines report.
        ledger: gets what lookups have missed because of other tenants; None: there is none.
        value: what other arena sizes would hit, of a tenant or of all; None: nothing is simulated.
        drain: refuses new leases and tickets once it has begun; None: one that nobody else knows of.
        events: gets the tokens that engines announce; None: nobody wants them.
    """

    def __init__(
        self,
        pool: TieredPool,
        memory: npt.NDArray[np.uint8],
        offer: Offer,
        boot_token: int,
        metrics: RpcMetrics,
        stats: Callable[[], PoolStats],
        permits: PermitTable | None = None,
        who: Who | None = None,
        turns: Turns | None = None,
        memory_of: Callable[[str], SegmentInfo | None] | None = None,
        reports: EngineReports | None = None,
        ledger: UsageLedger | None = None,
        value: Callable[[str | None], ValueReport] | None = None,
        drain: Drain | None = None,
        events: EventStreams | None = None,
    ):
        self._tiered = pool
        self._memory_of = memory_of
        self._who = who
        self._pool = pool.pool
        self._reader = RequestReader(self._pool)
        self._memory = memory
        self._offer = offer
        self._boot_token = boot_token
        self._metrics = metrics
        self._stats = stats
        self._permits = permits
        self._started = time.monotonic()
        self._turns = turns or Turns()
        self._explainer = Explainer(pool, self._turns.run)
        self._traces = RequestTraces(time.monotonic)
        self._reports = reports or EngineReports(time.monotonic)
        self._ledger = ledger
        self._value = value or (lambda _: ValueReport(False, pool.pool.arena.arena_bytes, ""))
        self._gate = ReleaseGate()
        self._drain = drain or Drain(pool, 0, _tell_nobody)
        self._events = events
        self._verifier = Verifier(self._pool, memory, self._turns.run)
        self._streams = LookupStreams(self._pool.limits.max_streams)

    @property
    def max_spec_bytes(self) -> int:
        """The largest request of a method that sets what the server keeps."""
        return self._pool.limits.max_spec_bytes

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.OpenNamespaceResponse:
        self._drain.check()
        self._gate.check(wire.decode_release(request), wire.decode_opener(request.opener))
        spec = wire.decode_spec(request.spec)
        check_tenant(spec.tenant)
        check_measurement(spec)
        if request.expected_fingerprint not in (b"", spec.fingerprint()):
            self._reader.visible(request.expected_fingerprint)  # The error that follows says how the two differ.
        if not may_create_namespaces() and self._pool.namespace(spec.fingerprint()) is None:
            raise UnknownNamespaceError(
                f"namespace {spec.fingerprint().hex()[:12]} is not open on this server, and a caller that only reads "
                f"cannot create it; try again when an engine of role {Role.ENGINE_WRITE} has opened it"
            )
        namespace, created = self._pool.open_namespace(
            spec, request.expected_fingerprint, wire.decode_opener(request.opener)
        )
        if created:
            log.info(
                "namespace opened",
                model=namespace.spec.model,
                fingerprint=namespace.fingerprint.hex()[:12],
                block_bytes=[group.slot_bytes for group in namespace.spec.groups],
            )
        offered, most = self._offered(context), self._pool.limits.max_batch_blocks
        wants_tokens = self._events is not None and may_announce() and self._events.wants_tokens(namespace.spec)
        opened = OpenedNamespace(namespace.fingerprint, offered, created, most, wants_tokens)
        return wire.encode_opened(opened, self._boot_token)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, _owner(context), request.wait_ms)

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
            found = await self._turns.run(self._tiered.lookup_in_steps(fingerprint, runs, *options))
            await asyncio.sleep(0)
        elif wait_ms:
            found = await self._tiered.lookup_once_up(fingerprint, runs, *options, wait_ms=wait_ms)
        else:
            found = self._tiered.lookup(fingerprint, runs, *options)
        if request.explain:
            found = dataclasses.replace(found, hits=self._pool.misses.explain(fingerprint, runs, found.hits))
            if self._ledger is not None and not found.retry_after_ms:  # Else the lookup is going to be repeated.
                count_evictions(self._pool, fingerprint, runs, found.hits, self._ledger)
        if found.slots and self._permits is not None and self._is_live(Kind.READ, found.lease_id):
            found = self._with_permits(found, fingerprint, runs, now_ns + found.lease_ttl_ms * 1_000_000, owner)
        return wire.encode_lookup(found, runs, self._boot_token)

    def _with_permits(
        self, found: types.Lookup, fingerprint: bytes, runs: Sequence[BlockRun], deadline_ns: int, owner: Owner
    ) -> types.Lookup:
        """The same answer, with permits to read whole slots through the data port."""
        assert self._permits is not None
        slots, bound = [], self._bound(owner)
        for run, each in zip(runs, found.slots, strict=True):
            if each.offsets:
                region_bytes = self._pool.slot_bytes(fingerprint, run)
                offsets = np.frombuffer(each.offsets, "<u8")
                permit = self._permits.permit(Kind.READ, found.lease_id, deadline_ns, region_bytes, offsets, bound)
                each = Slots(each.offsets, each.checksums, permit)
            slots.append(each)
        return dataclasses.replace(found, slots=tuple(slots))

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        if any(run.parent_hash for run in runs):
            raise InvalidRequestError("a run has a parent_hash; give the blocks of a prompt from its first token on")
        # Not recorded: what routers ask for is neither a use of blocks nor a hit or miss of an engine.
        found = await self._turns.run(self._pool.find_in_steps(fingerprint, runs, prefix_only=False, lease_ttl_ms=0))
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

    async def LookupStream(self, _: AsyncIterator[pb.LookupRequest], context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        owner = _owner(context)
        try:
            _check_deadline(context)
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

    def end_streams(self) -> None:
        """Ends the LookupStream calls, which would otherwise last as long as their clients."""
        self._streams.stop()

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        self._drain.check()
        namespace, runs = self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        shards = wire.decode_shards(request.shards)
        ttl_ms, owner = request.ticket_ttl_ms, _owner(context)
        grant = await self._turns.run(self._pool.put_start_in_steps(namespace, runs, shards, ttl_ms, owner))
        if grant.offsets:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = time.monotonic_ns() + grant.ticket_ttl_ms * 1_000_000
            permit = self._permit(Kind.WRITE, grant.ticket_id, deadline_ns, region_bytes, grant.offsets, owner)
            grant = dataclasses.replace(grant, permit=permit)
        return wire.encode_grant(grant, self._boot_token)

    def _permit(
        self, kind: Kind, holding_id: int, deadline_ns: int, region_bytes: int, offsets: Sequence[int], owner: Owner
    ) -> bytes:
        """The right to move regions through the data port until their ticket or lease ends; empty without a port."""
        if self._permits is None or not self._is_live(kind, holding_id):
            return b""
        packed = pack_offsets(offsets)
        return self._permits.permit(kind, holding_id, deadline_ns, region_bytes, packed, self._bound(owner))

    def _is_live(self, kind: Kind, holding_id: int) -> bool:
        """Whether a ticket or lease has not ended since the call's last step. Nobody would end a later permit of it."""
        return holding_id in (self._pool.leases if kind is Kind.READ else self._pool.tickets)

    def _bound(self, owner: Owner) -> Bound:
        """Of the owner's connections to the data port."""
        return Bound.of(owner.name, self._pool.limits_of(owner.name).connections) if owner.tenant else NO_BOUND

    async def Write(self, pieces: AsyncIterator[Piece], context: Any) -> pb.WriteResponse:
        nbytes, owner = 0, _owner(context)
        async for piece in pieces:
            payload = np.frombuffer(piece.payload, np.uint8)
            self._pool.writable(piece.token, piece.offset, len(payload), owner)
            self._memory[piece.offset : piece.offset + len(payload)] = payload
            nbytes += len(payload)
        self._metrics.add_bytes("write", nbytes)
        return pb.WriteResponse(boot_token=self._boot_token, nbytes=nbytes)

    async def PutEnd(self, request: pb.PutEndRequest, context: Any) -> pb.PutEndResponse:
        steps = self._pool.put_end_in_steps(request.ticket_id, request.checksums, _owner(context))
        receipt = await self._turns.run(steps)
        return wire.encode_receipt(receipt, self._boot_token)

    async def PutRevoke(self, request: pb.PutRevokeRequest, context: Any) -> pb.PutRevokeResponse:
        revoked = self._pool.put_revoke(request.ticket_id, _owner(context))
        return pb.PutRevokeResponse(boot_token=self._boot_token, revoked=revoked)

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        namespace, runs = self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        shards = wire.decode_shards(request.shards)
        now_ns, owner = time.monotonic_ns(), _owner(context)
        steps = self._pool.get_in_steps(request.lease_id, namespace, runs, shards, owner)
        located = await self._turns.run(steps)
        if located.offsets:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = now_ns + located.lease_remaining_ms * 1_000_000
            permit = self._permit(Kind.READ, request.lease_id, deadline_ns, region_bytes, located.offsets, owner)
            located = dataclasses.replace(located, permit=permit)
        return wire.encode_located(located, self._boot_token)

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Piece]:
        _check_deadline(context)
        self._reader.check_count(len(request.offsets), "regions")
        if request.offsets and not request.region_bytes:
            raise InvalidRequestError("region_bytes is 0; give the bytes of one region")
        nbytes, total, owner = 0, len(request.offsets) * request.region_bytes, _owner(context)
        try:
            for region in request.offsets:
                for offset in range(region, region + request.region_bytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, region + request.region_bytes - offset)
                    self._pool.readable(request.lease_id, offset, size, owner)
                    nbytes += size
                    if nbytes == total:
                        context.set_code(grpc.StatusCode.OK)  # A client may hang up as soon as it has every byte.
                    # gRPC copies the piece into a message before the event loop runs anything else.
                    yield Piece(self._boot_token, offset, self._memory[offset : offset + size].data)
        finally:
            self._metrics.add_bytes("read", nbytes)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self._reader.check_count(len(request.lease_ids), "leases")
        released = self._pool.release(request.lease_ids, _owner(context))
        return pb.ReleaseResponse(boot_token=self._boot_token, num_released=released)

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses, owner = bytearray(), _owner(context)
        async for request in requests:
            self._drain.check()
            self._reader.check_count(len(request.chunks), "chunks")
            for nth, message in enumerate(request.chunks, 1):
                self._reader.key(message.key)
                chunk = wire.decode_chunk(message)
                status = await put_chunk(self._pool, self._memory, chunk, self._turns.run, owner)
                statuses.append(status)
                if status is PutStatus.GRANTED:
                    self._metrics.add_bytes("write", len(chunk.payload))
                if nth % INLINE_CHUNKS_PER_TURN == 0:
                    await asyncio.sleep(0)  # Other calls do not wait for the whole message.
        return pb.PutChunksResponse(boot_token=self._boot_token, statuses=bytes(statuses))

    async def GetChunks(self, request: pb.GetChunksRequest, context: Any) -> AsyncIterator[pb.GetChunksResponse]:
        self._drain.check()
        _check_deadline(context)
        self._reader.check_count(len(request.keys), "keys")
        for index, key in enumerate(request.keys):
            chunk = await get_chunk(self._tiered, self._memory, self._reader.key(key), self._verifier.verify)
            reply = pb.GetChunksResponse(boot_token=self._boot_token, index=index, found=chunk is not None)
            if chunk is not None:
                self._metrics.add_bytes("read", len(chunk.payload))
                reply.chunk.CopyFrom(wire.encode_chunk(chunk))
            yield reply

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        checked, dropped = await self._verifier.verify(
            self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        )
        return pb.VerifyResponse(boot_token=self._boot_token, num_checked=checked, num_dropped=dropped)

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        fingerprint, runs = self._reader.namespace(request.namespace), self._reader.runs(request.runs)
        removed = await _removed(self._tiered.remove(fingerprint, runs))
        return pb.RemoveResponse(boot_token=self._boot_token, num_removed=removed)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        if request.request_id:
            traces = await self._turns.run(self._traces.find_in_steps(request.request_id))
            return encode_explanation(Explanation(requests=traces), self._boot_token)
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        found = await self._explainer.explain(fingerprint, runs)
        reply = encode_explanation(dataclasses.replace(found, runs=()), self._boot_token)
        for run in found.runs:
            reply.runs.append(encode_run(run))
            await asyncio.sleep(0)  # Other calls do not wait for all runs.
        return reply

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintResponse:
        fingerprint = self._reader.namespace(request.namespace)
        runs = self._reader.runs(request.runs, self._pool.limits.max_lookup_blocks)
        kind, hints = wire.decode_hint_kind(request.kind), self._pool.hints
        pin_seconds = min(request.pin_seconds, MAX_PIN_S) if kind is HintKind.PIN else 0
        if kind is HintKind.PREFETCH:
            self._drain.check()
            result = await self._tiered.prefetch(fingerprint, runs)
        elif kind is HintKind.EXPIRE:
            result = await self._turns.run(hints.expire_in_steps(fingerprint, runs))
        elif pin_seconds:
            result = await self._turns.run(hints.pin_in_steps(fingerprint, runs, pin_seconds))
        else:
            result = await self._turns.run(hints.unpin_in_steps(fingerprint, runs))
        return wire.encode_hint_result(result, pin_seconds, self._boot_token)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        if not request.namespace:
            check_all_tenants("Clear of all namespaces")
        fingerprint = self._reader.namespace(request.namespace) if request.namespace else b""
        removed = await _removed(self._tiered.clear(fingerprint))
        log.info("cleared", namespace=fingerprint.hex()[:12] or "all", blocks=removed)
        return pb.ClearResponse(boot_token=self._boot_token, num_removed=removed)

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingResponse:
        uptime, num_opened = time.monotonic() - self._started, self._pool.num_opened(own_tenant())
        offered, draining = self._offered(context), self._drain.is_draining
        return wire.encode_pong(__version__, uptime, offered, self._boot_token, num_opened, draining=draining)

    def _offered(self, context: Context) -> Offer:
        """What the caller is told: where memory lies, and the token that hands it out, are for those who may use it."""
        offer = self._offer
        if self._memory_of is not None and (tenant := mapping_tenant(context)):
            offer = dataclasses.replace(offer, segment=self._memory_of(tenant))
        if not may_open_namespaces():
            offer = dataclasses.replace(offer, mooncake=None)
        return offer

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Any) -> pb.WhoAmIResponse:
        caller = CALLER.get()
        if caller is None or self._who is None:
            return pb.WhoAmIResponse(boot_token=self._boot_token, methods=sorted(METHODS))
        return pb.WhoAmIResponse(
            boot_token=self._boot_token,
            principal=str(caller),
            methods=sorted(CALLS[caller.role]),
            ends_at=int(self._who(context).ends_at.timestamp()),
        )

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return wire.encode_stats(self._stats(), self._boot_token)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Any) -> pb.ListNamespacesResponse:
        return await self._turns.run(self._list_namespaces(holdings=not request.without_holdings))

    def _list_namespaces(self, holdings: bool) -> Steps[pb.ListNamespacesResponse]:
        reply = pb.ListNamespacesResponse(boot_token=self._boot_token)
        for info in [info for info in self._pool.namespaces(holdings=holdings) if is_visible(info.spec.tenant)]:
            if holdings:
                info = dataclasses.replace(info, tiers=self._tiered.holdings(info.fingerprint))
            info = dataclasses.replace(info, pinned_bytes=self._pool.pins.pinned_bytes(info.fingerprint))
            info = self._with_reports(info)
            reply.namespaces.append(wire.encode_namespace_info(info))
            yield
        return reply

    def _with_reports(self, info: NamespaceInfo) -> NamespaceInfo:
        """The same, with what engines have reported of the namespace."""
        totals = self._reports.of_namespace(info.fingerprint)
        if totals is None:
            return info
        return dataclasses.replace(
            info,
            computed_tokens=dict(totals.computed_tokens),
            saved_seconds=totals.saved_seconds,
            lost_seconds=totals.lost_seconds,
        )

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        quotas = [quota for quota in self._pool.quotas() if may_see_quota(quota.subject)]
        tenants = filter(is_visible, {namespace.spec.tenant for namespace in self._pool.open_namespaces()})
        budgets = wire.encode_pin_budgets(self._pool.pins.budgets(tenants))
        return pb.ListQuotasResponse(
            boot_token=self._boot_token, quotas=wire.encode_quotas(quotas), pin_budgets=budgets
        )

    async def SetQuotas(self, request: pb.SetQuotasRequest, context: Any) -> pb.SetQuotasResponse:
        if len(request.quotas) > (most := self._pool.limits.max_quotas):
            raise InvalidRequestError(f"{len(request.quotas)} quotas in one message; give at most {most}")
        await self._turns.run(self._pool.set_quotas_in_steps(wire.decode_quotas(request.quotas)))
        log.info("quotas set", **{quota.subject: quota.limit_bytes for quota in request.quotas})
        quotas = self._pool.quotas()
        if warning := beyond_memory(quotas, self._pool.arena.arena_bytes):
            log.warning(warning)
        return pb.SetQuotasResponse(boot_token=self._boot_token, quotas=wire.encode_quotas(quotas))

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        if not 1 <= (count := len(request.namespaces)) <= MAX_STAGES:
            raise InvalidRequestError(f"{count} namespaces in one report; give 1 to {MAX_STAGES}")
        fingerprints = [self._reader.namespace(name) for name in request.namespaces]
        first = self._pool.namespace(fingerprints[0])
        if first is None:
            raise unknown_namespace(fingerprints[0])
        report, spec = wire.decode_report(request), first.spec
        counted = self._reports.report(report, spec.tenant, spec.model)
        if counted:
            self._traces.add(spec.tenant, report.reporter, report.engine, spec.model, request.requests)
        return pb.ReportResponse(boot_token=self._boot_token, counted=counted)

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> pb.LedgerResponse:
        if self._ledger is None:
            return pb.LedgerResponse(boot_token=self._boot_token)
        page = await self._ledger.page(request.since, request.until, own_tenant())
        # In a thread, because a page has up to MAX_LEDGER_ROWS rows.
        return await asyncio.to_thread(wire.encode_ledger, page, self._boot_token)

    async def Value(self, request: pb.ValueRequest, context: Any) -> pb.ValueResponse:
        return wire.encode_value(self._value(own_tenant()), self._boot_token)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        if request.boot_token not in (0, self._boot_token):
            raise UnavailableError("the server that was to drain has ended, and another one has taken its place")
        return wire.encode_drain(await self._drain.begin(request.deadline_ms), self._boot_token)


async def _tell_nobody() -> None:
    """Announces the drain of a service without a server."""


def _check_deadline(context: Context) -> None:
    """Raises InvalidRequestError unless gRPC ends the call within MAX_STREAM_S."""
    remaining_s = context.time_remaining()
    if remaining_s is None or remaining_s > 1.02 * MAX_STREAM_S:  # gRPC rounds deadlines up on their way.
        has = "no deadline" if remaining_s is None else f"a deadline in {remaining_s:.0f} s"
        raise InvalidRequestError(f"a call with a stream of replies has {has}; give it one within {MAX_STREAM_S:.0f} s")


def _owner(context: Context) -> Owner:
    """Whose leases and tickets a call's are: the caller's, or where callers are not authenticated, the connection's."""
    caller = CALLER.get()
    return Owner(context.peer()) if caller is None else Owner(str(caller), caller.tenant)


async def _removed(removal: Awaitable[int]) -> int:
    """How many blocks the pool has removed. Raises UnavailableError if a tier has not removed its blocks."""
    try:
        return await removal
    except TierError as error:
        raise UnavailableError(
            f"the blocks were removed from memory, but not from every tier: {error}; repeat the call when the tier "
            "is back"
        ) from None
