"""gRPC's health checks come through the door of all calls, and only checks are served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.protocol.pieces import MESSAGE_BYTES
from kvpool.security.principal import Role
from kvpool.security.watched_files import LOOK_EVERY_S
from kvpool_server.rpc.handlers import SERVICE_NAME
from tests.conftest import StartServer
from tests.support.audit_log import entries
from tests.support.processes import ServerProcess, wait_for
from tests.support.secured_server import SecuredServer, principal_of

TIMEOUT_S = 10


def _outcome(call: Callable[[], health_pb2.HealthCheckResponse]) -> object:
    try:
        return call().status
    except grpc.RpcError as error:
        return error.code()


def _check(channel: grpc.Channel, service: str = "", token: str = "") -> object:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    request = health_pb2.HealthCheckRequest(service=service)
    stub = health_pb2_grpc.HealthStub(channel)
    return _outcome(lambda: stub.Check(request, timeout=TIMEOUT_S, metadata=metadata))


def test_only_checks_are_served(shared_server: ServerProcess) -> None:
    with grpc.insecure_channel(shared_server.endpoint) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert _outcome(lambda: next(watched)) is grpc.StatusCode.UNIMPLEMENTED
        assert _check(channel, SERVICE_NAME) == health_pb2.HealthCheckResponse.SERVING
        assert _check(channel, "other") is grpc.StatusCode.NOT_FOUND
        assert _check(channel, "x" * MESSAGE_BYTES) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_with_tls_checks_are_for_callers_who_prove_who_they_are(tmp_path: Path, pool_server: StartServer) -> None:
    secured, refused = SecuredServer(tmp_path, pool_server, proof="tokens"), grpc.StatusCode.UNAUTHENTICATED
    router, tokens = str(principal_of(Role.ROUTER)), secured.tokens
    ca = grpc.ssl_channel_credentials(Path(secured.ca).read_bytes())
    with grpc.secure_channel(secured.server.endpoint, ca) as channel:
        assert _check(channel) is refused
        assert {_check(channel, token=each) for each in tokens.values()} == {health_pb2.HealthCheckResponse.SERVING}
        secured.denied.write_text(f"{router}\n")
        wait_for(lambda: _check(channel, token=tokens[Role.ROUTER]) is refused, "the denial", LOOK_EVERY_S + 10)
    wait_for(lambda: any(each["caller"] == router for each in entries(secured.audit)), "the line")
    assert {each["call"] for each in entries(secured.audit) if each["outcome"] == "UNAUTHENTICATED"} == {"Check"}
