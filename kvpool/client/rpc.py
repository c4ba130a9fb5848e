"""The typed calls of one server, and what callers keep between them: an open namespace, runs, and lookups under way.

`PoolRpc` has one method for each step of a lookup, put and get. `Client` composes the steps; tests, and programs that
move bytes themselves, call them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvpool.client.channel import CALL_ERRORS, Calls, open_channel
from kvpool.client.config import ClientConfig
from kvpool.client.lookup_stream import LookupStream
from kvpool.client.tracing import tracing_of
from kvpool.protocol import replies, wire
from kvpool.protocol.errors import (
    IncompatibleReleaseError,
    InvalidReplyError,
    InvalidRequestError,
    KVPoolError,
    LeaseExpiredError,
    UnavailableError,
)
from kvpool.protocol.messages import PiecedChannel
from kvpool.protocol.namespace import OWN, GroupSpec, NamespaceSpec, check_skew
from kvpool.protocol.replies import LookupQuestion
from kvpool.protocol.types import (
    HASH_BYTES,
    MAX_BATCH_CHUNKS,
    BlockRun,
    Existence,
    HintKind,
    Located,
    Lookup,
    PutGrant,
    PutReceipt,
    ShardRange,
)
from kvpool.security.name_key import NameKey, check_key, named_by
from kvpool.transport.base import Transport
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub


@dataclass(frozen=True, slots=True)
class Namespace:
    """An open namespace, valid for one boot of the server.

    Args:
        max_batch_blocks: most blocks of one request; a lookup may have more, and a get is split.
        arena_bytes: bound of every region.
    """

    spec: NamespaceSpec
    fingerprint: bytes
    boot_token: int
    transport: Transport
    max_batch_blocks: int
    arena_bytes: int

    def max_blocks(self, shards: ShardRange) -> int:
        """Most blocks of which one put or get can move these shards."""
        return max(1, min(self.max_batch_blocks, MAX_BATCH_CHUNKS // max(1, shards.count)))

    def group(self, group_idx: int) -> GroupSpec:
        """Raises InvalidRequestError if there is no such group."""
        if not 0 <= group_idx < len(self.spec.groups):
            raise InvalidRequestError(
                f"group_idx {group_idx}: the namespace has groups 0 to {len(self.spec.groups) - 1}"
            )
        return self.spec.groups[group_idx]


class KeptRuns(tuple[BlockRun, ...]):
    """Runs that are looked up several times: the blocks' names on the wire are computed once."""

    def __init__(self, _: Iterable[BlockRun]):
        self.encoded: dict[str, list[pb.BlockRun]] = {}
        """The runs as messages, by the digest of the key that names the blocks."""


@dataclass(eq=False)
class PendingLookup:
    """A lookup that was sent and may have been answered. Thread-safe: the reply is decoded once.

    Args:
        call: a `grpc.Future`.
        answer: makes a Lookup of the server's reply.
        error_of: makes a KVPoolError of what the call raises.
    """

    call: Any
    answer: Callable[[pb.LookupResponse], Lookup]
    error_of: Callable[[Exception], KVPoolError]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _found: Lookup | None = field(default=None, init=False)

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return bool(self.call.done())

    def result(self, timeout_s: float | None = None) -> Lookup | None:
        """The answer; None if it has not arrived within `timeout_s`. Raises what `Client.lookup` raises."""
        try:
            reply = self.call.result(timeout=timeout_s)
        except CALL_ERRORS as error:
            if isinstance(error, grpc.FutureTimeoutError) and timeout_s is not None:
                return None
            raise self.error_of(error) from None
        with self._lock:
            if self._found is None:
                self._found = self.answer(reply)
            return self._found

    def on_done(self, callback: Callable[[PendingLookup], None]) -> None:
        """Calls back from another thread once the lookup has ended."""
        self.call.add_done_callback(lambda _: callback(self))


