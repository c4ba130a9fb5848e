"""The gRPC service: decode -> pool -> encode. All meaning is in the pool, all translation in `kvpool.wire`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from kvpool import wire
from kvpool.data_port import Kind, Signer, pack_offsets
from kvpool.errors import ChecksumError, InvalidRequestError, KVPoolError, UnavailableError
from kvpool.hashing import checksum
from kvpool.types import BlockRun, Chunk, Offer, OpenedNamespace, Piece, PoolKey, PoolStats, PutStatus, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolServicer, add_PoolServicer_to_server
from kvpool.version import __version__
from kvpool_server.metrics import RpcMetrics
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.tier import TierError

log = structlog.get_logger()

PIECE_BYTES = 1 << 20
"""Largest payload of one Write or Read message: larger ones copy no faster, smaller ones cost calls."""

INLINE_TTL_MS = 60_000
INLINE_CHUNKS_A_TURN = 64
INLINE_PATIENCE_S = 2.0
"""How long an inline get waits for a block to come up from a tier: who asks has no other way to."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Pool"].full_name

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


class PoolService(PoolServicer):
    """Serves one pool and its tiers.

    Args:
        memory: the arena, uint8 [arena_bytes].
        offer: how clients can get at that memory.
        stats: a snapshot of the pool and its tiers.
        signer: makes permits for the data port; None if there is none.
    """

    def __init__(
        self,
        pool: TieredPool,
        memory: npt.NDArray[np.uint8],
        offer: Offer,
        boot_token: int,
        metrics: RpcMetrics,
        stats: Callable[[], PoolStats],
        signer: Signer | None = None,
    ):
        self._tiered = pool
        self._pool = pool.pool
        self._memory = memory
        self._offer = offer
        self._boot_token = boot_token
        self._metrics = metrics
        self._stats = stats
        self._signer = signer
        self._started = time.monotonic()
        self._idle_streams: set[asyncio.Task[Any]] = set()
        self._ending = False
        for name in ("OpenNamespace", "Lookup", "PutStart", "PutEnd", "PutRevoke", "Get", "Release", "Write",
                     "PutChunks", "Verify", "Remove", "Clear", "Ping", "Stats", "ListNamespaces",
                     "SetQuotas"):  # fmt: skip
            setattr(self, name, self._guarded(name, getattr(self, name)))

    def _guarded(self, name: str, method: Method) -> Any:
        """Times a unary-reply method and turns its errors into statuses."""

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                with self._observed(name):
                    return await method(request, context)
            except KVPoolError as error:
                await context.abort(wire.status_of(error), str(error))

        return call

    @contextlib.contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        """Times what answers one request, and says how it ended; errors pass."""
        started = time.perf_counter()
        try:
            yield
        except KVPoolError as error:
            self._metrics.observe(name, wire.status_of(error).name, time.perf_counter() - started)
            raise
        self._metrics.observe(name, "OK", time.perf_counter() - started)

    async def _fail(
        self, name: str, started: float, error: KVPoolError, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        status = wire.status_of(error)
        self._metrics.observe(name, status.name, time.perf_counter() - started)
        await context.abort(status, str(error))

    # Namespaces

    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Any) -> pb.OpenNamespaceResponse:
        namespace, created = self._pool.open_namespace(
            wire.decode_spec(request.spec), request.expected_fingerprint, wire.decode_opener(request.opener)
        )
        if created:
            log.info(
                "namespace opened",
                model=namespace.spec.model,
                fingerprint=namespace.fingerprint.hex()[:12],
                block_bytes=[group.slot_bytes for group in namespace.spec.groups],
            )
        opened = OpenedNamespace(namespace.fingerprint, self._offer, created, self._pool.limits.max_batch_blocks)
        return wire.encode_opened(opened, self._boot_token)

    def _runs(self, runs: Sequence[pb.BlockRun]) -> list[BlockRun]:
        return wire.decode_runs(runs, self._pool.limits.max_batch_blocks)

    def _check_count(self, count: int, what: str) -> None:
        if count > self._pool.limits.max_batch_blocks:
            most = self._pool.limits.max_batch_blocks
            raise InvalidRequestError(f"{count} {what} in one message; give at most {most}, and split larger ones")

    # Lookup

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return self._lookup(request)

    def _lookup(self, request: pb.LookupRequest) -> pb.LookupResponse:
        if request.release:
            self._check_count(len(request.release), "leases")
            self._pool.release(request.release)
            if not request.runs:
                return pb.LookupResponse(boot_token=self._boot_token)
        fingerprint, runs = wire.decode_namespace(request.namespace), self._runs(request.runs)
        found = self._tiered.lookup(
            fingerprint, runs, prefix_only=request.prefix_only, lease_ttl_ms=request.lease_ttl_ms
        )
        return wire.encode_lookup(found, runs, self._boot_token)

    async def LookupStream(
        self, requests: AsyncIterator[pb.LookupRequest], context: Any
    ) -> AsyncIterator[pb.LookupReply]:
        task = asyncio.current_task()
        assert task is not None
        try:
            while not self._ending:
                self._idle_streams.add(task)
                request = await anext(requests)
                self._idle_streams.discard(task)
                try:
                    with self._observed("Lookup" if request.runs else "Release"):
                        reply = pb.LookupReply(found=self._lookup(request))
                except KVPoolError as error:
                    reply = wire.encode_lookup_error(error)
                yield reply
        except StopAsyncIteration:
            pass
        except asyncio.CancelledError:
            if not self._ending:
                raise  # The client has gone.
        finally:
            self._idle_streams.discard(task)

    def end_streams(self) -> None:
        """Ends the calls that would last as long as their clients."""
        self._ending = True
        # The others look for themselves: gRPC forgets to end a call that is cancelled while a reply is on its way.
        for task in list(self._idle_streams):
            task.cancel()

    # Put

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        namespace, runs = wire.decode_namespace(request.namespace), self._runs(request.runs)
        shards = wire.decode_shards(request.shards)
        asked_ns = time.monotonic_ns()
        grant = self._pool.put_start(namespace, runs, shards, request.ticket_ttl_ms)
        if self._signer is not None and grant.ticket_id:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = asked_ns + grant.ticket_ttl_ms * 1_000_000
            offsets = pack_offsets(grant.offsets)
            permit = self._signer.permit(Kind.WRITE, grant.ticket_id, deadline_ns, region_bytes, offsets)
            grant = dataclasses.replace(grant, permit=permit)
        return wire.encode_grant(grant, self._boot_token)

    async def Write(self, pieces: AsyncIterator[Piece], context: Any) -> pb.WriteResponse:
        nbytes = 0
        async for piece in pieces:
            payload = np.frombuffer(piece.payload, np.uint8)
            self._pool.writable(piece.token, piece.offset, len(payload))
            self._memory[piece.offset : piece.offset + len(payload)] = payload
            nbytes += len(payload)
        self._metrics.add_bytes("write", nbytes)
        return pb.WriteResponse(boot_token=self._boot_token, nbytes=nbytes)

    async def PutEnd(self, request: pb.PutEndRequest, context: Any) -> pb.PutEndResponse:
        return wire.encode_receipt(self._pool.put_end(request.ticket_id, request.checksums), self._boot_token)

    async def PutRevoke(self, request: pb.PutRevokeRequest, context: Any) -> pb.PutRevokeResponse:
        return pb.PutRevokeResponse(boot_token=self._boot_token, revoked=self._pool.put_revoke(request.ticket_id))

    # Get

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        namespace, runs = wire.decode_namespace(request.namespace), self._runs(request.runs)
        shards = wire.decode_shards(request.shards)
        asked_ns = time.monotonic_ns()
        located = self._pool.get(request.lease_id, namespace, runs, shards)
        if self._signer is not None and located.offsets:
            region_bytes = shards.count * self._pool.chunk_bytes(namespace, runs[0])
            deadline_ns = asked_ns + located.lease_remaining_ms * 1_000_000
            offsets = pack_offsets(located.offsets)
            permit = self._signer.permit(Kind.READ, request.lease_id, deadline_ns, region_bytes, offsets)
            located = dataclasses.replace(located, permit=permit)
        return wire.encode_located(located, self._boot_token)

    async def Read(self, request: pb.ReadRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Piece]:
        started = time.perf_counter()
        nbytes, total = 0, len(request.offsets) * request.region_bytes
        status = "CANCELLED" if total else "OK"
        try:
            self._check_count(len(request.offsets), "regions")
            if request.offsets and not request.region_bytes:
                raise InvalidRequestError("region_bytes is 0; give the bytes of one region")
            for region in request.offsets:
                for offset in range(region, region + request.region_bytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, region + request.region_bytes - offset)
                    self._pool.readable(request.lease_id, offset, size)
                    nbytes += size
                    status = "OK" if nbytes == total else "CANCELLED"
                    # gRPC serializes (copies) it before anything else of the event loop runs.
                    yield Piece(self._boot_token, offset, self._memory[offset : offset + size].data)
        except KVPoolError as error:
            status = ""
            await self._fail("Read", started, error, context)
        finally:  # Also where a reader that has what it wants hangs up before the call has ended.
            self._metrics.add_bytes("read", nbytes)
            if status:
                self._metrics.observe("Read", status, time.perf_counter() - started)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self._check_count(len(request.lease_ids), "leases")
        return pb.ReleaseResponse(boot_token=self._boot_token, num_released=self._pool.release(request.lease_ids))

    # Inline

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses = bytearray()
        async for request in requests:
            self._check_count(len(request.chunks), "chunks")
            for nth, chunk in enumerate(request.chunks, 1):
                statuses.append(self._put_chunk(wire.decode_chunk(chunk)))
                if nth % INLINE_CHUNKS_A_TURN == 0:
                    await asyncio.sleep(0)  # Others must not wait for the whole message.
        return pb.PutChunksResponse(boot_token=self._boot_token, statuses=bytes(statuses))

    def _put_chunk(self, chunk: Chunk) -> PutStatus:
        if checksum(chunk.payload) != chunk.checksum:
            raise ChecksumError(
                f"chunk {chunk.key.block_hash.hex()} shard {chunk.key.shard}: the payload's xxh3-64 is not "
                f"{chunk.checksum:#x}"
            )
        run = BlockRun(chunk.key.group_idx, [chunk.key.block_hash], chunk.parent_hash)
        expected = self._pool.chunk_bytes(chunk.key.namespace, run)
        if len(chunk.payload) != expected:
            raise InvalidRequestError(
                f"chunk {chunk.key.block_hash.hex()} has {len(chunk.payload)} bytes; group "
                f"{chunk.key.group_idx}'s chunks have {expected}"
            )
        grant = self._pool.put_start(chunk.key.namespace, [run], ShardRange(chunk.key.shard, 1), INLINE_TTL_MS)
        for offset in grant.offsets:
            self._memory[offset : offset + expected] = np.frombuffer(chunk.payload, np.uint8)
            self._pool.put_end(grant.ticket_id, [chunk.checksum])
        self._metrics.add_bytes("write", len(grant.offsets) * expected)
        return grant.statuses[0]

    async def GetChunks(
        self, request: pb.GetChunksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GetChunksResponse]:
        started = time.perf_counter()
        try:
            self._check_count(len(request.keys), "keys")
            for index, key in enumerate(request.keys):
                chunk = await self._get_chunk(wire.decode_key(key))
                reply = pb.GetChunksResponse(boot_token=self._boot_token, index=index, found=chunk is not None)
                if chunk is not None:
                    reply.chunk.CopyFrom(wire.encode_chunk(chunk))
                yield reply
        except KVPoolError as error:
            await self._fail("GetChunks", started, error, context)
        self._metrics.observe("GetChunks", "OK", time.perf_counter() - started)

    async def _get_chunk(self, key: PoolKey) -> Chunk | None:
        run = BlockRun(key.group_idx, [key.block_hash])
        shards = ShardRange(key.shard, 1)
        size = self._pool.chunk_bytes(key.namespace, run)
        lease_id = await self._lease_patiently(key.namespace, run)
        if not lease_id:
            return None
        try:
            located = self._pool.get(lease_id, key.namespace, [run], shards)
        finally:
            self._pool.release([lease_id])
        # No other call runs between the release and the copy: this is one step of the event loop.
        payload = self._memory[located.offsets[0] : located.offsets[0] + size].tobytes()
        if checksum(payload) != located.checksums[0]:
            self._verify(key.namespace, [run])
            return None
        self._metrics.add_bytes("read", size)
        return Chunk(key, payload, located.checksums[0])

    async def _lease_patiently(self, fingerprint: bytes, run: BlockRun) -> int:
        """A lease on a block that is there, or comes up from a tier in time; else 0."""
        ends_at = time.monotonic() + INLINE_PATIENCE_S
        while True:
            found = self._tiered.lookup(fingerprint, [run], prefix_only=True, lease_ttl_ms=INLINE_TTL_MS)
            if found.lease_id or not found.retry_after_ms or time.monotonic() > ends_at:
                return found.lease_id
            await asyncio.sleep(found.retry_after_ms / 1000)

    # Operations

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        checked, dropped = self._verify(wire.decode_namespace(request.namespace), self._runs(request.runs))
        return pb.VerifyResponse(boot_token=self._boot_token, num_checked=checked, num_dropped=dropped)

    def _verify(self, fingerprint: bytes, runs: list[BlockRun]) -> tuple[int, int]:
        checked, dropped = self._pool.verify(
            fingerprint, runs, lambda offset, nbytes: self._memory[offset : offset + nbytes]
        )
        if dropped:
            log.error("corrupt blocks dropped", checked=checked, dropped=dropped)
        return checked, dropped

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        fingerprint, runs = wire.decode_namespace(request.namespace), self._runs(request.runs)
        removed = await _removed(self._tiered.remove(fingerprint, runs))
        return pb.RemoveResponse(boot_token=self._boot_token, num_removed=removed)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        fingerprint = wire.decode_namespace(request.namespace) if request.namespace else b""
        removed = await _removed(self._tiered.clear(fingerprint))
        log.info("cleared", namespace=fingerprint.hex()[:12] or "all", blocks=removed)
        return pb.ClearResponse(boot_token=self._boot_token, num_removed=removed)

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingResponse:
        uptime = time.monotonic() - self._started
        return wire.encode_pong(__version__, uptime, self._offer, self._boot_token, self._pool.num_opened)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return wire.encode_stats(self._stats(), self._boot_token)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Any) -> pb.ListNamespacesResponse:
        infos = self._pool.namespaces(holdings=not request.without_holdings)
        if not request.without_holdings:
            infos = [dataclasses.replace(info, tiers=self._tiered.holdings(info.fingerprint)) for info in infos]
        return pb.ListNamespacesResponse(boot_token=self._boot_token, namespaces=map(wire.encode_namespace_info, infos))

    async def SetQuotas(self, request: pb.SetQuotasRequest, context: Any) -> pb.SetQuotasResponse:
        if request.quotas:
            self._pool.set_quotas(wire.decode_quotas(request.quotas))
            log.info("quotas set", **{quota.subject: quota.limit_bytes for quota in request.quotas})
        return pb.SetQuotasResponse(boot_token=self._boot_token, quotas=wire.encode_quotas(self._pool.quotas()))


async def _removed(removal: Awaitable[int]) -> int:
    """How many blocks the pool has removed. Raises UnavailableError where a tier has not removed them."""
    try:
        return await removal
    except TierError as error:
        raise UnavailableError(
            f"removed from memory, and not from every tier: {error}; ask again when it is back"
        ) from None


def add_service(service: PoolService, server: grpc.aio.Server) -> None:
    """Registers the service with a server; Write and Read with serializers that copy their payload but once."""
    pieces = {
        "Write": grpc.stream_unary_rpc_method_handler(
            service.Write, wire.decode_piece, pb.WriteResponse.SerializeToString
        ),
        "Read": grpc.unary_stream_rpc_method_handler(service.Read, pb.ReadRequest.FromString, wire.encode_piece),
    }
    # Of generic handlers the first that knows a method serves it, of registered ones the last; both are tried.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, pieces),))
    add_PoolServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_registered_method_handlers(SERVICE_NAME, pieces)  # type: ignore[attr-defined]
