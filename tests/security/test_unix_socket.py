"""TLS on the Unix socket, where nobody gets shared memory."""

from __future__ import annotations

import os
import signal
import ssl
from pathlib import Path

from kvpool.security.principal import Role
from kvpool.transport.unix_socket import memory_path
from tests.conftest import StartServer
from tests.support.certificates import shown_names
from tests.support.processes import wait_for
from tests.support.secured_server import SecuredServer
from tests.support.values import namespace_spec, payload, run_of

SPEC = namespace_spec(tenant="acme")


def test_blocks_travel_through_grpc_and_nobody_is_offered_memory(
    pool_server: StartServer, tmp_path: Path, socket_dir: Path
) -> None:
    path, content = socket_dir / "socket", payload("acme", 256)
    secured = SecuredServer(tmp_path, pool_server, "--unix-listen", str(path), proof="tokens")
    endpoint = f"unix:{path}"
    with secured.client(Role.ENGINE_WRITE, endpoint=endpoint) as client:
        client.put_blocks(client.open_namespace(SPEC), run_of("block"), [content])
    with secured.client(Role.ENGINE_READ, endpoint=endpoint) as client:
        namespace = client.open_namespace(SPEC)
        assert namespace.transport.name == "grpc"
        choice = client.attachment.choice
        assert choice is not None and "because it has TLS; give the endpoint HOST:PORT" in choice.route
        found = client.lookup(namespace, [run_of("block")])
        (block,) = client.get_blocks(namespace, found.lease_id, run_of("block"))
        assert block is not None and block.tobytes() == content.tobytes()
    for role in Role:
        for at in (endpoint, secured.server.endpoint):
            with secured.client(role, endpoint=at) as client:
                assert not client.rpc.ping().HasField("segment")
                if role is Role.ENGINE_WRITE:
                    assert not client.rpc.open_namespace(SPEC).HasField("segment")
    assert path.exists() and not os.path.lexists(memory_path(str(path)))


def test_new_certificates_reach_each_of_the_servers_ports(
    pool_server: StartServer, tmp_path: Path, socket_dir: Path
) -> None:
    path = str(socket_dir / "socket")
    secured = SecuredServer(tmp_path, pool_server, "--unix-listen", path)
    files = secured.files(Role.ENGINE_WRITE)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    addresses = (secured.server.endpoint, secured.server.http_url.removeprefix("https://"))
    ports = [*((host, int(port)) for host, _, port in (each.rpartition(":") for each in addresses)), path]
    for each in ports:
        assert "renewed.example" not in shown_names(each, context)
    secured.authority.issue_server(["renewed.example"])
    os.kill(secured.server.pid, signal.SIGHUP)
    for each in ports:
        wait_for(lambda each=each: "renewed.example" in shown_names(each, context), f"the new certificate on {each}")  # type: ignore[misc]
