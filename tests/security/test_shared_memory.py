"""Shared memory between processes that do not trust each other's files: no path from a server, no SIGBUS, no leaks."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest
from pydantic import ByteSize

from kvpool import segment
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import TransferError
from kvpool.memory_socket import MAGIC, TOKEN_BYTES, abstract_name, memory_address, receive_memory
from kvpool.rpc import PoolRpc
from kvpool.segment import NONCE_BYTES, TRAILER_BYTES, Segment
from kvpool.transport.choice import Choice, choose
from kvpool.transport.shm import ShmTransport
from kvpool.types import SegmentInfo
from kvpool.unix_socket import memory_path
from kvpool.v1 import pool_pb2 as pb
from kvpool.wire import decode_offer
from kvpool_server.config import ServerConfig
from kvpool_server.memory_socket import MAX_WAITING, PATIENCE_S
from kvpool_server.server import Server
from tests.conftest import Connect, StartServer
from tests.support.memory_files import arena_file
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, payload, run_of

NBYTES = 1 << 20
CHUNK = 1000
NONCE, TOKEN = b"n" * NONCE_BYTES, b"t" * TOKEN_BYTES
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def _segment_info(client: Client) -> SegmentInfo:
    info = decode_offer(client.rpc.ping()).segment
    assert info is not None
    return info


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What a client may do with the memory


def test_no_client_can_shrink_or_grow_the_memory_that_others_map(pool_server: StartServer, connect: Connect) -> None:
    server = pool_server()
    client = connect(server, transport="shm")
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))
    assert isinstance(namespace.transport, ShmTransport)
    fd = namespace.transport.segment.fd
    with closing(os.fdopen(os.open(arena_file(server.pid), os.O_RDWR), "r+b", 0)) as reopened:
        for each in (fd, reopened.fileno()):
            for size in (0, os.fstat(fd).st_size - 1, os.fstat(fd).st_size + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(each, size)
    client.put_blocks(namespace, run_of("a"), [payload("a", CHUNK)])
    (block,) = client.get_blocks(namespace, client.lookup(namespace, [run_of("a")]).lease_id, run_of("a"))
    assert block is not None and block.tobytes() == payload("a", CHUNK).tobytes()
    with Client(ClientConfig(server.endpoint)) as other:
        assert other.admin.stats().num_entries == 1


# What a hostile server may do to a client


def _memfd(nbytes: int = NBYTES + TRAILER_BYTES, seals: int = -1, nonce: bytes = NONCE) -> int:
    """A memfd with a nonce in the last page; by default as a server would make it."""
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, nonce, NBYTES)
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sealed if seals < 0 else seals)
    return fd


def _fifo() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _regular_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES + TRAILER_BYTES)
        os.pwrite(file.fileno(), NONCE, NBYTES)
        return os.dup(file.fileno())


def _read_only() -> int:
    fd = _memfd()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


GOOD: tuple[Callable[[], int], ...] = (_memfd,)
HOSTILE: dict[str, tuple[Sequence[Callable[[], int]], bytes, str]] = {
    "unsealed": ([lambda: _memfd(seals=0)], MAGIC, "no memory whose size is sealed"),
    "sealed against growing only": ([lambda: _memfd(seals=4)], MAGIC, "no memory whose size is sealed"),
    "short": ([lambda: _memfd(NBYTES)], MAGIC, "memory of another size"),
    "long": ([lambda: _memfd(2 * NBYTES)], MAGIC, "memory of another size"),
    "another server's": ([lambda: _memfd(nonce=bytes(NONCE_BYTES))], MAGIC, "another server's memory"),
    "read-only": ([_read_only], MAGIC, "cannot map what the server sent"),
    "a pipe": ([_fifo], MAGIC, "no memory whose size is sealed"),
    "a directory": ([lambda: os.open("/", os.O_RDONLY)], MAGIC, "no memory whose size is sealed"),
    "a file": ([_regular_file], MAGIC, "no memory whose size is sealed"),
    "a device": ([lambda: os.open("/dev/zero", os.O_RDWR)], MAGIC, "no memory whose size is sealed"),
    "two descriptors": ([_memfd, _memfd], MAGIC, "sent 2 descriptors"),
    "a hundred descriptors": ([_memfd] * 100, MAGIC, "descriptors or an unknown answer"),
    "no descriptor": ([], MAGIC, "sent 0 descriptors"),
    "another answer": (GOOD, b"kvpoolm2", "unknown answer"),
    "a longer answer": (GOOD, MAGIC + b"!", "unknown answer"),
    "nothing": ([], b"", "refused this client"),
}


@contextmanager
def _memory_socket(make: Sequence[Callable[[], int]], reply: bytes, token: bytes = TOKEN) -> Iterator[None]:
    """A hostile memory socket, for one client: answers whatever it is sent with a reply and descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(abstract_name(token))
        listener.listen(1)
        listener.settimeout(20)

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(100)
                fds = [each() for each in make]
                if reply:
                    socket.send_fds(client, [reply], fds)
                for fd in fds:
                    os.close(fd)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(20)
        assert not thread.is_alive()


