"""TLS on the Unix socket, and whose engines get which memory there."""

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
    """Engines share memory with the server unless other flags are given."""

    def start(proof: str, *flags: str) -> Deployment:
        return Deployment(tmp_path, socket_dir / "socket", pool_server, proof, *(flags or ["--tenant-memory"]))

    return start


def _offers(client: Client, principal: Principal) -> list[Offer]:
    """What each call that tells of transports offers a caller."""
    offers = [decode_offer(client.rpc.ping())]
    if principal.role not in (Role.TENANT_OPERATOR, Role.METRICS):
        tenant = "acme" if principal == OPERATOR else principal.tenant
        opened, _ = client.rpc.open_namespace(SPECS[tenant])
        offers.append(opened.offer)
    return offers


@pytest.mark.parametrize("proof", ["certificates", "tokens"])
def test_engines_share_the_memory_of_their_own_tenant(deploy: Deploy, proof: str) -> None:
    deployment = deploy(proof)
    tokens = set()
    for principal in (ENGINE, OTHERS[0]):
        with deployment.client(principal) as client:
            namespace = client.open_namespace(SPECS[principal.tenant])
            assert namespace.transport.name == "shm"
            content = payload(principal.tenant, 256)
            client.put_blocks(namespace, run_of("block"), [content])
            found = client.lookup(namespace, [run_of("block")])
            (block,) = client.get_blocks(namespace, found.lease_id, run_of("block"))
            assert block is not None and block.tobytes() == content.tobytes()
            (token,) = {offer.segment.token for offer in _offers(client, principal) if offer.segment}
            tokens.add(token)
            extents = namespace.transport.extents
            assert extents is not None
            num_extents = len(namespace.transport.memory) // extents.extent_bytes
            # A put has got one of them. Engines pin what has pages, and nothing else.
            assert [bool(extents.state(idx)) for idx in range(num_extents)].count(True) == 1
    assert len(tokens) == 2
    for principal in OTHERS[1:]:
        with deployment.client(principal) as client:
            assert not any(offer.segment for offer in _offers(client, principal))
    with deployment.client(OTHERS[1]) as client:  # Engines that only read get their blocks by gRPC.
        namespace = client.open_namespace(SPECS["acme"])
        assert namespace.transport.name == "grpc"
        found = client.lookup(namespace, [run_of("block")])
        (block,) = client.get_blocks(namespace, found.lease_id, run_of("block"))
        assert block is not None and block.tobytes() == payload("acme", 256).tobytes()


def test_over_tcp_nobody_gets_memory(deploy: Deploy) -> None:
    deployment = deploy("certificates")
    for principal in (ENGINE, *OTHERS):
        config = ClientConfig(deployment.server.endpoint, timeout_ms=10_000, **deployment.identity(principal))
        with Client(config) as client:
            assert not any(offer.segment for offer in _offers(client, principal))


def test_without_tenant_memory_nobody_gets_any(deploy: Deploy) -> None:
    deployment = deploy("certificates", "--memory", "64MiB")
    for principal in (ENGINE, *OTHERS):
        with deployment.client(principal) as client:
            assert not any(offer.segment for offer in _offers(client, principal))
    assert deployment.path.exists() and not os.path.lexists(memory_path(str(deployment.path)))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--unix-listen", "s"], "callers have no tenant; give --tls-cert, too"),
        (server_flags(Path("pki")), "reaches nobody; give --unix-listen, too"),
        ([*server_flags(Path("pki")), "--unix-listen", "s", "--mooncake", "tcp", "--mooncake-trusted-network"],
         "--tenant-memory with --mooncake tcp: its Transfer Engine has registered the whole arena"),
        ([*server_flags(Path("pki")), "--unix-listen", "s", "--tier", "file:/no/such,size=1GiB"],
         "--tenant-memory with --tier file: bytes that come up from a tier lie in the arena before they are verified"),
    ],
)  # fmt: skip
def test_what_tenant_memory_needs(flags: list[str], told: str) -> None:
    done = run_server(
        "--listen", "127.0.0.1:0", "--http-listen", "", "--memory", "1MiB", "--tenant-memory", *flags
    )  # fmt: skip
    assert done.returncode == 2 and told in " ".join(done.stderr.split())


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
