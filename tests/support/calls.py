"""A right request for every RPC of the service, about what the test names, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from kvpool.client.client import Client
from kvpool.protocol import wire
from kvpool.protocol.errors import UnauthenticatedError
from kvpool.protocol.types import ShardRange
from kvpool.v1 import pool_pb2 as pb
from tests.support.values import block_hash, namespace_spec, run_of

SERVICE = pb.DESCRIPTOR.services_by_name["Pool"]
METHODS = tuple(method.name for method in SERVICE.methods)
BLOCK_BYTES = 256
TIMEOUT_S = 10.0
BYTES_BY_ID = ("PutChunks of regions", "GetChunks of regions")
"""Calls about a ticket's or a lease's regions, not about chunks by their keys."""


@dataclass(frozen=True)
class Target:
    """What a request is about: a namespace, and a lease and a ticket in it, each on a block at an offset.

    Args:
        spec: of OpenNamespace.
        leased, written: the blocks.
        lookup_release: have lookups name the lease as one to release.
    """

    namespace: bytes
    lease_id: int = 7
    lease_offset: int = 0
    ticket_id: int = 7
    ticket_offset: int = 0
    spec: Any = None
    leased: str = "block"
    lookup_release: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a call ended with. Equal for two calls that nobody can tell apart."""

    code: grpc.StatusCode
    text: str = ""
    replies: tuple[bytes, ...] = ()


def requests(target: Target) -> dict[str, Any]:
    """A request by method."""
    namespace = target.namespace
    runs = wire.encode_runs([run_of(target.leased)])
    shards = wire.encode_shards(ShardRange(0, 1))
    key = pb.PoolKey(namespace=namespace, block_hash=block_hash(target.leased))
    release = [target.lease_id] if target.lookup_release else []
    spec = target.spec or namespace_spec(tenant="acme")
    return {
        "OpenNamespace": pb.OpenNamespaceRequest(
            spec=wire.encode_spec(spec), expected_fingerprint=namespace if target.spec else b""
        ),
        "Lookup": pb.LookupRequest(namespace=namespace, runs=runs, release=release),
        "LookupStream": pb.LookupRequest(namespace=namespace, runs=runs, release=release),
        "PutStart": pb.PutStartRequest(namespace=namespace, runs=runs, shards=shards),
        "PutEnd": pb.PutEndRequest(ticket_id=target.ticket_id, checksums=[1]),
        "PutRevoke": pb.PutRevokeRequest(ticket_id=target.ticket_id),
        "Get": pb.GetRequest(lease_id=target.lease_id, namespace=namespace, runs=runs, shards=shards),
        "Release": pb.ReleaseRequest(lease_ids=[target.lease_id]),
        "PutChunks of regions": pb.PutChunksRequest(
            ticket_id=target.ticket_id, offset=target.ticket_offset, payload=bytes(BLOCK_BYTES)
        ),
        "GetChunks of regions": pb.GetChunksRequest(
            lease_id=target.lease_id, offsets=[target.lease_offset], region_bytes=BLOCK_BYTES
        ),
        "PutChunks": pb.PutChunksRequest(chunks=[pb.Chunk(key=key)]),
        "GetChunks": pb.GetChunksRequest(keys=[key]),
        "Verify": pb.VerifyRequest(namespace=namespace, runs=runs),
        "Remove": pb.RemoveRequest(namespace=namespace, runs=wire.encode_runs([run_of("nothing")])),
        "Explain": pb.ExplainRequest(namespace=namespace, runs=runs),
        "Hint": pb.HintRequest(namespace=namespace, runs=runs, kind=pb.HINT_KIND_PIN, pin_seconds=60),
        "Clear": pb.ClearRequest(namespace=namespace),
        "Ping": pb.PingRequest(),
        "WhoAmI": pb.WhoAmIRequest(),
        "Stats": pb.StatsRequest(),
        "ListNamespaces": pb.ListNamespacesRequest(),
        "ListQuotas": pb.ListQuotasRequest(),
        "SetQuotas": pb.SetQuotasRequest(quotas=[pb.Quota(subject="tenant:acme", limit_bytes=1 << 30)]),
        "Report": pb.ReportRequest(reporter=bytes(16), sequence=1, namespaces=[namespace]),
        "Exists": pb.ExistsRequest(namespace=namespace, runs=runs),
        "Ledger": pb.LedgerRequest(),
        "Value": pb.ValueRequest(),
        "Drain": pb.DrainRequest(boot_token=1),  # Not the server's: tests that call everything go on.
    }


def outcome(client: Client, method: str, target: Target) -> Outcome:
    """Calls a method; the ids that the request names are hidden in the answer."""
    request, (method, *_) = requests(target)[method], method.split()
    call = getattr(client.rpc.stub, method)
    descriptor = SERVICE.methods_by_name[method]
    try:
        reply = call(iter([request]) if descriptor.client_streaming else request, timeout=TIMEOUT_S)
        replies = list(reply) if descriptor.server_streaming else [reply]
    except grpc.RpcError as error:
        return Outcome(error.code(), _without_ids(error.details() or "", target))  # type: ignore[attr-defined]
    if method == "LookupStream" and (failed := replies[0].error).code:
        code = next(code for code in grpc.StatusCode if code.value[0] == failed.code)
        return Outcome(code, _without_ids(failed.message, target))
    return Outcome(grpc.StatusCode.OK, "", tuple(reply.SerializeToString(deterministic=True) for reply in replies))


def _without_ids(text: str, target: Target) -> str:
    for name in (
        target.namespace.hex(),
        target.namespace.hex()[:12],
        f"{target.lease_id:#x}",
        f"{target.ticket_id:#x}",
    ):
        text = text.replace(name, "ID")
    return text


def is_heard(client: Client) -> bool:
    """Whether the server takes the client's credential."""
    try:
        client.admin.ping()
    except UnauthenticatedError:
        return False
    return True
