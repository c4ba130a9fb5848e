"""Who may call what: every RPC, by every role, about the caller's own and another tenant's namespace."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import (
    ConfigError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.namespace import MEASUREMENT_MODEL
from kvpool.protocol.types import Quota
from kvpool.security import files
from kvpool.security.certificates import Authority
from kvpool.security.files import WatchedFiles
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import create_token, read_records
from kvpool_server.access.authentication import Credential, DenyList, Tokens
from kvpool_server.access.caller import CALLER, CALLS, check_measurement
from kvpool_server.rpc.handlers import SERVICE_NAME
from tests.security.conftest import Deployment
from tests.support.audit_log import entries
from tests.support.calls import METHODS, Target, outcome
from tests.support.certificates import DAY, files_in, forge, server_flags
from tests.support.processes import ServerProcess, run_server, wait_for
from tests.support.secured_server import SecuredServer, principal_of
from tests.support.values import namespace_spec
from vllm_plugin.session import MAY_NOT_LIST, Session


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert set().union(*CALLS.values()) == set(METHODS)


@pytest.mark.parametrize("role", list(Role))
def test_each_role_may_call_what_the_table_says(deployment: Deployment, role: Role) -> None:
    refused = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    with deployment.client(role) as client:
        target = Target(deployment.fingerprints["acme"])
        may = {method for method in METHODS if outcome(client, method, target).code not in refused}
        found = client.admin.whoami()
    assert may == set(found.methods) == CALLS[role]
    assert found.principal == str(principal_of(role))
    assert 364 <= (found.ends_at - time.time()) / 86_400 <= 365
    deployment.fingerprints["acme"] = deployment.store("acme")  # The operators have cleared it.


def test_a_token_is_in_force_over_new_tls_until_it_is_removed_denied_or_ends(tmp_path: Path) -> None:
    known, denied = tmp_path / "tokens", tmp_path / "denied"
    denied.touch()
    tokens = {name: create_token(Principal(name, Role.ENGINE_WRITE), DAY) for name in ("removed", "denied", "acme")}
    known.write_text("".join(record.line() for _, record in tokens.values()))
    records, deny_list = WatchedFiles([str(known)], lambda: read_records(known)), DenyList(str(denied))
    who = Tokens(records, deny_list)

    def call(name: str, version: str = "TLSv1.3") -> Credential:
        told = {"ssl_tls_version": [version.encode()]} if version else {}
        metadata = (("authorization", f"Bearer {tokens[name][0]}"),)
        context: Any = SimpleNamespace(auth_context=lambda: told, invocation_metadata=lambda: metadata)
        return who(context)

    running = {name: call(name) for name in tokens}
    assert running["acme"].principal == tokens["acme"][1].principal
    for version in ("TLSv1.2", ""):
        with pytest.raises(UnauthenticatedError, match=r"use TLS 1\.3"):
            call("acme", version)
    known.write_text("".join(record.line() for name, (_, record) in tokens.items() if name != "removed"))
    denied.write_text(tokens["denied"][1].digest)
    for each in (records, deny_list):
        each.look(at_once=True)
    for name, why in (("removed", "unknown"), ("denied", "deny list")):
        with pytest.raises(UnauthenticatedError, match=why):
            call(name)
        with pytest.raises(UnauthenticatedError, match=why):
            who.checked(running[name])
    assert who.checked(running["acme"]) == call("acme")
    with pytest.raises(UnauthenticatedError, match="ended at"):
        who.checked(dataclasses.replace(running["acme"], ends_at=dt.datetime.now(dt.UTC) - DAY))


def test_who_only_reads_opens_namespaces_that_are_open(deployment: Deployment) -> None:
    spec = namespace_spec(tenant="acme")
    with deployment.client(Role.ENGINE_READ) as reader, deployment.client(Role.ENGINE_WRITE) as writer:
        with pytest.raises(UnknownNamespaceError, match="a caller that only reads cannot create it"):
            reader.open_namespace(spec)
        assert writer.open_namespace(spec).fingerprint == reader.open_namespace(spec).fingerprint
        with pytest.raises(PermissionDeniedError, match="give tenant 'acme'"):
            writer.open_namespace(namespace_spec(tenant="umbra"))


def test_a_tenant_lists_its_own_quotas_only(deployment: Deployment) -> None:
    with deployment.client(Role.OPERATOR) as operator:
        operator.admin.set_quotas([Quota("tenant:umbra", 1 << 30), Quota("tenant:acme", 1 << 30)])
        assert len(operator.admin.quotas()) == 2
    with deployment.client(Role.TENANT_OPERATOR) as client:
        assert [quota.subject for quota in client.admin.quotas()] == ["tenant:acme"]
        with pytest.raises(PermissionDeniedError, match="needs operator or metrics; a tenant-operator sees"):
            client.admin.stats()  # It counts the blocks of all tenants.


@pytest.mark.parametrize(("role", "tenant"), [(Role.ENGINE_WRITE, "umbra"), (Role.OPERATOR, "")])
def test_a_spec_without_a_tenant_is_of_the_certificates(deployment: Deployment, role: Role, tenant: str) -> None:
    with deployment.client(role, "umbra") as client:
        assert client.open_namespace(namespace_spec()).spec.tenant == tenant


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://kvpool.local/kvpool/acme/engine-write", "spiffe://kvpool.local/kvpool/umbra/engine-write"],
        ["https://kvpool.local/kvpool/acme/engine-write"],
        ["spiffe://kvpool.local/kvpool/acme/root"],
        ["spiffe://kvpool.local/kvpool/_/engine-write"],
        ["spiffe://kvpool.local/kvpool/../operator"],
        ["spiffe://evil.example/kvpool/_/operator"],
    ],
)
def test_a_certificate_that_names_no_principal(deployment: Deployment, tmp_path: Path, uris: list[str]) -> None:
    told = "certificate names"
    if "evil" in "".join(uris):
        told = r"of trust domain evil\.example, and this server takes kvpool\.local"
    files = forge(deployment.authority.directory, tmp_path / "forged", uris, starts_in=-DAY, ends_in=DAY)
    with Client(deployment.config(tls=files)) as client:
        with pytest.raises(UnauthenticatedError, match=told):
            client.admin.ping()
        stream = client.rpc.stub.LookupStream
        with pytest.raises(UnauthenticatedError, match=told):
            client.rpc.call(lambda requests, timeout: list(stream(requests, timeout=timeout)), iter(()))


def test_a_server_takes_the_trust_domain_that_it_is_given(
    pool_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    authority = Authority.create(tmp_path / "pki")
    operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR, "corp.example")))
    flags = ("--trust-domain", "corp.example", *server_flags(authority.issue_server([])))
    server = pool_server(*flags, tls=operator)
    (line,) = (line for line in server.stderr.splitlines() if "the server's certificate" in line)
    assert "localhost" in line and "ends_at=" in line
    engine = files_in(authority.issue_principal(Principal("acme", Role.ENGINE_WRITE)))
    told = r"kvpool\.local, and this server takes corp\.example"
    config = ClientConfig(server.endpoint, tls=engine, timeout_ms=10_000)
    with Client(config) as client, pytest.raises(UnauthenticatedError, match=told):
        client.admin.ping()


@pytest.mark.parametrize("fault", ["plaintext", "another authority", "a server's", "ended", "not yet valid"])
def test_who_proves_nothing_is_not_heard(deployment: Deployment, tmp_path: Path, fault: str) -> None:
    uris = ["spiffe://kvpool.local/kvpool/acme/engine-write"]
    files: TlsFiles | None = None
    if fault == "another authority":
        foreign = Authority.create(tmp_path / "foreign").issue_principal(Principal("acme", Role.ENGINE_WRITE))
        ours = files_in(foreign)
        files = TlsFiles(deployment.files(Role.OPERATOR).ca, ours.cert, ours.key)
    elif fault == "a server's":
        files = files_in(deployment.authority.directory / "server")
    elif fault == "ended":
        files = forge(deployment.authority.directory, tmp_path / "forged", uris, starts_in=-2 * DAY, ends_in=-DAY)
    elif fault == "not yet valid":
        files = forge(deployment.authority.directory, tmp_path / "forged", uris, starts_in=DAY, ends_in=2 * DAY)
    with Client(deployment.config(tls=files)) as client, pytest.raises(UnavailableError):
        client.admin.ping()


def test_a_clients_certificate_is_replaced_while_calls_go_on(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's: `test_unix_socket.py` and `test_http.py`."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.1)
    with Client(deployment.config(tls=deployment.files(Role.ENGINE_WRITE))) as client:
        deployment.files(Role.ENGINE_WRITE)
        channel = client.rpc.channel
        was = channel.version
        wait_for(lambda: client.admin.ping() and channel.version != was, "the new certificate")
        client.admin.ping()


def test_whoami_where_nobody_is_asked(shared_server: ServerProcess) -> None:
    with Client(ClientConfig(shared_server.endpoint, timeout_ms=10_000)) as client:
        found = client.admin.whoami()
    assert (found.principal, set(found.methods), found.ends_at) == ("", set(METHODS), 0)


def test_a_client_sends_nothing_in_clear_to_another_host() -> None:
    with pytest.raises(ConfigError, match="insecure_network"):
        Client(ClientConfig("pool.example:50051"))
    Client(ClientConfig("pool.example:50051", insecure_network=True)).close()


def test_engines_cannot_open_the_namespaces_of_measurements_which_are_not_accounted_for() -> None:
    measured = namespace_spec(model=MEASUREMENT_MODEL, tenant="acme")
    for principal in (Principal("acme", Role.ENGINE_WRITE), Principal("acme", Role.TENANT_OPERATOR)):
        token = CALLER.set(principal)
        try:
            with pytest.raises(PermissionDeniedError, match="for measurements of role operator"):
                check_measurement(measured)
            check_measurement(namespace_spec(tenant="acme"))
        finally:
            CALLER.reset(token)
    token = CALLER.set(Principal(ALL_TENANTS, Role.OPERATOR))
    try:
        check_measurement(measured)
    finally:
        CALLER.reset(token)


# gRPC's health checks, which come through the door of all calls


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


def test_with_tls_checks_are_for_callers_who_prove_who_they_are(
    tmp_path: Path, pool_server: Callable[..., ServerProcess]
) -> None:
    secured, refused = SecuredServer(tmp_path, pool_server, proof="tokens"), grpc.StatusCode.UNAUTHENTICATED
    router, tokens = str(principal_of(Role.ROUTER)), secured.tokens
    ca = grpc.ssl_channel_credentials(Path(secured.ca).read_bytes())
    with grpc.secure_channel(secured.server.endpoint, ca) as channel:
        assert _check(channel) is refused
        assert {_check(channel, token=each) for each in tokens.values()} == {health_pb2.HealthCheckResponse.SERVING}
        secured.denied.write_text(f"{router}\n")
        os.kill(secured.server.pid, signal.SIGHUP)
        wait_for(lambda: _check(channel, token=tokens[Role.ROUTER]) is refused, "the denial")
    wait_for(lambda: any(each["caller"] == router for each in entries(secured.audit)), "the line")
    assert {each["call"] for each in entries(secured.audit) if each["outcome"] == "UNAUTHENTICATED"} == {"Check"}


# Engines call nothing that their role may not: their refusals would hide others in the audit log


def test_an_engine_with_a_certificate_does_not_list_namespaces(
    deployment: Deployment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_plugin.session.PING_EVERY_S", 0.05)
    monkeypatch.setattr("vllm_plugin.session.EXPLAIN_EVERY_S", 0.0)
    caplog.set_level("INFO")
    spec = namespace_spec(tenant="acme", kv_cache_dtype="fp8")
    with deployment.client(Role.OPERATOR) as operator:
        num_refused = _num_refused(operator)
        config = deployment.config(**deployment.identity(Role.ENGINE_WRITE))
        session = Session(config, spec, "scheduler", explains=True)
        try:
            wait_for(lambda: session.namespace is not None and MAY_NOT_LIST in caplog.text, "the session to be open")
            pings = _calls(operator)["Ping", "OK"]
            wait_for(lambda: _calls(operator)["Ping", "OK"] > pings + 5, "more pings")
            assert _num_refused(operator) == num_refused
            assert caplog.text.count(MAY_NOT_LIST) == 1
        finally:
            session.close()


def _calls(operator: Client) -> dict[tuple[str, str], int]:
    """Answers so far, by method and status."""
    return {(rpc.method, rpc.status): sum(rpc.buckets) for rpc in operator.admin.stats().server.rpcs}


def _num_refused(operator: Client) -> int:
    return sum(count for (_, status), count in _calls(operator).items() if status != "OK")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    files = Authority.create(tmp_path / "pki").issue_server([])
    (files / "tls.key").chmod(0o644)
    done = run_server("--listen", "127.0.0.1:0", "--http-listen", "", *server_flags(files))
    assert done.returncode == 2
    assert "others can read the private key" in done.stderr
