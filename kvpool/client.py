"""The typed, synchronous, thread-safe client of a kvpool server.

Paths: `lookup` (or `lookup_async`) -> `get` -> `release`, and `put` (put_start -> transport -> put_end). Every call
has a deadline. A wrong checksum, a lease that ran out and a restarted server all end in an error or a miss,
never in bytes.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.config import ClientConfig
from kvpool.errors import (
    ChecksumError,
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
)
from kvpool.hashing import checksum
from kvpool.holdings import NamespaceInfo
from kvpool.lookup_stream import LookupStream
from kvpool.namespace import GroupSpec, NamespaceSpec
from kvpool.sums import SUMMER, Checksums
from kvpool.transport.base import BATCH_BYTES, Buffers, Transport
from kvpool.transport.choice import Choice, choose
from kvpool.types import (
    BlockRun,
    Chunk,
    Located,
    Lookup,
    Offer,
    PoolKey,
    PoolStats,
    PutGrant,
    PutReceipt,
    PutStatus,
    Quota,
    ShardRange,
    in_two,
    join_located,
)
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub

INLINE_BATCH_BYTES = 4 << 20
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@dataclass(frozen=True, slots=True)
class InPlace:
    """What the callback of a put returns whose blocks lie ready: they are sent from there, or copied.

    Args:
        buffers: one a block, uint8 [bytes of the block], contiguous; they stay as they are until the put has ended.
    """

    buffers: Buffers


class VisitBlocks(Protocol):
    """What a caller of `put` or `get` does with the blocks' bytes."""

    def __call__(self, indices: Sequence[int], buffers: Buffers, /) -> Checksums | InPlace | None:
        """Fills or drains blocks `indices`, one buffer each; a put's may say where they lie instead.

        Returns:
            How to come by the checksums of what was moved, for callers that compute them on the way; asked for once all
            batches have begun. None: the bytes have been moved, and their checksums are computed from the buffers.
        """