class _HostileServer:
    """Answers Ping with an offer of the test's, and nothing else."""

    def __init__(self, segment: bytes):
        pong = pb.PingResponse(boot_token=1, piece_bytes=1 << 20)
        # As bytes: an offer may have fields that the contract does not know any more.
        reply = pong.SerializeToString() + b"\x22" + bytes([len(segment)]) + segment
        handler = grpc.unary_unary_rpc_method_handler(lambda *_: reply, lambda raw: raw, lambda raw: raw)
        self._server = grpc.server(ThreadPoolExecutor(1))
        service = pb.DESCRIPTOR.services_by_name["Pool"].full_name
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Ping": handler}),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait(10)


def _announced(**fields: object) -> pb.Segment:
    return pb.Segment(**{"nbytes": NBYTES, "nonce": NONCE, "nonce_offset": NBYTES, "token": TOKEN, **fields})


@contextmanager
def _audited(event: str) -> Iterator[list[object]]:
    """Collects the first argument of this thread's audit events."""
    seen: list[object] = []
    thread, is_on = threading.get_ident(), True

    def hook(name: str, args: tuple[object, ...]) -> None:
        if is_on and name == event and threading.get_ident() == thread:
            seen.append(args[0])

    sys.addaudithook(hook)  # Stays, and costs a comparison from now on.
    yield seen
    is_on = False


def _choose(announced: pb.Segment | bytes, transport: str = "auto") -> Choice:
    """What a client of a hostile server ends up with."""
    content = announced if isinstance(announced, bytes) else announced.SerializeToString()
    with closing(_HostileServer(content)) as server:
        rpc = PoolRpc.connect(ClientConfig(f"127.0.0.1:{server.port}", transport, timeout_ms=10_000))
        with closing(rpc):
            return choose(rpc.config, decode_offer(rpc.ping()), rpc.channel)


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_not_the_announced_memory_is_never_mapped_and_always_closed(what: str) -> None:
    make, reply, why = HOSTILE[what]
    with ExitStack() as stack:
        stack.enter_context(_memory_socket(make, reply))
        maps = stack.enter_context(_audited("mmap.__new__"))
        choice = _choose(_announced())
        stack.enter_context(closing(choice.transport))
        assert choice.transport.name == "grpc" and choice.is_fallback and why in choice.why
        assert what == "read-only" or not maps


@pytest.mark.parametrize("what", HOSTILE)
def test_a_refused_server_costs_the_client_no_descriptor(what: str) -> None:
    make, reply, _ = HOSTILE[what]
    before = _descriptors()
    info = SegmentInfo(NBYTES, NONCE, NBYTES, TOKEN)
    with _memory_socket(make, reply), pytest.raises(TransferError, match="no shared memory: "):
        Segment.attach(receive_memory(abstract_name(TOKEN), TOKEN, 5.0), info)
    assert _descriptors() == before


