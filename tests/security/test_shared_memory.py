"""Who gets the arena's memory, and what a client can do with it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.transport_choice import Choice
from kvpool.transport import segment
from kvpool.transport.shm import ShmTransport
from kvpool.transport.unix_socket import MAGIC, abstract_name, memory_address, memory_path
from kvpool_server.app.arena_memory import MAX_WAITING, PATIENCE_S
from kvpool_server.app.server import Server
from kvpool_server.settings.config import ServerConfig
from tests.conftest import Connect, StartServer
from tests.support.memory_files import arena_file
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

NBYTES = 1 << 20
CHUNK = 1000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_no_client_can_shrink_or_grow_the_memory_that_others_map(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server()
    client = connect(server, transport="shm")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    assert isinstance(namespace.transport, ShmTransport)
    fd = namespace.transport.segment.fd
    with arena_file(server.pid).open("r+b", 0) as reopened:
        for each in (fd, reopened.fileno()):
            for size in (0, os.fstat(fd).st_size - 1, os.fstat(fd).st_size + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(each, size)
    client.put_blocks(namespace, run_of("a"), [payload("a", CHUNK)])
    (block,) = client.get_blocks(namespace, client.lookup(namespace, [run_of("a")]).lease_id, run_of("a"))
    assert block is not None and block.tobytes() == payload("a", CHUNK).tobytes()
    with Client(ClientConfig(server.endpoint, timeout_ms=10_000)) as other:
        assert other.admin.stats().num_entries == 1


def _request(address: str | bytes, message: bytes) -> tuple[bytes, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(address)
        if message:
            connection.send(message)
        try:
            reply, fds, _, _ = socket.recv_fds(connection, 100, 4)
        except ConnectionResetError:
            return b"", []
    return reply, fds


def test_a_client_without_the_token_gets_nothing(shared_server: ServerProcess, shm_client: Client) -> None:
    token = shm_client.rpc.ping().segment.token
    address = abstract_name(token)
    wrong = bytes([token[0] ^ 1]) + token[1:]
    for message in (MAGIC + wrong, MAGIC, token, MAGIC + token + b"!", b"kvpoolm2" + token, b"x" * 60_000):
        assert _request(address, message) == (b"", [])
    reply, (fd,) = _request(address, MAGIC + token)
    os.close(fd)
    assert reply == MAGIC
    wait_for(lambda: "not the token of this server's memory" in shared_server.stderr, "the refusal in the log")
    assert token.hex() not in shared_server.stderr + shared_server.stdout
    assert token not in memory_address(shared_server.endpoint, token)


def test_clients_that_say_nothing_stop_nobody_and_are_disconnected(
    shared_server: ServerProcess, connect: Connect
) -> None:
    address = abstract_name(connect(shared_server).rpc.ping().segment.token)
    with ExitStack() as stack:
        silent = []
        for _ in range(3 * MAX_WAITING):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.connect(address)  # Blocks while the backlog is full.
            connection.settimeout(20 * PATIENCE_S)
            silent.append(connection)
        namespace = connect(shared_server, transport="shm").open_namespace(namespace_spec())
        assert namespace.transport.name == "shm"
        assert all(connection.recv(1) == b"" for connection in silent)


PROLOGUE = """
import encodings.idna, os, socket, sys  # Nothing can be imported from the home of root later.
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.transport.unix_socket import MAGIC, abstract_name, memory_address, receive_memory
from tests.support.values import group_spec, namespace_spec, run_of

def become(uid):
    os.setgroups([]); os.setgid(uid); os.setuid(uid)

def load_a(endpoint):
    "Prints the transport and why it was chosen, and the block as that transport reads it."
    with Client(ClientConfig(endpoint, timeout_ms=10_000)) as client:
        choice = client.admin.try_transport()
        choice.transport.close()
        print(choice.transport.name, choice.why)
        namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1000), salt="a"))
        run = run_of("a")
        (block,) = client.get_blocks(namespace, client.lookup(namespace, [run]).lease_id, run)
        print(block.tobytes().hex())
        return client.rpc.ping().segment.token
"""


def _in_another_process(code: str, *arguments: str, prefix: Sequence[str] = ()) -> list[str]:
    command = [*prefix, sys.executable, "-c", PROLOGUE + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _store_a(server: ServerProcess, connect: Connect) -> str:
    """Stores a block; returns its content as `load_a` prints it."""
    client = connect(server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK), salt="a"))
    client.put_blocks(namespace, run_of("a"), [payload("a", CHUNK)])
    return payload("a", CHUNK).tobytes().hex()


AS_A_STRANGER = """
become(65534)
token = load_a(sys.argv[1])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:  # Whatever kvpool's own client thinks.
    connection.connect(abstract_name(token))
    connection.settimeout(20)
    try:
        connection.send(MAGIC + token)
        print(len(socket.recv_fds(connection, 100, 4)[1]))
    except (ConnectionResetError, BrokenPipeError):
        print(0)