@dataclass(frozen=True, slots=True)
class Namespace:
    """An open namespace: its spec, its name, and how its bytes travel. Good for one boot of the server."""

    spec: NamespaceSpec
    fingerprint: bytes
    boot_token: int
    transport: Transport
    max_batch_blocks: int

    def group(self, group_idx: int) -> GroupSpec:
        if not 0 <= group_idx < len(self.spec.groups):
            raise InvalidRequestError(f"group_idx {group_idx}: the namespace has {len(self.spec.groups)} groups")
        return self.spec.groups[group_idx]


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each block of a put."""

    statuses: tuple[PutStatus, ...]
    receipt: PutReceipt
    nbytes: int


class PendingLookup:
    """A lookup under way."""

    def __init__(self, call: Any, decode: Callable[[Any], Lookup], endpoint: str):
        self._call = call
        self._decode = decode
        self._endpoint = endpoint

    def done(self) -> bool:
        return bool(self._call.done())

    def result(self, timeout_s: float | None = None) -> Lookup | None:
        """The answer; None if it is not there within `timeout_s`. Raises what `Client.lookup` raises."""
        try:
            return self._decode(self._call.result(timeout=timeout_s))
        except grpc.FutureTimeoutError:
            return None
        except grpc.FutureCancelledError:
            raise PoolTimeoutError("the lookup was cancelled") from None
        except grpc.RpcError as error:
            raise wire.error_of(error, self._endpoint) from None

    def on_done(self, callback: Callable[[PendingLookup], None]) -> None:
        """Calls back from another thread when the answer is there."""
        self._call.add_done_callback(lambda _: callback(self))


class Client:
    """A connection to one server.

    Args:
        config: where the server is, and the deadlines.

    Raises (every method): UnavailableError, PoolTimeoutError, and what its docstring names.
    """

    def __init__(self, config: ClientConfig | None = None):
        self.config = config or ClientConfig()
        self._channel = grpc.insecure_channel(self.config.endpoint, options=_CHANNEL_OPTIONS)
        self._stub = PoolStub(self._channel)  # type: ignore[no-untyped-call]
        self._lookups = LookupStream(self._stub.LookupStream)
        # One transport serves every namespace of one boot of the server.
        self._attaching = threading.Lock()
        self._choice: Choice | None = None
        self._transport_boot = 0

    def __repr__(self) -> str:
        return f"Client({self.config.endpoint})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; calls under way fail. Idempotent."""
        self._lookups.close()
        self._channel.close()
        self.detach()

    # Namespaces

    def open_namespace(
        self, spec: NamespaceSpec, expected_fingerprint: bytes = b"", *, timeout_ms: int | None = None
    ) -> Namespace:
        """Declares a namespace and attaches to its bytes.

        Raises:
            InvalidRequestError: the spec cannot name a namespace.
            IncompatibleNamespaceError: `expected_fingerprint` is another namespace's; the message names the fields.
            TransferError, ConfigError: the transport that the settings ask for does not work here.
        """
        request = pb.OpenNamespaceRequest(
            spec=wire.encode_spec(spec), expected_fingerprint=expected_fingerprint, opener=socket.gethostname()
        )
        reply = self._call(self._stub.OpenNamespace, request, timeout_ms)
        opened = wire.decode_opened(reply)
        if opened.fingerprint != spec.fingerprint():
            raise TransferError("client and server compute different fingerprints; they are of different releases")
        with self._attaching:
            if self._choice is None or self._transport_boot != reply.boot_token:
                # What was attached before belongs to a server that is gone; holding it would hold its memory.
                if self._choice is not None:
                    self._choice.transport.close()
                self._choice = None
                self._choice = self._attach(opened.offer)
                self._transport_boot = reply.boot_token
            transport = self._choice.transport
            return Namespace(spec, opened.fingerprint, reply.boot_token, transport, opened.max_batch_blocks)

    def _attach(self, offer: Offer) -> Choice:
        return choose(self.config, offer, self._channel)

    @property
    def choice(self) -> Choice | None:
        """How bytes travel, and why; None while no namespace is open."""
        return self._choice

    def detach(self) -> None:
        """Lets go of the server's memory: for a server that is gone. Namespaces opened before are void."""
        with self._attaching:
            if self._choice is not None:
                self._choice.transport.close()
                self._choice = None

    def check(self, namespace: Namespace) -> int:
        """Asks the server whether it is there.

        Returns:
            How many namespaces were opened on it since its start; 0 from an older server.

        Raises:
            UnavailableError: the server is not there any more, or has restarted since the namespace was opened.
        """
        reply = self._call(self._stub.Ping, pb.PingRequest())
        self._check_boot(namespace, reply.boot_token)
        return int(reply.namespaces_opened)

    # Lookup

    def lookup(
        self, namespace: Namespace, runs: Sequence[BlockRun], *, prefix_only: bool = True, lease: bool = True
    ) -> Lookup:
        """Which blocks are complete, with a lease on them unless `lease` is False."""
        request = self._lookup_request(namespace, runs, prefix_only, lease)
        reply = self._call(self._lookups, lambda: request)
        self._check_boot(namespace, reply.boot_token)
        return wire.decode_lookup(reply)

    def lookup_async(
        self,
        namespace: Namespace,
        runs: Sequence[BlockRun],
        *,
        prefix_only: bool = True,
        lease: bool = True,
        timeout_ms: int | None = None,
    ) -> PendingLookup:
        """Sends a lookup off; does not wait. The runs are read by another thread: do not change them."""
        request = functools.partial(self._lookup_request, namespace, runs, prefix_only, lease)

        def decode(reply: pb.LookupResponse) -> Lookup:
            self._check_boot(namespace, reply.boot_token)
            return wire.decode_lookup(reply)

        call = self._send(self._lookups, request, timeout_ms)
        return PendingLookup(call, decode, self.config.endpoint)

    def _lookup_request(
        self, namespace: Namespace, runs: Sequence[BlockRun], prefix_only: bool, lease: bool
    ) -> pb.LookupRequest:
        return pb.LookupRequest(
            namespace=namespace.fingerprint,
            runs=wire.encode_runs(runs),
            prefix_only=prefix_only,
            lease_ttl_ms=self.config.lease_ttl_ms if lease else 0,
        )

    # Put

    def put(
        self,
        namespace: Namespace,
        runs: Sequence[BlockRun],
        fill: VisitBlocks,
        *,
        shards: ShardRange | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> PutResult:
        """Stores blocks. Blocks that are there already, or that another caller is writing, cost no bytes.

        Args:
            runs: the blocks, all of one group.
            fill: writes block `indices[i]` (counted over all runs) into `buffers[i]`, uint8
                [shards.count * chunk_bytes]. Called only for blocks that are wanted.
            shards: which part of each block; all of it by default.
            batch_bytes: how much `fill` is given at once.

        Raises:
            OutOfSpaceError: no room; nothing changed.
            LeaseExpiredError: the ticket ran out while the bytes were on their way; nothing became readable.
        """
        group = self._one_group(namespace, runs)
        shards = shards or ShardRange(0, group.num_shards)
        grant = self.put_start(namespace, runs, shards)
        if not grant.ticket_id:
            return PutResult(grant.statuses, PutReceipt(0, 0), 0)
        granted = [idx for idx, status in enumerate(grant.statuses) if status is PutStatus.GRANTED]
        region_bytes = shards.count * group.chunk_bytes
        sums: list[Checksums] = []
        failures: list[Exception] = []

        def fill_and_sum(first: int, buffers: Buffers) -> Buffers | None:
            try:
                filled = fill(granted[first : first + len(buffers)], buffers)
                if isinstance(filled, InPlace):
                    _check_blocks(filled.buffers, len(buffers), region_bytes)
            except Exception as error:
                failures.append(error)
                raise
            if isinstance(filled, InPlace):
                if namespace.transport.in_place:
                    sums.append(SUMMER.begin(filled.buffers, group.chunk_bytes))
                    return filled.buffers
                for buffer, block in zip(buffers, filled.buffers, strict=True):
                    buffer[:] = block
                filled = None
            sums.append(later := filled or SUMMER.begin(buffers, group.chunk_bytes))
            if not filled and namespace.transport.memory is None:
                later()  # The transport uses its buffers again.
            return None

        timeout_s = min(self.config.data_timeout_ms, grant.ticket_ttl_ms) / 1000
        try:
            namespace.transport.write(
                grant.ticket_id, grant.offsets, region_bytes, fill_and_sum, batch_bytes, timeout_s, grant.permit
            )
            receipt = self.put_end(grant.ticket_id, [each for later in sums for each in later()])
        except BaseException as error:
            for later in sums:
                with contextlib.suppress(Exception):
                    later()  # The regions are another's once the ticket is given back: nothing may be on its way there.
            # A one-sided write that failed may go on: its ticket expires instead, and its slots wait in quarantine.
            # Where it was `fill` that failed, nothing is under way any more.
            if not namespace.transport.one_sided or any(error is each for each in failures):
                self._revoke_quietly(grant.ticket_id)
            raise
        return PutResult(grant.statuses, receipt, len(granted) * region_bytes)

    def put_blocks(
        self, namespace: Namespace, run: BlockRun, payloads: Sequence[Any], *, shards: ShardRange | None = None
    ) -> PutResult:
        """Stores blocks whose bytes lie ready.

        Args:
            payloads: one a block of `run`: bytes or uint8 arrays, of exactly shards.count * chunk_bytes.
        """
        group = namespace.group(run.group_idx)
        expected = (shards.count if shards else group.num_shards) * group.chunk_bytes
        if len(payloads) != len(run):
            raise InvalidRequestError(f"{len(payloads)} payloads for {len(run)} blocks")
        blocks = [_bytes_of(each) for each in payloads]
        for idx, block in enumerate(blocks):
            if block.nbytes != expected or block.dtype != np.uint8:
                found = f"{block.nbytes} bytes of {block.dtype}"
                raise InvalidRequestError(f"payload {idx} has {found}; the group's blocks have {expected} of uint8")
        return self.put(namespace, [run], lambda indices, _: InPlace([blocks[idx] for idx in indices]), shards=shards)

    def put_start(self, namespace: Namespace, runs: Sequence[BlockRun], shards: ShardRange) -> PutGrant:
        """Reserves regions. Raises OutOfSpaceError; nothing changed then."""
        request = pb.PutStartRequest(
            namespace=namespace.fingerprint,
            runs=wire.encode_runs(runs),
            shards=wire.encode_shards(shards),
            ticket_ttl_ms=self.config.ticket_ttl_ms,
        )
        reply = self._call(self._stub.PutStart, request)
        grant = wire.decode_grant(reply)
        try:
            self._check_boot(namespace, reply.boot_token)
        except UnavailableError:
            self._revoke_quietly(grant.ticket_id)
            raise
        return grant

    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        """Commits a ticket. Raises LeaseExpiredError if it is not live."""
        return wire.decode_receipt(
            self._call(self._stub.PutEnd, pb.PutEndRequest(ticket_id=ticket_id, checksums=checksums))
        )

    def put_revoke(self, ticket_id: int) -> bool:
        """Gives a ticket back; False if it was not live."""
        return bool(self._call(self._stub.PutRevoke, pb.PutRevokeRequest(ticket_id=ticket_id)).revoked)

    def _revoke_quietly(self, ticket_id: int) -> None:
        # The ticket expires by itself; a revocation only gives the space back sooner.
        if ticket_id:
            self._send_and_forget(self._stub.PutRevoke, pb.PutRevokeRequest(ticket_id=ticket_id))

    # Get

    def get(
        self,
        namespace: Namespace,
        lease_id: int,
        runs: Sequence[BlockRun],
        drain: VisitBlocks,
        *,
        shards: ShardRange | None = None,
        batch_bytes: int = BATCH_BYTES,
        head_blocks: int = 0,
    ) -> Located:
        """Brings leased blocks to the caller, verified.

        Args:
            runs: the blocks, all of one group.
            drain: takes block `indices[i]` (counted over all runs) from `buffers[i]`, uint8
                [shards.count * chunk_bytes]. What it has taken counts only once `get` has returned.
            shards: which part of each block; all of it by default.
            head_blocks: so many are located first and the others in a second call, meanwhile; worth its cost where
                bytes travel without the caller, as to a GPU. 0: all at once.

        Returns:
            Where the blocks lay; blocks that are gone are not `present`, and `drain` never saw them.

        Raises:
            LeaseExpiredError: the lease was not live, or ran out on the way.
            ChecksumError: bytes had changed; the server was told, and drops them.
        """
        group = self._one_group(namespace, runs)
        shards = shards or ShardRange(0, group.num_shards)
        region_bytes = shards.count * group.chunk_bytes
        there: list[int] = []
        sums: list[Checksums] = []

        def drain_and_sum(first: int, buffers: Buffers) -> Checksums | None:
            later = drain(visited[first : first + len(buffers)], buffers)
            assert not isinstance(later, InPlace), "a get's bytes lie where they arrive"
            if later is not None:
                sums.append(later)
                return None
            sums.append(SUMMER.begin(buffers, group.chunk_bytes))
            return sums[-1]

        asked_at = time.monotonic()
        parts = in_two(runs, head_blocks) if head_blocks > 0 else [list(runs)]
        requests = [self._get_request(namespace, lease_id, part, shards) for part in parts]
        # A call that is waited for at once takes fewer threads.
        calls = [self._send(self._stub.Get, request) for request in requests] if len(parts) > 1 else []
        answers: list[Located] = []
        ends_at = asked_at + self.config.data_timeout_ms / 1000
        try:
            for nth, request in enumerate(requests):
                before = sum(len(answer.present) for answer in answers)
                reply = self._answer(calls[nth]) if calls else self._call(self._stub.Get, request)
                answers.append(located := self._located(namespace, reply))
                visited = [before + idx for idx, present in enumerate(located.present) if present]
                there += visited
                timeout_s = max(0.0, min(ends_at - time.monotonic(), located.lease_remaining_ms / 1000))
                if visited:
                    namespace.transport.read(
                        lease_id, located.offsets, region_bytes, drain_and_sum, batch_bytes, timeout_s, located.permit
                    )
        finally:
            for call in calls:
                call.cancel()
        found = [each for later in sums for each in later()]
        whole = join_located(answers)
        if time.monotonic() > asked_at + whole.lease_remaining_ms / 1000:
            raise LeaseExpiredError(f"lease {lease_id:#x} ran out while its blocks were read; raise lease_ttl_ms")
        if found != list(whole.checksums):
            differs = [one != other for one, other in zip(found, whole.checksums, strict=True)]
            corrupt = [idx for nth, idx in enumerate(there) if any(differs[nth * shards.count :][: shards.count])]
            hashes = [block_hash for run in runs for block_hash in run.block_hashes]
            bad = [hashes[idx] for idx in corrupt]
            self._verify_quietly(namespace, BlockRun(runs[0].group_idx, bad))
            raise ChecksumError(f"{len(bad)} blocks differ from their checksums, the first is {bad[0].hex()}")
        return whole

    def get_blocks(
        self, namespace: Namespace, lease_id: int, run: BlockRun, *, shards: ShardRange | None = None
    ) -> list[npt.NDArray[np.uint8] | None]:
        """Copies of leased blocks, verified: uint8 [shards.count * chunk_bytes] each; None for blocks that are gone."""
        blocks: list[npt.NDArray[np.uint8] | None] = [None] * len(run)

        def drain(indices: Sequence[int], buffers: Buffers) -> None:
            for idx, buffer in zip(indices, buffers, strict=True):
                blocks[idx] = buffer.copy()

        self.get(namespace, lease_id, [run], drain, shards=shards)
        return blocks

    def locate(self, namespace: Namespace, lease_id: int, runs: Sequence[BlockRun], shards: ShardRange) -> Located:
        """Regions and checksums of leased blocks. Raises LeaseExpiredError."""
        request = self._get_request(namespace, lease_id, runs, shards)
        return self._located(namespace, self._call(self._stub.Get, request))

    def _located(self, namespace: Namespace, reply: pb.GetResponse) -> Located:
        self._check_boot(namespace, reply.boot_token)
        return wire.decode_located(reply)

    @staticmethod
    def _get_request(
        namespace: Namespace, lease_id: int, runs: Sequence[BlockRun], shards: ShardRange
    ) -> pb.GetRequest:
        if not lease_id:
            raise LeaseExpiredError("there is no lease: the lookup found nothing; a miss has no blocks to get")
        return pb.GetRequest(
            lease_id=lease_id,
            namespace=namespace.fingerprint,
            runs=wire.encode_runs(runs),
            shards=wire.encode_shards(shards),
        )

    def release(self, lease_ids: Sequence[int]) -> int:
        """Ends leases; returns how many were live."""
        return int(self._call(self._stub.Release, pb.ReleaseRequest(lease_ids=lease_ids)).num_released)

    def release_quietly(self, *lease_ids: int) -> None:
        """Ends leases without waiting; if the call is lost, they end by themselves. An id of 0 is none."""
        live = [lease_id for lease_id in lease_ids if lease_id]
        if live:
            # On the stream of lookups: to begin a call of its own would cost the caller's thread a millisecond.
            self._send_and_forget(self._lookups, functools.partial(pb.LookupRequest, release=live))

    def verify(self, namespace: Namespace, runs: Sequence[BlockRun]) -> tuple[int, int]:
        """Has the server check blocks where they lie; returns (checked, dropped)."""
        reply = self._call(
            self._stub.Verify, pb.VerifyRequest(namespace=namespace.fingerprint, runs=wire.encode_runs(runs))
        )
        return reply.num_checked, reply.num_dropped

    def _verify_quietly(self, namespace: Namespace, run: BlockRun) -> None:
        try:
            self.verify(namespace, [run])
        except KVPoolError:
            pass  # The caller gets its ChecksumError either way.

    # Inline

    def put_chunks(self, chunks: Sequence[Chunk]) -> tuple[PutStatus, ...]:
        """Stores chunks whose bytes travel in the call: no regions, no tickets."""

        def requests() -> Any:
            batch, nbytes = pb.PutChunksRequest(), 0
            for chunk in chunks:
                batch.chunks.append(wire.encode_chunk(chunk))
                nbytes += len(chunk.payload)
                if nbytes >= INLINE_BATCH_BYTES:
                    yield batch
                    batch, nbytes = pb.PutChunksRequest(), 0
            if batch.chunks:
                yield batch

        reply = self._call(self._stub.PutChunks, requests(), self.config.data_timeout_ms)
        return wire.decode_statuses(reply.statuses)

    def get_chunks(self, keys: Sequence[PoolKey]) -> list[Chunk | None]:
        """The chunks of `keys`, verified; None for each miss."""
        found: list[Chunk | None] = [None] * len(keys)
        request = pb.GetChunksRequest(keys=[wire.encode_key(key) for key in keys])
        try:
            for reply in self._stub.GetChunks(request, timeout=self._timeout_s(self.config.data_timeout_ms)):
                if reply.found:
                    chunk = wire.decode_chunk(reply.chunk)
                    if checksum(chunk.payload) != chunk.checksum:
                        raise ChecksumError(f"chunk {chunk.key.block_hash.hex()} shard {chunk.key.shard} is corrupt")
                    found[reply.index] = chunk
        except grpc.RpcError as error:
            raise wire.error_of(error, self.config.endpoint) from None
        return found

    # Operations

    def remove(self, namespace: Namespace, runs: Sequence[BlockRun]) -> int:
        """Drops blocks; returns how many were there."""
        request = pb.RemoveRequest(namespace=namespace.fingerprint, runs=wire.encode_runs(runs))
        return int(self._call(self._stub.Remove, request).num_removed)

    def clear(self, fingerprint: bytes = b"", *, timeout_ms: int | None = None) -> int:
        """Drops every block of one namespace, or of all; returns how many there were."""
        return int(self._call(self._stub.Clear, pb.ClearRequest(namespace=fingerprint), timeout_ms).num_removed)

    def try_transport(self) -> Choice:
        """How bytes would travel, and why so: attaches, in the way that `open_namespace` does. Close it after use.

        Raises:
            TransferError, ConfigError: the transport that the settings ask for does not work here.
        """
        return choose(self.config, wire.decode_offer(self._call(self._stub.Ping, pb.PingRequest())), self._channel)

    def ping(self) -> tuple[str, float]:
        """The server's version, and how long it has been up, in seconds."""
        reply = self._call(self._stub.Ping, pb.PingRequest())
        return reply.version, reply.uptime_seconds

    def stats(self) -> PoolStats:
        return wire.decode_stats(self._call(self._stub.Stats, pb.StatsRequest()))

    def namespaces(self, *, holdings: bool = True) -> list[NamespaceInfo]:
        """Every open namespace, in the order they were opened.

        Args:
            holdings: False leaves out what each holds, which costs the server a look at every entry.
        """
        reply = self._call(self._stub.ListNamespaces, pb.ListNamespacesRequest(without_holdings=not holdings))
        return [wire.decode_namespace_info(info) for info in reply.namespaces]

    def quotas(self) -> list[Quota]:
        """Every quota, by subject."""
        return wire.decode_quotas(self._call(self._stub.ListQuotas, pb.ListQuotasRequest()).quotas)

    def set_quotas(self, quotas: Sequence[Quota]) -> list[Quota]:
        """Sets bounds, and takes those of 0 bytes away; returns all there are then.

        What a subject holds beyond its bound is evicted at once, but for what is leased or being written.

        Raises:
            InvalidRequestError: one of them cannot be set; none is.
        """
        reply = self._call(self._stub.SetQuotas, pb.SetQuotasRequest(quotas=wire.encode_quotas(quotas)))
        return wire.decode_quotas(reply.quotas)

    # Helpers

    def _timeout_s(self, timeout_ms: int | None = None) -> float:
        return (timeout_ms if timeout_ms is not None else self.config.timeout_ms) / 1000

    def _call(self, method: Callable[..., Any], request: Any, timeout_ms: int | None = None) -> Any:
        try:
            return method(request, timeout=self._timeout_s(timeout_ms))
        except grpc.RpcError as error:
            raise wire.error_of(error, self.config.endpoint) from None
        except ValueError:  # gRPC's word for a channel that was closed.
            raise UnavailableError(f"{self!r} is closed") from None

    def _send(self, method: Any, request: Any, timeout_ms: int | None = None) -> Any:
        """Begins a call without waiting for its answer."""
        try:
            return method.future(request, timeout=self._timeout_s(timeout_ms))
        except ValueError:
            raise UnavailableError(f"{self!r} is closed") from None

    def _answer(self, call: Any) -> Any:
        """Waits for the answer of a call that was begun; its own deadline ends the wait."""
        try:
            return call.result(timeout=self._timeout_s())
        except grpc.FutureTimeoutError:
            raise PoolTimeoutError(f"kvpool-server at {self.config.endpoint} did not answer in time") from None
        except grpc.FutureCancelledError:
            raise UnavailableError(f"{self!r} is closed") from None
        except grpc.RpcError as error:
            raise wire.error_of(error, self.config.endpoint) from None

    def _send_and_forget(self, method: Any, request: Any) -> None:
        with contextlib.suppress(UnavailableError):
            # gRPC cancels a call when nobody refers to it any more; a callback of its own keeps it until it is done.
            self._send(method, request).add_done_callback(lambda _: None)

    def _check_boot(self, namespace: Namespace, boot_token: int) -> None:
        # A namespace's transport belongs to one boot: after a restart the old segment is nobody's memory.
        if boot_token != namespace.boot_token:
            raise UnavailableError(f"kvpool-server at {self.config.endpoint} has restarted; open the namespace again")

    @staticmethod
    def _one_group(namespace: Namespace, runs: Sequence[BlockRun]) -> GroupSpec:
        groups = {run.group_idx for run in runs}
        if len(groups) != 1:
            raise InvalidRequestError(f"a put or get moves blocks of one group; these are of {sorted(groups)}")
        return namespace.group(runs[0].group_idx)


def _bytes_of(payload: Any) -> npt.NDArray[np.uint8]:
    """Bytes or an array as a contiguous array of one axis: itself, where it is one."""
    array = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
    return np.ascontiguousarray(array).reshape(-1)


def _check_blocks(blocks: Buffers, count: int, nbytes: int) -> None:
    """Raises InvalidRequestError unless these are so many blocks of so many bytes, as they can be sent."""
    if len(blocks) != count:
        raise InvalidRequestError(f"{len(blocks)} blocks lie in place; the put asked for {count}")
    for block in blocks:
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or not block.flags.c_contiguous:
            raise InvalidRequestError(f"a block in place is {type(block).__name__}, not a contiguous array of uint8")
        if block.shape != (nbytes,):
            raise InvalidRequestError(f"a block in place has shape {block.shape}; it must be ({nbytes},)")