def test_an_honest_answer_is_taken() -> None:
    """The hostile server of these tests is refused for its answers alone."""
    with _memory_socket(GOOD, MAGIC), closing(_choose(_announced(), "shm").transport) as transport:
        assert transport.name == "shm"


@pytest.mark.parametrize("place", ["victim", "victim.memory", "@victim"])
def test_a_server_that_names_a_place_has_nobody_open_it(place: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    content = NONCE.rjust(NBYTES + len(NONCE), b"v").ljust(NBYTES + TRAILER_BYTES, b"v")
    for path in (victim, tmp_path / "victim.memory"):
        path.write_bytes(content)
    name = str(tmp_path / place).encode()
    named = _announced(token=b"").SerializeToString()
    offers = [
        b"\x0a" + bytes([len(name)]) + name + named,  # Field 1, where `path` was.
        _announced(token=name).SerializeToString(),
        _announced(token=b"\0" + name).SerializeToString(),
    ]
    for offer in offers:
        with _audited("open") as opened, _audited("socket.connect") as connected:
            with closing(_choose(offer).transport) as transport:
                assert transport.name == "grpc"
            assert len(connected) == 1, "a client that tried no memory socket proves nothing"
        assert not [path for path in opened if str(place).strip("@") in str(path)]
    assert all(path.read_bytes() == content for path in (victim, tmp_path / "victim.memory"))


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, (1 << 64) - 1])
def test_sizes_that_a_server_makes_up_are_compared_before_anything_is_mapped(nbytes: int) -> None:
    with _memory_socket(GOOD, MAGIC), _audited("mmap.__new__") as maps:
        choice = _choose(_announced(nbytes=nbytes))
        with closing(choice.transport):
            assert "memory of another size" in choice.why and not maps


@pytest.mark.parametrize("in_backlog", [0, 2])
def test_a_server_that_does_not_answer_costs_a_deadline(in_backlog: int) -> None:
    with ExitStack() as stack:
        listener, *others = (
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(1 + in_backlog)
        )
        listener.bind(abstract_name(TOKEN))
        listener.listen(1)  # Room for two.
        for each in others:
            each.connect(abstract_name(TOKEN))
        with pytest.raises(TransferError, match=r"did not answer within 0\.2 s"):
            receive_memory(abstract_name(TOKEN), TOKEN, 0.2)


# What strangers get from a server


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
    token = _segment_info(shm_client).token
    address = abstract_name(token)
    wrong = bytes([token[0] ^ 1]) + token[1:]
    for message in (MAGIC + wrong, MAGIC, token, MAGIC + token + b"!", b"kvpoolm2" + token, b"x" * 60_000):
        assert _request(address, message) == (b"", [])
    reply, (fd,) = _request(address, MAGIC + token)
    os.close(fd)
    assert reply == MAGIC
    assert "not the token of this server's memory" in shared_server.stderr
    assert token.hex() not in shared_server.stderr + shared_server.stdout
    assert token not in memory_address(shared_server.endpoint, token)


def test_clients_that_say_nothing_stop_nobody_and_are_disconnected(
    shared_server: ServerProcess, connect: Connect
) -> None:
    address = abstract_name(_segment_info(connect(shared_server)).token)
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
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.memory_socket import MAGIC, abstract_name, memory_address, receive_memory
from kvpool.wire import decode_offer
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
        return decode_offer(client.rpc.ping()).segment.token
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


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user can enter; pytest's are the runner's own."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


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
    assert "another user's process; see --unix-listen" in server.stderr and "uid=65534" in server.stderr


OF_A_STRANGER = """
from kvpool.errors import TransferError
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
    mode: str, transport: str, pool_server: StartServer, connect: Connect, open_dir: Path
) -> None:
    path = open_dir / "kvpool.sock"
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
    pool_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    path = tmp_path / "kvpool.sock"
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
            return await asyncio.to_thread(_try, f"127.0.0.1:{server.port}")
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