"""


@needs_root
def test_another_user_gets_no_memory_by_the_name_that_everyone_can_connect_to(
    pool_server: StartServer, connect: Connect
) -> None:
    server = pool_server()
    block = _store_a(server, connect)
    choice, loaded, descriptors = _in_another_process(AS_A_STRANGER, server.endpoint)
    assert choice.startswith("tcp no shm: ") and "refused this client" in choice
    assert loaded == block and descriptors == "0"
    wait_for(lambda: "another user's process; see --unix-listen" in server.stderr, "the refusal in the log")
    assert "uid=65534" in server.stderr


OF_A_STRANGER = """
from kvpool.protocol.errors import TransferError
token = bytes(16)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.seteuid(1000)
listener.bind(abstract_name(token))
listener.listen(1)
os.seteuid(0)
become(65534)
try:
    receive_memory(abstract_name(token), token, 5.0)
except TransferError as error:
    print(error)
"""


@needs_root
def test_a_client_takes_no_memory_from_another_user() -> None:
    (said,) = _in_another_process(OF_A_STRANGER)
    assert said.startswith("no shared memory: kvpool-server runs as user 1000, and this process as user 65534; give ")


@needs_root
@pytest.mark.parametrize(("mode", "transport"), [("0666", "shm"), ("0600", "")])
def test_the_mode_of_the_unix_socket_says_which_users_share_memory(
    mode: str, transport: str, pool_server: StartServer, connect: Connect, socket_dir: Path
) -> None:
    path = socket_dir / "kvpool.sock"
    server = pool_server("--unix-listen", str(path), "--unix-mode", mode)
    for each in (path, Path(memory_path(str(path)))):
        assert each.stat().st_mode & 0o777 == int(mode, 8)
    block = _store_a(server, connect)
    code = "become(65534)\nload_a(sys.argv[1])\n"
    if transport:
        choice, loaded = _in_another_process(code, f"unix:{path}")
        assert choice.startswith("shm ") and loaded == block
    else:
        with pytest.raises(AssertionError, match="Permission denied"):
            _in_another_process(code, f"unix:{path}")


ISOLATED = ("unshare", "--user", "--map-root-user", "--mount", "--ipc", "--net", "--uts")
"""As a container without --ipc=host and without the host's network. `IN_A_CONTAINER` gives it its own /dev/shm."""

IN_A_CONTAINER = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
assert os.listdir("/dev/shm") == []
try:
    socket.create_connection(sys.argv[2].rsplit(":", 1), timeout=5)
except OSError:
    load_a(sys.argv[1])
"""


@pytest.mark.skipif(
    subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode != 0,
    reason="this system gives users no namespaces of their own",
)
def test_a_container_shares_memory_by_the_directory_of_the_socket_alone(
    pool_server: StartServer, connect: Connect, socket_dir: Path
) -> None:
    path = socket_dir / "kvpool.sock"
    server = pool_server("--unix-listen", str(path))
    block = _store_a(server, connect)
    choice, loaded = _in_another_process(IN_A_CONTAINER, f"unix:{path}", server.endpoint, prefix=ISOLATED)
    assert choice == "shm client and server share memory" and loaded == block


def test_without_seals_no_client_maps_the_memory_and_bytes_take_the_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(segment, "_anonymous_file", lambda name: os.memfd_create(name))  # Without MFD_ALLOW_SEALING.
    config = ServerConfig(
        listen="127.0.0.1:0", http_listen="", data_listen="127.0.0.1:0", memory=ByteSize(NBYTES), log_format="console"
    )

    async def serve() -> Choice:
        server = Server(config)
        await server.start()
        try:
            return await asyncio.to_thread(_try, f"127.0.0.1:{server.parts.port}")
        finally:
            await server.stop()

    def _try(endpoint: str) -> Choice:
        with Client(ClientConfig(endpoint, timeout_ms=10_000)) as client:
            choice = client.admin.try_transport()
            choice.transport.close()
            return choice

    choice = asyncio.run(serve())
    assert choice.transport.name == "tcp" and "offers no shared memory" in choice.why
    assert capsys.readouterr().out.count("this system cannot seal memory (memfd)") == 1
