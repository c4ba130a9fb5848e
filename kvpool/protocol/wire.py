"""The only translator: proto messages <-> `kvpool.protocol.types`, errors <-> gRPC statuses.

Decoding validates what a proto type cannot say (hash lengths, known enums); meaning is checked by the pool.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvpool.protocol import errors
from kvpool.protocol.namespace import MAX_RELEASE_CHARS, OWN, GroupSpec, NamespaceSpec, Release
from kvpool.protocol.text import escaped
from kvpool.protocol.types import (
    HASH_BYTES,
    BlockRun,
    Chunk,
    HintKind,
    Located,
    Lookup,
    Miss,
    MissCause,
    PoolKey,
    PutGrant,
    PutStatus,
    Quota,
    RunHits,
    ShardRange,
    Slots,
    check_hash,
)
from kvpool.v1 import pool_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Pool"].full_name
MAX_MESSAGE_BYTES = 64 << 20
"""Largest gRPC message that clients and servers send or accept."""

_STATUS_OF: dict[type[errors.KVPoolError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownNamespaceError: grpc.StatusCode.NOT_FOUND,
    errors.IncompatibleReleaseError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IncompatibleNamespaceError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LeaseExpiredError: grpc.StatusCode.ABORTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.PoolTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TransferError: grpc.StatusCode.INTERNAL,
    errors.ChecksumError: grpc.StatusCode.DATA_LOSS,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
}

NAME_KEY = "kvpool-error"
"""Trailing metadata of a failed call: the name of an error that its status does not tell apart."""
_NAMED: dict[str, type[errors.KVPoolError]] = {
    each.__name__: each for each in (errors.BusyError, errors.DrainingError, errors.IncompatibleReleaseError)
}
RETRY_KEY = "grpc-retry-pushback-ms"
"""Of a RESOURCE_EXHAUSTED: after how long gRPC makes the call again by itself; -1: never."""
RETRY_MS = 50, 150
"""Any in this range, so that those who were refused together do not come back together."""
_ERROR_OF = {
    status: error
    for error, status in _STATUS_OF.items()
    if error is not errors.ConfigError and error.__name__ not in _NAMED
}


def status_of(error: errors.KVPoolError) -> grpc.StatusCode:
    """The status of an error's class, or of the nearest class that it is derived from."""
    return next((_STATUS_OF[each] for each in type(error).__mro__ if each in _STATUS_OF), grpc.StatusCode.INTERNAL)


def name_of(error: errors.KVPoolError) -> str:
    """The name of an error that its status does not tell apart; empty for others."""
    return type(error).__name__ if type(error).__name__ in _NAMED else ""