class PoolRpc(Calls):
    """Calls of one server. Thread-safe.

    Every method raises UnavailableError, PoolTimeoutError and InvalidReplyError, and what its docstring names.

    Args:
        stub: the Pool service's methods.
        lookups: sends the requests of `LookupQuestion`s, and leases to release.
        channel: carries both; closed with this object.

    Raises ConfigError if `config.name_key_file` cannot be used.
    """

    def __init__(self, config: ClientConfig, stub: Any, lookups: Any, channel: Any):
        super().__init__(config)
        self._name_key = NameKey.read(Path(config.name_key_file)) if config.name_key_file else None
        self.stub = stub
        self.channel = channel
        self._lookups = lookups
        self._tracing = tracing_of(config)

    @classmethod
    def connect(cls, config: ClientConfig) -> PoolRpc:
        """Makes the connection; the server is reached with the first call. Raises ConfigError as `open_channel`."""
        channel = open_channel(config)
        stub = PoolStub(PiecedChannel(channel))  # type: ignore[no-untyped-call]
        return cls(config, stub, LookupStream(channel), channel)

    def close(self) -> None:
        """Ends the connection; calls in flight fail. Idempotent."""
        self._lookups.close()
        self.channel.close()

    def ping(self) -> pb.PingResponse:
        return self.call(self.stub.Ping, pb.PingRequest())  # type: ignore[no-any-return]

    def open_namespace(
        self, spec: NamespaceSpec, expected_fingerprint: bytes = b"", timeout_ms: int | None = None
    ) -> pb.OpenNamespaceResponse:
        """Declares a namespace; returns what the server says of it and of its transports.

        Raises InvalidRequestError, IncompatibleNamespaceError, and IncompatibleReleaseError if the server is of a
        release that this client does not work with, or that computes another fingerprint.
        """
        spec = self.named(spec)
        request = pb.OpenNamespaceRequest(
            spec=wire.encode_spec(spec),
            expected_fingerprint=expected_fingerprint,
            opener=socket.gethostname(),
            protocol=OWN.protocol,
            release=OWN.version,
        )
        reply: pb.OpenNamespaceResponse = self.call(self.stub.OpenNamespace, request, timeout_ms)
        server = wire.decode_release(reply)
        check_skew(OWN, server, self.config.endpoint)
        replies.opened(reply)
        if reply.fingerprint != spec.fingerprint():
            raise IncompatibleReleaseError(
                f"this client, kvpool {OWN}, and kvpool-server at {self.config.endpoint}, kvpool {server}, compute "
                "different fingerprints for a namespace; install the same release of kvpool on both sides"
            )
        return reply

    # Names of blocks: no block hash gets to a server but through these.

    def named(self, spec: NamespaceSpec) -> NamespaceSpec:
        """The namespace in which this client names blocks. Raises InvalidRequestError for one of another key."""
        check_key(spec, self._name_key)
        return named_by(spec, self._name_key)

    def name_of(self, block_hash: bytes) -> bytes:
        """A block's name on the wire."""
        return self._name_key.name(block_hash) if self._name_key else block_hash

    def encode_runs(self, runs: Sequence[BlockRun]) -> list[pb.BlockRun]:
        """Runs as messages, with the blocks' names on the wire."""
        key = self._name_key
        if key is None:
            return wire.encode_runs(runs)
        kept = runs.encoded if isinstance(runs, KeptRuns) else {}
        if key.digest not in kept:
            kept[key.digest] = wire.encode_runs(map(key.run, runs))
        return kept[key.digest]

    def lookup(self, namespace: Namespace, runs: Sequence[BlockRun], **wanted: bool) -> Lookup:
        """As `Client.lookup`, with its keywords."""
        with contextlib.ExitStack() as stack:
            traceparent = ""
            if self._tracing is not None:
                attributes = {"kvpool.blocks": sum(map(len, runs))}
                span = stack.enter_context(self._tracing.span("kvpool.lookup", attributes=attributes, kind="CLIENT"))
                traceparent = self._tracing.traceparent(span)
            found = self.lookup_async(namespace, runs, traceparent=traceparent, **wanted).result()
        assert found is not None, "without a timeout the answer is waited for until the call's deadline"
        return found

    def lookup_async(
        self,
        namespace: Namespace,
        runs: Sequence[BlockRun],
        *,
        lease: bool = True,
        wait_ms: int = 0,
        traceparent: str = "",
        **wanted: bool,
    ) -> PendingLookup:
        """As `Client.lookup`, without waiting. Another thread encodes `runs`: do not change them.

        Args:
            wait_ms: where blocks are on their way up from a tier, the server answers when they are up, or after so
                long. Such a lookup is a call of its own: the answers to others do not wait for it. If there are
                `MAX_AT_ONCE` calls, the server answers at once.
        """
        question = LookupQuestion(
            namespace.fingerprint,
            namespace.spec.groups,
            namespace.arena_bytes,
            runs,
            self.config.lease_ttl_ms if lease else 0,
            encode_runs=self.encode_runs,
            traceparent=traceparent,
            **wanted,
        )
        call = self.send_now(self.stub.Lookup, question(wait_ms), self.config.timeout_ms + wait_ms) if wait_ms else None
        if call is None:
            call = self.started(self._lookups, question)

        def answer(reply: pb.LookupResponse) -> Lookup:
            try:
                self.check_boot(namespace, reply.boot_token)
                return question.answer(reply)
            except (UnavailableError, InvalidReplyError):
                self.release_quietly(reply.lease_id)
                raise

        return PendingLookup(call, answer, self.error_of)

    def exists(self, fingerprint: bytes, runs: Sequence[BlockRun], timeout_ms: int | None = None) -> Existence:
        request = pb.ExistsRequest(namespace=fingerprint, runs=self.encode_runs(runs))
        return replies.existence(self.call(self.stub.Exists, request, timeout_ms), runs)

    def put_start(self, namespace: Namespace, runs: Sequence[BlockRun], shards: ShardRange) -> PutGrant:
        """Asks for regions to write. Raises OutOfSpaceError."""
        request = pb.PutStartRequest(
            namespace=namespace.fingerprint,
            runs=self.encode_runs(runs),
            shards=wire.encode_shards(shards),
            ticket_ttl_ms=self.config.ticket_ttl_ms,
        )
        num_blocks = sum(map(len, runs))
        region_bytes = shards.count * namespace.group(runs[0].group_idx).chunk_bytes
        reply = self.call(self.stub.PutStart, request)
        try:
            self.check_boot(namespace, reply.boot_token)
            return replies.grant(reply, num_blocks, region_bytes, namespace.arena_bytes, self.config.ticket_ttl_ms)
        except (UnavailableError, InvalidReplyError):
            self.revoke_quietly(reply.ticket_id)
            raise

    def put_end(self, ticket_id: int, checksums: Sequence[int]) -> PutReceipt:
        """Makes a ticket's regions readable: one checksum a chunk, region-major. Raises LeaseExpiredError."""
        request = pb.PutEndRequest(ticket_id=ticket_id, checksums=checksums)
        return replies.receipt(self.call(self.stub.PutEnd, request), len(checksums))

    def put_revoke(self, ticket_id: int) -> bool:
        """Returns a ticket's regions; False if the ticket was not live."""
        return bool(self.call(self.stub.PutRevoke, pb.PutRevokeRequest(ticket_id=ticket_id)).revoked)

    def revoke_quietly(self, ticket_id: int) -> None:
        """As `put_revoke`, without waiting. If the call is lost, or cannot be made now, the ticket expires."""
        if ticket_id:
            with contextlib.suppress(UnavailableError):
                self.send_now(self.stub.PutRevoke, pb.PutRevokeRequest(ticket_id=ticket_id))

    def locate(
        self, namespace: Namespace, lease_id: int, parts: Sequence[Sequence[BlockRun]], shards: ShardRange
    ) -> Generator[Located, None, None]:
        """Regions and checksums of leased blocks, for each part in order. All parts are requested at once.

        Close the iterator after use. Raises LeaseExpiredError.
        """
        if not lease_id:
            raise LeaseExpiredError(
                "lease_id is 0: the lookup found no block, or the server refused the lease because there are too many "
                "(kvpool_refused_leases_total); release leases, and look up again"
            )
        name, asked = namespace.fingerprint, wire.encode_shards(shards)
        requests = (
            pb.GetRequest(lease_id=lease_id, namespace=name, runs=self.encode_runs(part), shards=asked)
            for part in parts
        )

        def located(reply: pb.GetResponse, runs: Sequence[BlockRun]) -> Located:
            self.check_boot(namespace, reply.boot_token)
            chunk_bytes = namespace.group(runs[0].group_idx).chunk_bytes
            return replies.located(reply, sum(map(len, runs)), shards, chunk_bytes, namespace.arena_bytes)

        if len(parts) == 1:  # A call that is waited for needs fewer threads than one that is sent.
            yield located(self.call(self.stub.Get, next(requests)), parts[0])
            return
        calls = [self.send(self.stub.Get, request) for request in requests]  # The server works meanwhile.
        try:
            for call, part in zip(calls, parts, strict=True):
                yield located(self.result(call), part)
        finally:
            for call in calls:
                call.cancel()

    def release(self, lease_ids: Sequence[int]) -> int:
        """Ends leases; returns how many of them were live."""
        reply = self.call(self.stub.Release, pb.ReleaseRequest(lease_ids=lease_ids))
        return replies.count("num_released", reply.num_released, len(lease_ids))

    def release_quietly(self, *lease_ids: int) -> None:
        """As `release`, with the next lookup, or soon; does not wait. If the message is lost, the leases expire."""
        if live := [lease_id for lease_id in lease_ids if lease_id]:  # 0: no lease.
            with contextlib.suppress(ValueError):  # The channel is closed.
                self._lookups.release(live)

    def hint(
        self,
        fingerprint: bytes,
        runs: Sequence[pb.BlockRun],
        kind: HintKind,
        pin_seconds: int = 0,
        timeout_ms: int | None = None,
    ) -> pb.HintResponse:
        """Says something of a prefix, whose runs are encoded. A pin of 0 s ends pins.

        Raises UnknownNamespaceError, InvalidRequestError and PermissionDeniedError; OutOfSpaceError for a prefetch if
        too many are under way.
        """
        request = pb.HintRequest(
            namespace=fingerprint, runs=runs, kind=f"HINT_KIND_{kind.name}", pin_seconds=pin_seconds
        )
        reply = self.call(self.stub.Hint, request, timeout_ms)
        return replies.hint(reply, sum(len(run.block_hashes) // HASH_BYTES for run in runs))

    def report(self, report: pb.ReportRequest, timeout_ms: int) -> bool:
        """Tells the server what an engine has counted; False if the server is of a release that takes no reports.

        Raises InvalidRequestError, UnknownNamespaceError and PermissionDeniedError.
        """
        try:
            self.stub.Report(report, timeout=self.timeout_s(timeout_ms))
        except CALL_ERRORS as error:
            if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            raise self.error_of(error) from None
        return True

    def check(self, namespace: Namespace) -> int:
        """How many namespaces of the caller's tenant the server has opened since its start; 0 from an older server.

        Where callers have no tenant, those of all count. Raises UnavailableError as `check_boot`.
        """
        reply = self.ping()
        self.check_boot(namespace, reply.boot_token)
        return reply.namespaces_opened

    def check_boot(self, namespace: Namespace, boot_token: int) -> None:
        """Raises UnavailableError if the server has restarted since: the namespace's memory belongs to its old boot."""
        if boot_token != namespace.boot_token:
            raise UnavailableError(f"kvpool-server at {self.config.endpoint} has restarted; open the namespace again")
