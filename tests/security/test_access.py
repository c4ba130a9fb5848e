"""Who may call what: every RPC, by every role, about the caller's own and another tenant's namespace."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import (
    ConfigError,
    IncompatibleNamespaceError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.protocol.namespace import MEASUREMENT_MODEL
from kvpool.protocol.types import Quota
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import append_record, create_token, read_records
from kvpool.security.watched_files import LOOK_EVERY_S, WatchedFiles
from kvpool_server.access.authentication import Tokens
from kvpool_server.access.caller import CALLER, CALLS, check_measurement
from tests.security.conftest import Deployment
from tests.support.calls import METHODS, Target, outcome
from tests.support.certificates import DAY, files_in, forge, server_flags
from tests.support.processes import ServerProcess, run_server
from tests.support.recorder import Recorder
from tests.support.values import block_hash, namespace_spec, payload, run_of


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert set().union(*CALLS.values()) == set(METHODS)


@pytest.mark.parametrize("role", list(Role))
def test_each_role_may_call_what_the_table_says(deployment: Deployment, role: Role) -> None:
    refused = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    with deployment.client(role) as client:
        target = Target(deployment.fingerprints["acme"])
        may = {method for method in METHODS if outcome(client, method, target).code not in refused}
    assert may == CALLS[role]
    deployment.fingerprints["acme"] = deployment.store("acme")  # The operators have cleared it.


@pytest.mark.parametrize("version", ["TLSv1.2", ""])
def test_a_token_over_old_tls_is_refused(version: str, tmp_path: Path) -> None:
    known = tmp_path / "tokens"
    token, record = create_token(Principal("acme", Role.ENGINE_WRITE), DAY)
    append_record(known, record)
    who = Tokens(WatchedFiles([str(known)], lambda: read_records(known)))

    def call(version: str) -> Any:
        told = {"ssl_tls_version": [version.encode()]} if version else {}
        metadata = (("authorization", f"Bearer {token}"),)
        context: Any = SimpleNamespace(auth_context=lambda: told, invocation_metadata=lambda: metadata)
        return who(context)

    assert call("TLSv1.3").principal == record.principal
    with pytest.raises(UnauthenticatedError, match=r"use TLS 1\.3"):
        call(version)


def test_a_tenant_opens_its_own_namespaces_only(deployment: Deployment) -> None:
    with deployment.client(Role.ENGINE_WRITE, "acme") as client:
        for tenant in ("umbra", ""):
            with pytest.raises(PermissionDeniedError, match="give tenant 'acme'"):
                client.rpc.open_namespace(namespace_spec(tenant=tenant))  # `open_namespace` fills an empty tenant.
        spec = namespace_spec(tenant="acme")
        with pytest.raises(UnknownNamespaceError):
            client.open_namespace(spec, deployment.fingerprints["umbra"])
        with pytest.raises(IncompatibleNamespaceError):
            client.open_namespace(spec, deployment.fingerprints["acme"])


def test_who_only_reads_opens_namespaces_that_are_open(deployment: Deployment) -> None:
    spec = namespace_spec(tenant="acme")
    with deployment.client(Role.ENGINE_READ) as reader, deployment.client(Role.ENGINE_WRITE) as writer:
        with pytest.raises(UnknownNamespaceError, match="a caller that only reads cannot create it"):
            reader.open_namespace(spec)
        assert writer.open_namespace(spec).fingerprint == reader.open_namespace(spec).fingerprint


def test_a_tenant_lists_its_own_namespaces_and_quotas_only(deployment: Deployment) -> None:
    with deployment.client(Role.OPERATOR) as operator:
        operator.admin.set_quotas([Quota("tenant:umbra", 1 << 30), Quota("tenant:acme", 1 << 30)])
        assert {info.spec.tenant for info in operator.admin.namespaces()} >= {"acme", "umbra"}
        assert len(operator.admin.quotas()) == 2
    with deployment.client(Role.TENANT_OPERATOR) as client:
        assert {info.spec.tenant for info in client.admin.namespaces()} == {"acme"}
        assert [quota.subject for quota in client.admin.quotas()] == ["tenant:acme"]
        with pytest.raises(PermissionDeniedError, match="Clear of all namespaces"):
            client.admin.clear()
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


def test_a_client_does_not_talk_to_who_is_no_server(deployment: Deployment, tmp_path: Path) -> None:
    files = deployment.files(Role.ENGINE_WRITE)
    foreign = Authority.create(tmp_path / "foreign").directory / "ca" / "ca.crt"
    config = deployment.config(tls=TlsFiles(str(foreign), files.cert, files.key))
    with Client(config) as client, pytest.raises(UnavailableError):
        client.admin.ping()


def test_a_recorder_on_the_wire_finds_no_byte_of_a_block(deployment: Deployment) -> None:
    block = payload("secret", 256)
    with Recorder(deployment.server.endpoint) as recorder:
        files = deployment.files(Role.ENGINE_WRITE)
        config = ClientConfig(recorder.endpoint, "grpc", timeout_ms=10_000, tls=files)
        with Client(config) as client:
            namespace = client.open_namespace(namespace_spec(tenant="acme", model="secret/model"))
            client.put_blocks(namespace, run_of("secret"), [block])
            found = client.lookup(namespace, [run_of("secret")])
            (loaded,) = client.get_blocks(namespace, found.lease_id, run_of("secret"))
        assert bytes(loaded) == block.tobytes()
        recorder.shutdown()
        seen = bytes(recorder.seen)
    assert len(seen) > 2 * len(block)
    for secret in (block.tobytes()[:16], block_hash("secret")[:16], b"secret/model", b"acme"):
        assert secret not in seen


def test_a_clients_certificate_is_replaced_while_calls_go_on(deployment: Deployment) -> None:
    """The server's: `test_unix_socket.py` and `test_http.py`."""
    before = deployment.files(Role.ENGINE_WRITE)
    with Client(deployment.config(tls=before)) as client:
        namespace = client.open_namespace(namespace_spec(tenant="acme"))

        def call() -> int:
            client.admin.ping()
            return client.lookup(namespace, [run_of("nothing")]).hits[0].num_leading

        assert call() == 0
        deployment.files(Role.ENGINE_WRITE)
        channel = client.rpc.channel
        was = channel.version
        ends_at = time.monotonic() + LOOK_EVERY_S + 20
        while channel.version == was:
            assert time.monotonic() < ends_at
            call()
        assert call() == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--listen", "0.0.0.0:0"], "--tls-client-ca (or --tokens), or give --insecure-network"),
        (["--http-listen", "0.0.0.0:0"], "--http-listen 0.0.0.0:0: other hosts can reach"),
        (["--data-listen", "0.0.0.0:0"], "--data-listen 0.0.0.0:0: other hosts can reach"),
        (["--kv-events", "ipc:///tmp/e", "--kv-events-replay", "tcp://0.0.0.0:0"], "give --kv-events-key and"),
        (["--kv-events", "tcp://0.0.0.0:0"], "KV events at tcp://0.0.0.0:0: other hosts can reach this port"),
        (["--kv-events-tenant", "acme=ipc:///tmp/e,tcp://0.0.0.0:0"], "KV events at tcp://0.0.0.0:0: other hosts"),
        (["--mooncake", "tcp"], "--mooncake-trusted-network where only trusted hosts reach its ports, or --insecure"),
        (["--tier", "mooncake:master=127.0.0.1:1"], "--mooncake-trusted-network where only trusted hosts reach its"),
        (["--tls-cert", "x"], "TLS needs --tls-cert and --tls-key"),
        (["--tls-cert", "x", "--tls-key", "x"], "give either --tls-client-ca, for certificates, or --tokens"),
        (["--tokens", "x"], "TLS needs --tls-cert and --tls-key"),
        (["--tls-cert", "x", "--tls-key", "x", "--tls-client-ca", "x"], "; give a file as --tls-client-ca "),
    ],
)
def test_what_a_server_refuses_to_serve(flags: list[str], told: str) -> None:
    common = [flag for flag in ("--listen", "--http-listen") if flag not in flags for flag in (flag, "127.0.0.1:0")]
    done = run_server(*common, "--memory", "1MiB", *flags)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    files = Authority.create(tmp_path / "pki").issue_server([])
    (files / "tls.key").chmod(0o644)
    done = run_server("--listen", "127.0.0.1:0", "--http-listen", "", *server_flags(files))
    assert done.returncode == 2
    assert "others can read the private key" in done.stderr


def test_whoami_says_role_methods_and_end(deployment: Deployment) -> None:
    with deployment.client(Role.ENGINE_READ) as client:
        found = client.admin.whoami()
    assert found.principal == "spiffe://kvpool.local/kvpool/acme/engine-read"
    assert set(found.methods) == CALLS[Role.ENGINE_READ]
    assert 364 <= (found.ends_at - time.time()) / 86_400 <= 365


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