def metadata_of(error: errors.KVPoolError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a call that ends with an error."""
    name, found = name_of(error), []
    if name:
        found.append((NAME_KEY, name))
    if isinstance(error, errors.OutOfSpaceError):
        found.append((RETRY_KEY, str(random.randint(*RETRY_MS) if isinstance(error, errors.BusyError) else -1)))
    return tuple(found)


MAX_ERROR_CHARS = 2_000
"""Longest text of a server in an error: errors end up in logs."""


_AWAY = "check that the server runs, and that the endpoint is right"
_REFUSALS = {
    "HTTP/2": "give the port of --listen, not of --http-listen or --data-listen",
    "WRONG_VERSION_NUMBER": "the port does not speak TLS: leave out tls (--tls), or give the server --tls-cert",
    "missing selected ALPN property": "the port speaks TLS, but not gRPC: give the one of --listen",
    "Hostname Verification": "the server's certificate does not name the host of the endpoint ('localhost' for a Unix "
    "socket): make one with `kvpool certs issue DIR --host HOST`, or give server_name",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not of an authority in the ca of tls (ca.crt of --tls "
    "DIR), or not valid by this host's clock",
    "Socket closed": "the server may speak TLS: give tls (--tls DIR) with a client's certificate that is valid now, of "
    "an authority in the server's --tls-client-ca",
}
"""What to do where something listens and the connection fails, by what gRPC tells. A server that refuses a client's
certificate says nothing."""


def error_of(rpc_error: grpc.RpcError, endpoint: str) -> errors.KVPoolError:
    """The kvpool error of a failed call; `endpoint` is the server's name in its message."""
    code, details = rpc_error.code(), escaped(rpc_error.details() or "", MAX_ERROR_CHARS)
    if (named := _named(rpc_error)) is not None:
        return named(f"kvpool-server at {endpoint}: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        refused = details if "failed to connect" in details else ""
        fix = next((fix for mark, fix in _REFUSALS.items() if mark in refused), _AWAY)
        details = details.rpartition("Failed to connect to remote host: ")[2]
        return errors.UnavailableError(f"cannot reach kvpool-server at {endpoint} ({details}); {fix}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.PoolTimeoutError(f"kvpool-server at {endpoint} did not answer in time ({details})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "CLIENT: Received message larger than max" in details:
        return errors.InvalidReplyError(f"a reply of kvpool-server at {endpoint} is too large ({details})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return errors.InvalidRequestError(
            f"a message to kvpool-server at {endpoint} is too large ({details}); send fewer blocks in one call"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED and "Method not found" in details:
        return errors.IncompatibleReleaseError(
            f"kvpool-server at {endpoint} does not know this call of kvpool {OWN}: the server is of an older release; "
            "upgrade it"
        )
    return _ERROR_OF.get(code, errors.TransferError)(details or f"{code.name} from kvpool-server at {endpoint}")


def _named(rpc_error: grpc.RpcError) -> type[errors.KVPoolError] | None:
    """The error that a call's trailing metadata names; None if they name none of the error's status."""
    trailing = getattr(rpc_error, "trailing_metadata", None)  # gRPC promises it of calls, and not of all errors.
    names = [value for key, value in (trailing() if trailing is not None else None) or () if key == NAME_KEY]
    named = _NAMED.get(str(names[0])) if names else None
    return named if named is not None and status_of(named("")) is rpc_error.code() else None


_HASH = np.dtype(f"V{HASH_BYTES}")
PACKED_FROM = 2_049
"""Hashes of a run that stay as they came: as objects they would take twice their bytes, and each collection of Python's
garbage would visit those of all requests under way."""


class PackedHashes(Sequence[bytes]):
    """Block hashes as they lie in a message; each becomes an object when it is read."""

    __slots__ = ("_array",)

    def __init__(self, array: npt.NDArray[np.void]):
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        return PackedHashes(self._array[at]) if isinstance(at, slice) else self._array[at].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._array.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def encode_runs(runs: Iterable[BlockRun]) -> list[pb.BlockRun]:
    return [
        pb.BlockRun(group_idx=run.group_idx, parent_hash=run.parent_hash, block_hashes=b"".join(run.block_hashes))
        for run in runs
    ]


def decode_runs(runs: Sequence[pb.BlockRun], max_blocks: int) -> list[BlockRun]:
    """Raises InvalidRequestError for hashes of a wrong length, for an empty batch and for one that is too large."""
    if len(runs) > max_blocks or sum(len(run.block_hashes) for run in runs) > max_blocks * HASH_BYTES:
        total = sum(len(run.block_hashes) for run in runs) // HASH_BYTES
        raise errors.InvalidRequestError(f"a batch of {total} blocks; give 1 to {max_blocks}, and split larger ones")
    decoded = []
    for run in runs:
        packed = run.block_hashes
        if not packed or len(packed) % HASH_BYTES:
            raise errors.InvalidRequestError(
                f"block_hashes has {len(packed)} bytes; give {HASH_BYTES} for each block, and at least one block"
            )
        if run.parent_hash:
            check_hash(run.parent_hash, "parent_hash")
        array = np.frombuffer(packed, _HASH)
        hashes = PackedHashes(array) if len(array) >= PACKED_FROM else array.tolist()  # Four times as fast as slicing.
        decoded.append(BlockRun(run.group_idx, hashes, run.parent_hash))
    if not decoded:
        raise errors.InvalidRequestError("the request names no blocks; give at least one run")
    return decoded


def encode_shards(shards: ShardRange) -> pb.ShardRange:
    return pb.ShardRange(start=shards.start, count=shards.count)


def decode_shards(shards: pb.ShardRange) -> ShardRange:
    return ShardRange(shards.start, shards.count)


def encode_spec(spec: NamespaceSpec) -> pb.NamespaceSpec:
    groups = [message_of(group, pb.GroupSpec) for group in spec.groups]
    return message_of(spec, pb.NamespaceSpec, groups=groups, extra=dict(spec.extra))


def decode_spec(message: pb.NamespaceSpec) -> NamespaceSpec:
    groups = tuple(value_of(GroupSpec, group) for group in message.groups)
    return value_of(NamespaceSpec, message, groups=groups, extra=tuple(message.extra.items()))


def decode_release(message: pb.OpenNamespaceRequest | pb.OpenNamespaceResponse) -> Release:
    """Whom a namespace is opened by, or who opens it; the text can be printed."""
    return Release(escaped(message.release, MAX_RELEASE_CHARS), message.protocol)


def encode_hits(hits: Sequence[RunHits], runs: Sequence[BlockRun]) -> list[pb.RunHits]:
    return [
        pb.RunHits(
            num_leading=hit.num_leading,
            complete=hit.complete.to_bytes((len(run) + 7) // 8, "little") if hit.complete else b"",
            num_pending=hit.num_pending,
            missing=[pb.Miss(cause=cast("pb.MissCause", miss.cause), count=miss.count) for miss in hit.missing],
        )
        for run, hit in zip(runs, hits, strict=True)
    ]


def decode_hits(messages: Iterable[pb.RunHits]) -> tuple[RunHits, ...]:
    return tuple(
        RunHits(
            hit.num_leading,
            int.from_bytes(hit.complete, "little"),
            hit.num_pending,
            tuple(Miss(MissCause(miss.cause), miss.count) for miss in hit.missing),
        )
        for hit in messages
    )


def encode_lookup(lookup: Lookup, runs: Sequence[BlockRun], boot_token: int) -> pb.LookupResponse:
    hits = encode_hits(lookup.hits, runs)
    for message, slots in zip(hits, lookup.slots, strict=False):
        message.offsets, message.checksums, message.permit = slots.offsets, slots.checksums, slots.permit
    return pb.LookupResponse(  # Not by `message_of`, which takes longer than the message.
        boot_token=boot_token,
        hits=hits,
        lease_id=lookup.lease_id,
        lease_ttl_ms=lookup.lease_ttl_ms,
        retry_after_ms=lookup.retry_after_ms,
    )


def encode_lookup_error(error: errors.KVPoolError) -> pb.LookupReply:
    code = status_of(error).value[0]
    return pb.LookupReply(error=pb.CallError(code=code, message=str(error), name=name_of(error)))


def decode_lookup(message: pb.LookupResponse, fingerprint: bytes, asked_at: float) -> Lookup:
    """The answer of a lookup in a namespace that was asked at `asked_at`, monotonic seconds."""
    hits = decode_hits(message.hits)
    slots: tuple[Slots, ...] = ()
    if any(hit.offsets for hit in message.hits):
        slots = tuple(Slots(hit.offsets, hit.checksums, hit.permit) for hit in message.hits)
    return Lookup(
        hits,
        message.lease_id,
        message.lease_ttl_ms,
        message.retry_after_ms,
        slots,
        fingerprint,
        message.boot_token,
        asked_at + message.lease_ttl_ms / 1000,
    )


def encode_grant(grant: PutGrant, boot_token: int) -> pb.PutStartResponse:
    return message_of(grant, pb.PutStartResponse, boot_token=boot_token, statuses=bytes(grant.statuses))


_PUT_STATUSES = tuple(PutStatus)


def decode_statuses(packed: bytes) -> tuple[PutStatus, ...]:
    return tuple(map(_PUT_STATUSES.__getitem__, packed))


def decode_grant(message: pb.PutStartResponse) -> PutGrant:
    return value_of(PutGrant, message, statuses=decode_statuses(message.statuses))


def encode_located(located: Located, boot_token: int) -> pb.GetResponse:
    return message_of(located, pb.GetResponse, boot_token=boot_token, present=bytes(located.present))


def decode_located(message: pb.GetResponse) -> Located:
    return value_of(Located, message, present=tuple(map(bool, message.present)))


def with_payload(message: Message, field_number: int, payload: memoryview) -> bytes:
    """A message, serialized, with a field of bytes that follows all others.

    Copies the payload once. The protobuf library copies it three times, which takes 2 ms for 1 MiB instead of 0.02 ms.
    """
    length, size = bytearray(), payload.nbytes
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((message.SerializeToString(), bytes([field_number << 3 | 2]), length, payload))


def decode_key(message: pb.PoolKey) -> PoolKey:
    check_hash(message.namespace, "namespace")
    check_hash(message.block_hash, "block_hash")
    return PoolKey(message.namespace, message.group_idx, message.block_hash, message.shard)


def encode_chunk(chunk: Chunk) -> pb.Chunk:
    return message_of(chunk, pb.Chunk, key=message_of(chunk.key, pb.PoolKey))


def decode_chunk(message: pb.Chunk) -> Chunk:
    if message.parent_hash:
        check_hash(message.parent_hash, "parent_hash")
    return Chunk(decode_key(message.key), message.payload, message.checksum, message.parent_hash)


def decode_hint_kind(kind: int) -> HintKind:
    """Raises InvalidRequestError for a kind that this release does not know."""
    try:
        return HintKind(kind)
    except ValueError:
        known = ", ".join(f"{each.value} ({each.name.lower()})" for each in HintKind)
        raise errors.InvalidRequestError(f"hint of kind {kind}; this server knows the kinds {known}") from None


def encode_quotas(quotas: Iterable[Quota | pb.Quota]) -> list[pb.Quota]:
    return [pb.Quota(subject=each.subject, limit_bytes=each.limit_bytes, used_bytes=each.used_bytes) for each in quotas]


_M = TypeVar("_M", bound=Message)
_V = TypeVar("_V")


def message_of(value: Any, message_type: type[_M], **others: Any) -> _M:
    """The message of a dataclass: `others`, and the fields that both have by the same name."""
    for name in _shared(value.__class__, message_type.DESCRIPTOR).difference(others):
        others[name] = getattr(value, name)
    return message_type(**others)


def value_of(value_type: Callable[..., _V], message: Message, **others: Any) -> _V:
    """The dataclass of a message: `others`, and the fields that both have by the same name, repeated ones as tuples."""
    for name in _shared(value_type, message.DESCRIPTOR).difference(others):
        value = getattr(message, name)
        others[name] = value if isinstance(value, str | bytes | int | float) else tuple(value)
    return value_type(**others)


@functools.cache
def _shared(value_type: Any, message: Descriptor) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(value_type) if field.name in message.fields_by_name)
