"""The gRPC service: decode -> pool -> encode. All meaning is in the pool, all translation in `kvpool.wire`.

A handler raises `KVPoolError`s; `grpc_server` maps them to statuses and counts the calls. One event loop runs all
handlers, so a handler is atomic between two awaits. None holds the loop for long: counts and sizes are checked before
work that is proportional to them, and work on many blocks is done in steps (`turns.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import structlog
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvpool import types, wire
from kvpool.data_port import Kind, pack_offsets
from kvpool.errors import InvalidRequestError, KVPoolError, OutOfSpaceError, UnavailableError, UnknownNamespaceError
from kvpool.principal import Role
from kvpool.types import BlockRun, Offer, OpenedNamespace, Piece, PoolKey, PoolStats, PutStatus, Slots
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolServicer
from kvpool.version import __version__
from kvpool_server.access.caller import (
    CALLER,
    Who,
    check_all_tenants,
    check_tenant,
    is_visible,
    may_create_namespaces,
    may_map_memory,
    may_open_namespaces,
    may_see_quota,
    own_tenant,
)
from kvpool_server.access.permissions import CALLS
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.namespaces import unknown_namespace
from kvpool_server.cache.pool import is_corrupt
from kvpool_server.cache.steps import LOOKUP_STEP_BLOCKS, Steps
from kvpool_server.cache.tier_access import pin
from kvpool_server.data_plane.permits import NO_BOUND, Bound, PermitTable
from kvpool_server.inbox import MAX_CONTROL_BYTES, MAX_LOOKUP_BYTES, REQUEST, Inbox, check_size
from kvpool_server.inline_chunks import get_chunk, put_chunk
from kvpool_server.lookup_streams import LookupStreams
from kvpool_server.metrics import RpcMetrics
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.tier import TierError
from kvpool_server.turns import Turns

log = structlog.get_logger()

PIECE_BYTES = 1 << 20
"""Largest payload of one Write or Read message. Larger messages copy no faster; smaller ones cost more calls."""

INLINE_CHUNKS_PER_TURN = 64
"""Chunks of one PutChunks message that are stored before other calls get a turn."""

MAX_STREAM_S = 600.0
"""Longest deadline of a call whose replies are a stream. Nothing but its deadline ends the call, with what it holds in
memory, while its client is connected and does not read."""
VERIFIED_BYTES = 64 << 20
"""Bytes that a thread verifies before it looks whether the call was cancelled."""

_SERVICE = pb.DESCRIPTOR.services_by_name["Pool"]
SERVICE_NAME: str = _SERVICE.full_name
METHODS = frozenset(method.name for method in _SERVICE.methods)

Context = grpc.aio.ServicerContext[Any, Any]


class PoolService(PoolServicer):
    """Serves one pool.

    Args:
        memory: the arena, uint8 [arena_bytes].
        offer: the ways that bytes can travel to and from the arena.
        stats: takes a snapshot of the pool and its tiers.
        permits: for the data port; None if the server has no data port.
        who: how callers prove who they are; None: they prove nothing.
        turns: runs the work in steps.
        memory_tenant: whose engines may map the arena's memory, where callers prove who they are; empty: nobody's.
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
        memory_tenant: str = "",
    ):
        self._tiered = pool
        self._memory_tenant = memory_tenant
        self._who = who
        self._pool = pool.pool
        self._memory = memory
        self._offer = offer
        self._boot_token = boot_token
        self._metrics = metrics
        self._stats = stats
        self._permits = permits
        self._started = time.monotonic()
        self._turns = turns or Turns()
        self._verifying = asyncio.Semaphore(1)
        self._streams = LookupStreams(self._pool.limits.max_streams)

    @property
    def limits(self) -> Limits:
        return self._pool.limits

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.OpenNamespaceResponse:
        spec = wire.decode_spec(request.spec)
        check_tenant(spec.tenant)
        if request.expected_fingerprint not in (b"", spec.fingerprint()):
            self._visible(request.expected_fingerprint)  # The error that follows says how the two differ.
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
        opened = OpenedNamespace(namespace.fingerprint, self._offered(), created, self._pool.limits.max_batch_blocks)
        return wire.encode_opened(opened, self._boot_token)

    def _namespace(self, name: bytes) -> bytes:
        """The fingerprint in a request.

        Raises UnknownNamespaceError for a namespace of another tenant, as for one that is not open: nobody can tell
        them apart.
        """
        return self._visible(wire.decode_namespace(name))

    def _visible(self, fingerprint: bytes) -> bytes:
        namespace = self._pool.namespace(fingerprint)
        if not is_visible(namespace.spec.tenant if namespace is not None else None):
            raise unknown_namespace(fingerprint)
        return fingerprint

    def _key(self, message: pb.PoolKey) -> PoolKey:
        key = wire.decode_key(message)
        self._visible(key.namespace)
        return key

    def _runs(self, runs: Sequence[pb.BlockRun], max_blocks: int = 0) -> list[BlockRun]:
        most = self._pool.limits.max_runs
        if len(runs) > most:
            raise InvalidRequestError(f"{len(runs)} runs in one message; give at most {most}, and split larger ones")
        return wire.decode_runs(runs, max_blocks or self._pool.limits.max_batch_blocks)

    def _check_count(self, count: int, what: str) -> None:
        if count > self._pool.limits.max_batch_blocks:
            most = self._pool.limits.max_batch_blocks
            raise InvalidRequestError(f"{count} {what} in one message; give at most {most}, and split larger ones")

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, _owner(context), request.wait_ms)

    async def _lookup(self, request: pb.LookupRequest, owner: Owner, wait_ms: int = 0) -> pb.LookupResponse:
        if request.release:
            self._check_count(len(request.release), "leases")
            self._pool.release(request.release, owner)
            if not request.runs:
                return pb.LookupResponse(boot_token=self._boot_token)
        fingerprint = self._namespace(request.namespace)
        runs = self._runs(request.runs, self._pool.limits.max_lookup_blocks)
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
        if found.slots and self._permits is not None:
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
            request = _decode(pb.LookupRequest, check_size(message, MAX_LOOKUP_BYTES))
            with self._metrics.timed("Lookup" if request.runs else "Release"):
                found = await self._lookup(request, owner)
        except KVPoolError as error:
            return wire.encode_lookup_error(error)
        return pb.LookupReply(found=found) if request.runs or not request.release else None

    def end_streams(self) -> None:
        """Ends the LookupStream calls, which would otherwise last as long as their clients."""
        self._streams.stop()

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        namespace, runs = self._namespace(request.namespace), self._runs(request.runs)
        shards = wire.decode_shards(request.shards)
        now_ns = time.monotonic_ns()
        ttl_ms, owner = request.ticket_ttl_ms, _owner(context)
        grant = await self._turns.run(self._pool.put_start_in_steps(namespace, runs, shards, ttl_ms, owner))
        if grant.offsets:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = now_ns + grant.ticket_ttl_ms * 1_000_000
            permit = self._permit(Kind.WRITE, grant.ticket_id, deadline_ns, region_bytes, grant.offsets, owner)
            grant = dataclasses.replace(grant, permit=permit)
        return wire.encode_grant(grant, self._boot_token)

    def _permit(
        self, kind: Kind, holding_id: int, deadline_ns: int, region_bytes: int, offsets: Sequence[int], owner: Owner
    ) -> bytes:
        """The right to move regions through the data port until their ticket or lease ends; empty without a port."""
        if self._permits is None:
            return b""
        packed = pack_offsets(offsets)
        return self._permits.permit(kind, holding_id, deadline_ns, region_bytes, packed, self._bound(owner))

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
        namespace, runs = self._namespace(request.namespace), self._runs(request.runs)
        shards = wire.decode_shards(request.shards)
        now_ns, owner = time.monotonic_ns(), _owner(context)
        located = self._pool.get(request.lease_id, namespace, runs, shards, owner)
        if located.offsets:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = now_ns + located.lease_remaining_ms * 1_000_000
            permit = self._permit(Kind.READ, request.lease_id, deadline_ns, region_bytes, located.offsets, owner)
            located = dataclasses.replace(located, permit=permit)
        return wire.encode_located(located, self._boot_token)

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Piece]:
        _check_deadline(context)
        self._check_count(len(request.offsets), "regions")
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
        self._check_count(len(request.lease_ids), "leases")
        released = self._pool.release(request.lease_ids, _owner(context))
        return pb.ReleaseResponse(boot_token=self._boot_token, num_released=released)

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses = bytearray()
        async for request in requests:
            self._check_count(len(request.chunks), "chunks")
            for nth, message in enumerate(request.chunks, 1):
                self._key(message.key)
                chunk = wire.decode_chunk(message)
                statuses.append(status := await put_chunk(self._pool, self._memory, chunk, self._turns.run))
                if status is PutStatus.GRANTED:
                    self._metrics.add_bytes("write", len(chunk.payload))
                if nth % INLINE_CHUNKS_PER_TURN == 0:
                    await asyncio.sleep(0)  # Other calls do not wait for the whole message.
        return pb.PutChunksResponse(boot_token=self._boot_token, statuses=bytes(statuses))

    async def GetChunks(self, request: pb.GetChunksRequest, context: Any) -> AsyncIterator[pb.GetChunksResponse]:
        _check_deadline(context)
        self._check_count(len(request.keys), "keys")
        for index, key in enumerate(request.keys):
            chunk = await get_chunk(self._tiered, self._memory, self._key(key), self._verify)
            reply = pb.GetChunksResponse(boot_token=self._boot_token, index=index, found=chunk is not None)
            if chunk is not None:
                self._metrics.add_bytes("read", len(chunk.payload))
                reply.chunk.CopyFrom(wire.encode_chunk(chunk))
            yield reply

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        checked, dropped = await self._verify(self._namespace(request.namespace), self._runs(request.runs))
        return pb.VerifyResponse(boot_token=self._boot_token, num_checked=checked, num_dropped=dropped)

    async def _verify(self, fingerprint: bytes, runs: list[BlockRun]) -> tuple[int, int]:
        """Has a thread compute the checksums, one call at a time, under a lease that keeps the bytes in their place."""
        async with self._verifying:
            entries = self._pool.complete(fingerprint, runs)
            lease_id = pin(self._pool, entries)
            corrupt: list[Entry] = []
            try:
                count = max(1, VERIFIED_BYTES // entries[0].group.spec.slot_bytes) if entries else 1
                for start in range(0, len(entries), count):
                    corrupt += await asyncio.to_thread(self._corrupt, entries[start : start + count])
            finally:
                self._pool.release([lease_id])
        dropped = await self._turns.run(self._pool.drop_corrupt_in_steps(corrupt))
        if dropped:
            log.error("corrupt blocks dropped", checked=len(entries), dropped=dropped)
        return len(entries), dropped

    def _corrupt(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if is_corrupt(entry, lambda at, nbytes: self._memory[at : at + nbytes])]

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        fingerprint, runs = self._namespace(request.namespace), self._runs(request.runs)
        removed = await _removed(self._tiered.remove(fingerprint, runs))
        return pb.RemoveResponse(boot_token=self._boot_token, num_removed=removed)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        if not request.namespace:
            check_all_tenants("Clear of all namespaces")
        fingerprint = self._namespace(request.namespace) if request.namespace else b""
        removed = await _removed(self._tiered.clear(fingerprint))
        log.info("cleared", namespace=fingerprint.hex()[:12] or "all", blocks=removed)
        return pb.ClearResponse(boot_token=self._boot_token, num_removed=removed)

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingResponse:
        uptime = time.monotonic() - self._started
        return wire.encode_pong(
            __version__, uptime, self._offered(), self._boot_token, self._pool.num_opened(own_tenant())
        )

    def _offered(self) -> Offer:
        """What the caller is told: where memory lies, and the token that hands it out, are for those who may use it."""
        offer = self._offer
        if not may_map_memory(self._memory_tenant):
            offer = dataclasses.replace(offer, segment=None)
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
            reply.namespaces.append(wire.encode_namespace_info(info))
            yield
        return reply

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        quotas = [quota for quota in self._pool.quotas() if may_see_quota(quota.subject)]
        return pb.ListQuotasResponse(boot_token=self._boot_token, quotas=wire.encode_quotas(quotas))

    async def SetQuotas(self, request: pb.SetQuotasRequest, context: Any) -> pb.SetQuotasResponse:
        if len(request.quotas) > (most := self._pool.limits.max_quotas):
            raise InvalidRequestError(f"{len(request.quotas)} quotas in one message; give at most {most}")
        await self._turns.run(self._pool.set_quotas_in_steps(wire.decode_quotas(request.quotas)))
        log.info("quotas set", **{quota.subject: quota.limit_bytes for quota in request.quotas})
        return pb.SetQuotasResponse(boot_token=self._boot_token, quotas=wire.encode_quotas(self._pool.quotas()))


def _check_deadline(context: Context) -> None:
    """Raises InvalidRequestError unless gRPC ends the call within MAX_STREAM_S."""
    remaining_s = context.time_remaining()
    if remaining_s is None or remaining_s > 1.02 * MAX_STREAM_S:  # gRPC rounds deadlines up on their way.
        has = "no deadline" if remaining_s is None else f"a deadline in {remaining_s:.0f} s"
        raise InvalidRequestError(f"a call with a stream of replies has {has}; give it one within {MAX_STREAM_S:.0f} s")


def _owner(context: Context) -> Owner:
    """Whose leases and tickets a call's are: the caller's, or where callers prove nothing, the connection's."""
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


def add_service(service: PoolService, server: grpc.aio.Server) -> None:
    """Registers a handler for each RPC of the service in the proto."""
    inbox = Inbox()
    handlers = {method.name: _handler(service, method, inbox) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


_Message = TypeVar("_Message", bound=Message)


def _decode(message_type: type[_Message], message: bytes) -> _Message:
    """Raises InvalidRequestError if the bytes are no such message."""
    try:
        return message_type.FromString(message)
    except DecodeError:
        raise InvalidRequestError(
            f"the request is no {message_type.DESCRIPTOR.name}; see kvpool/v1/pool.proto"
        ) from None


def _decode_piece(message: bytes) -> Piece:
    try:
        return wire.decode_piece(message)
    except DecodeError:
        raise InvalidRequestError("the request is no WriteRequest; see kvpool/v1/pool.proto") from None


_CODECS: dict[str, Callable[..., Any]] = {"Write": _decode_piece, "Read": wire.encode_piece}
"""Payloads travel as `Piece`s: the protobuf library would copy each of them three times, `wire` copies it once."""


def _handler(service: PoolService, method: MethodDescriptor, inbox: Inbox) -> grpc.RpcMethodHandler[Any, Any]:
    """Gets messages as bytes from gRPC, whether the method has one or many: the inbox bounds and awaits them."""
    behavior = getattr(service, method.name)
    message_type = GetMessageClass(method.input_type)
    encode = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(behavior, None, encode)
    if method.client_streaming:
        decode = _CODECS.get(method.name) or functools.partial(_decode, message_type)

        async def of_stream(_: object, context: Context) -> Any:
            async with aclosing(inbox.stream(context)) as messages:
                return await behavior((decode(message) async for message in messages), context)

        return grpc.stream_unary_rpc_method_handler(of_stream, None, encode)
    spec_bytes = service.limits.max_spec_bytes
    most = {"OpenNamespace": spec_bytes, "SetQuotas": spec_bytes, "Lookup": MAX_LOOKUP_BYTES}.get(
        method.name, MAX_CONTROL_BYTES
    )

    async def of_one(_: object, context: Context) -> Any:
        request = _decode(message_type, await inbox.receive(context, most))
        REQUEST.set(request)
        return await behavior(request, context)

    async def replies(_: object, context: Context) -> AsyncIterator[Any]:
        request = _decode(message_type, await inbox.receive(context, most))
        async with aclosing(behavior(request, context)) as messages:
            async for message in messages:
                yield message

    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(replies, None, _CODECS.get(method.name, encode))
    return grpc.stream_unary_rpc_method_handler(of_one, None, encode)
