"""Memory that a hostile server offers, or an intruder who changes a server's replies.

No client opens a place that the server names, maps what it must not trust, or keeps a descriptor that it was sent.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.rpc import PoolRpc
from kvpool.client.transport_choice import Choice, choose
from kvpool.protocol.errors import TransferError
from kvpool.protocol.types import NONCE_BYTES, TOKEN_BYTES
from kvpool.transport.segment import TRAILER_BYTES, Segment
from kvpool.transport.unix_socket import MAGIC, abstract_name, receive_memory
from kvpool.v1 import pool_pb2 as pb
from tests.support.memory_files import descriptors

NBYTES = 1 << 20
NONCE, TOKEN = os.urandom(NONCE_BYTES), os.urandom(TOKEN_BYTES)


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
            return choose(rpc.config, rpc.ping(), rpc.channel)


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_not_the_announced_memory_is_never_mapped_and_always_closed(what: str) -> None:
    make, reply, why = HOSTILE[what]
    before = descriptors()
    with _memory_socket(make, reply), _audited("mmap.__new__") as maps:
        with pytest.raises(TransferError, match=f"no shared memory: .*{why}"):
            Segment.attach(receive_memory(abstract_name(TOKEN), TOKEN, 5.0), NBYTES, NONCE)
        assert what == "read-only" or not maps
    assert descriptors() <= before


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


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES, (1 << 64) - 1])
def test_sizes_that_a_server_makes_up_are_compared_before_anything_is_mapped(nbytes: int) -> None:
    """With an honest answer the hostile server of these tests is taken for one."""
    with _memory_socket(GOOD, MAGIC), _audited("mmap.__new__") as maps:
        choice = _choose(_announced(nbytes=nbytes))
        with closing(choice.transport):
            if nbytes == NBYTES:
                assert choice.transport.name == "shm"
            else:
                assert choice.transport.name == "grpc" and choice.is_fallback
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
