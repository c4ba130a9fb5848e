"""TLS on the Unix socket, where nobody gets shared memory."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.offers import Offer
from kvpool.protocol.wire import decode_offer
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import append_record, create_token
from kvpool.transport.unix_socket import memory_path
from tests.conftest import StartServer
from tests.support.certificates import DAY, files_in, server_flags
from tests.support.processes import ServerProcess, wait_for
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

    def __init__(self, directory: Path, socket_path: Path, start: StartServer, proof: str):
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
        self.server: ServerProcess = start("--unix-listen", str(socket_path), *credentials, **self.identity(OPERATOR))

    def identity(self, principal: Principal) -> dict[str, Any]:
        files = files_in(self.authority.issue_principal(principal))
        if self._proof == "certificates":
            return {"tls": files}
        return {"tls": TlsFiles(files.ca), "token_file": str(self._directory / f"{principal.tenant}-{principal.role}")}

    def client(self, principal: Principal) -> Client:
        return Client(ClientConfig(f"unix:{self.path}", timeout_ms=10_000, **self.identity(principal)))


Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(tmp_path: Path, socket_dir: Path, pool_server: StartServer) -> Deploy:
    def start(proof: str) -> Deployment:
        return Deployment(tmp_path, socket_dir / "socket", pool_server, proof)

    return start


def _offers(client: Client, principal: Principal) -> list[Offer]:
    """What each call that tells of transports offers a caller."""
    offers = [decode_offer(client.rpc.ping())]
    if principal.role not in (Role.TENANT_OPERATOR, Role.METRICS):
        tenant = "acme" if principal == OPERATOR else principal.tenant
        offers.append(client.rpc.open_namespace(SPECS[tenant])[1])
    return offers


@pytest.mark.parametrize("proof", ["certificates", "tokens"])
def test_blocks_travel_through_grpc_and_nobody_is_offered_memory(deploy: Deploy, proof: str) -> None:
    deployment = deploy(proof)
    content = payload("acme", 256)
    with deployment.client(ENGINE) as client:
        client.put_blocks(client.open_namespace(SPECS["acme"]), run_of("block"), [content])
    with deployment.client(OTHERS[1]) as client:
        namespace = client.open_namespace(SPECS["acme"])
        assert namespace.transport.name == "grpc"
        choice = client.attachment.choice
        assert choice is not None and "because it has TLS; give the endpoint HOST:PORT" in choice.route
        found = client.lookup(namespace, [run_of("block")])
        (block,) = client.get_blocks(namespace, found.lease_id, run_of("block"))
        assert block is not None and block.tobytes() == content.tobytes()
    for principal in (ENGINE, *OTHERS):
        with deployment.client(principal) as client:
            assert not any(offer.segment for offer in _offers(client, principal))
    assert deployment.path.exists() and not os.path.lexists(memory_path(str(deployment.path)))


def test_over_tcp_nobody_gets_memory(deploy: Deploy) -> None:
    deployment = deploy("certificates")
    for principal in (ENGINE, *OTHERS):
        config = ClientConfig(deployment.server.endpoint, timeout_ms=10_000, **deployment.identity(principal))
        with Client(config) as client:
            assert not any(offer.segment for offer in _offers(client, principal))


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
