"""TLS on the Unix socket, and whose engines get the arena's memory there, which holds the blocks of all tenants."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.certificates import Authority
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.principal import ALL_TENANTS, Principal, Role
from kvpool.tls import TlsFiles
from kvpool.tokens import append_record, create_token
from kvpool.types import Offer
from kvpool.unix_socket import memory_path
from kvpool.wire import decode_offer
from tests.conftest import StartServer
from tests.security.test_access import DAY
from tests.support.certificates import files_in, server_flags
from tests.support.processes import ServerProcess, run_server, wait_for
from tests.support.values import namespace_spec, payload, run_of

ENGINE = Principal("acme", Role.ENGINE_WRITE)
OPERATOR = Principal(ALL_TENANTS, Role.OPERATOR)
SPECS = {tenant: namespace_spec(tenant=tenant) for tenant in ("acme", "umbra")}
OTHERS = (
    Principal("umbra", Role.ENGINE_WRITE),
    Principal("acme", Role.ENGINE_READ),
    Principal("acme", Role.TENANT_OPERATOR),
    OPERATOR,
)


class Deployment:
    """A TLS server with a Unix socket, whose callers have certificates, or tokens."""

    def __init__(self, directory: Path, socket_path: Path, start: StartServer, proof: str, *flags: str):
        self._directory, self._proof = directory, proof
        self.authority = Authority.create(directory / "pki")
        self.path = socket_path
        known = directory / "tokens"
        for principal in (ENGINE, *OTHERS):
            token, record = create_token(principal, DAY)
            append_record(known, record)
            file = directory / f"{principal.tenant}-{principal.role}"
            file.write_text(token)
            file.chmod(0o600)
        credentials = server_flags(self.authority.issue_server([]))
        if proof == "tokens":
            credentials = [*credentials[:4], "--tokens", str(known)]
        self.server: ServerProcess = start(
            "--unix-listen", str(socket_path), *flags, *credentials, **self.identity(OPERATOR)
        )

    def identity(self, principal: Principal) -> dict[str, Any]:
        files = files_in(self.authority.issue_principal(principal))
        if self._proof == "certificates":
            return {"tls": files}
        return {"tls": TlsFiles(files.ca), "token_file": str(self._directory / f"{principal.tenant}-{principal.role}")}

    def client(self, principal: Principal, transport: str = "auto") -> Client:
        config = ClientConfig(f"unix:{self.path}", transport, timeout_ms=10_000, **self.identity(principal))
        return Client(config)


Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(tmp_path: Path, socket_dir: Path, pool_server: StartServer) -> Deploy:
    return lambda proof, *flags: Deployment(tmp_path, socket_dir / "socket", pool_server, proof, *flags)


def _offers(client: Client, principal: Principal) -> list[Offer]:
    """What each call that tells of transports offers a caller."""
    offers = [decode_offer(client.rpc.ping())]
    if principal.role not in (Role.TENANT_OPERATOR, Role.METRICS):
        tenant = "acme" if principal == OPERATOR else principal.tenant
        opened, _ = client.rpc.open_namespace(SPECS[tenant])
        offers.append(opened.offer)
    return offers


@pytest.mark.parametrize("proof", ["certificates", "tokens"])
def test_the_named_tenants_engines_alone_share_memory(deploy: Deploy, proof: str) -> None:
    deployment = deploy(proof, "--memory-tenant", "acme")
    with deployment.client(ENGINE) as client:
        namespace = client.open_namespace(SPECS["acme"])
        assert namespace.transport.name == "shm"
        client.put_blocks(namespace, run_of("block"), [payload("block", 256)])
        found = client.lookup(namespace, [run_of("block")])
        (block,) = client.get_blocks(namespace, found.lease_id, run_of("block"))
        assert block is not None and block.tobytes() == payload("block", 256).tobytes()
    for principal in OTHERS:
        with deployment.client(principal) as client:
            assert not any(offer.segment for offer in _offers(client, principal))
    with deployment.client(OTHERS[0]) as client:  # Other tenants use the socket, without its memory.
        namespace = client.open_namespace(SPECS["umbra"])
        assert namespace.transport.name == "grpc"
        client.put_blocks(namespace, run_of("block"), [payload("other", 256)])
        assert client.lookup(namespace, [run_of("block")]).hits[0].num_leading == 1


def test_without_a_named_tenant_nobody_gets_memory(deploy: Deploy) -> None:
    deployment = deploy("certificates")
    for principal in (ENGINE, *OTHERS):
        with deployment.client(principal) as client:
            assert not any(offer.segment for offer in _offers(client, principal))
    assert deployment.path.exists() and not os.path.lexists(memory_path(str(deployment.path)))


def test_new_certificates_reach_each_of_the_servers_ports(deploy: Deploy) -> None:
    deployment = deploy("certificates")
    files = files_in(deployment.authority.issue_principal(ENGINE))
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    host, _, port = deployment.server.endpoint.rpartition(":")

    def names(family: socket.AddressFamily, address: Any) -> list[str]:
        with socket.socket(family) as plain:
            plain.settimeout(10)
            plain.connect(address)
            with context.wrap_socket(plain, server_hostname="localhost") as secure:
                found = secure.getpeercert() or {}
        return [str(value) for _, value in found["subjectAltName"]]

    ports: list[tuple[socket.AddressFamily, Any]] = [
        (socket.AF_INET, (host, int(port))),
        (socket.AF_UNIX, str(deployment.path)),
    ]
    for each in ports:
        assert "renewed.example" not in names(*each)
    deployment.authority.issue_server(["renewed.example"])
    os.kill(deployment.server.pid, signal.SIGHUP)
    for each in ports:
        wait_for(lambda each=each: "renewed.example" in names(*each), f"the new certificate on {each}")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--memory-tenant", "acme", "--unix-listen", "s"], "without TLS callers have no tenant"),
        (["--memory-tenant", "acme", *server_flags(Path("pki"))], "give --unix-listen, too"),
        (["--memory-tenant", "a/b"], "tenant 'a/b' cannot be in a SPIFFE ID"),
    ],
)
def test_what_memory_tenant_needs(flags: list[str], told: str) -> None:
    done = run_server("--listen", "127.0.0.1:0", "--http-listen", "", "--memory", "1MiB", *flags)
    assert done.returncode == 2 and told in done.stderr
