"""gRPC's health checks come through the door of all calls, and only checks are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import append_record, create_token
from kvpool.security.watched_files import LOOK_EVERY_S
from kvpool_server.rpc.inbox import SMALL_BYTES
from kvpool_server.rpc.method_handlers import SERVICE_NAME
from tests.conftest import StartServer
from tests.support.audit_log import entries
from tests.support.certificates import DAY, files_in
from tests.support.processes import ServerProcess, wait_for

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
        assert _check(channel, "x" * SMALL_BYTES) is grpc.StatusCode.INVALID_ARGUMENT


class Tokens:
    """A server whose callers have tokens, and one of each role."""

    def __init__(self, directory: Path, start: StartServer):
        files = files_in(Authority.create(directory / "pki").issue_server([]))
        known, operator = directory / "tokens", directory / "operator"
        self.audit, self.denied = directory / "audit.json", directory / "denied"
        self.denied.touch(0o600)
        self.tokens = {}
        for role in Role:
            self.tokens[role], record = create_token(self.principal(role), DAY)
            append_record(known, record)
        operator.touch(0o600)
        operator.write_text(self.tokens[Role.OPERATOR])
        flags = ("--tls-cert", files.cert, "--tls-key", files.key, "--tokens", str(known))
        more = ("--deny", str(self.denied), "--audit-log", str(self.audit))
        self.server = start(*flags, *more, tls=TlsFiles(files.ca), token_file=str(operator))
        ca = grpc.ssl_channel_credentials(Path(files.ca).read_bytes())
        self.channel = grpc.secure_channel(self.server.endpoint, ca)

    @staticmethod
    def principal(role: Role) -> Principal:
        return Principal("acme" if role.has_tenant else ALL_TENANTS, role)


@pytest.fixture
def tokens(tmp_path: Path, pool_server: StartServer) -> Iterator[Tokens]:
    made = Tokens(tmp_path, pool_server)
    yield made
    made.channel.close()


def test_with_tls_checks_are_for_callers_who_prove_who_they_are(tokens: Tokens) -> None:
    channel, refused = tokens.channel, grpc.StatusCode.UNAUTHENTICATED
    assert _check(channel) is refused
    assert {_check(channel, token=each) for each in tokens.tokens.values()} == {health_pb2.HealthCheckResponse.SERVING}
    router = tokens.principal(Role.ROUTER)
    tokens.denied.write_text(f"{router}\n")
    wait_for(lambda: _check(channel, token=tokens.tokens[Role.ROUTER]) is refused, "the denial", LOOK_EVERY_S + 10)
    wait_for(lambda: any(each["caller"] == str(router) for each in entries(tokens.audit)), "the line")
    assert {each["call"] for each in entries(tokens.audit) if each["outcome"] == "UNAUTHENTICATED"} == {"Check"}
