"""An encrypted data port: nobody between reads or changes a byte, and a permit is useless without its key."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError, TransferError
from kvpool.protocol.types import PERMIT_BYTES
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.transport.base import Local, Transfer
from kvpool.transport.data_port import (
    GREETING_BYTES,
    MAGIC,
    REPLY_BYTES,
    Header,
    Kind,
    Reply,
    Status,
    pack_offsets,
    proof_of,
    time_out,
)
from kvpool.transport.sealed_socket import RANDOM_BYTES, SealedSocket
from kvpool.transport.tcp import TcpTransport
from kvpool.transport.tcp_connection import Peer
from tests.support.certificates import files_in, server_flags
from tests.support.data_client import receive_exactly
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, payload, run_of
from tests.support.workers import NONCE, Port, data_port

MIB = 1 << 20
TIMEOUT_S = 10.0


@pytest.fixture
def port() -> Iterator[Port]:
    with data_port(8 * MIB, sealed=True) as port:
        yield port


def _greeted(port: Port) -> tuple[socket.socket, bytes]:
    """A raw connection, and the worker's random number."""
    client = socket.create_connection(("127.0.0.1", port.info.port), timeout=TIMEOUT_S)
    time_out(client, TIMEOUT_S)
    greeting = receive_exactly(client, GREETING_BYTES + RANDOM_BYTES)
    assert greeting[:GREETING_BYTES] == MAGIC + NONCE
    return client, greeting[GREETING_BYTES:]


def _sealed(port: Port, permit: bytes) -> SealedSocket:
    """A connection of a client that has a permit and its key."""
    plain, server_random = _greeted(port)
    client_random = os.urandom(RANDOM_BYTES)
    plain.sendall(client_random + permit[:PERMIT_BYTES])
    return SealedSocket(plain, permit[PERMIT_BYTES:], client_random, server_random, is_client=True)


def _shown(permit: bytes, proof: bytes) -> bytes:
    shown = Header(Kind.READ, 0, 1, 64, holding_id=1, permit=permit[:PERMIT_BYTES])
    return shown.encode() + pack_offsets([0]).tobytes() + proof + Header(Kind.MOVE, 0, 1, 64).encode()


def _is_hung_up_on(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_permit_is_good_for_who_proves_its_key_on_this_connection(port: Port) -> None:
    """A permit is sent in clear when a connection begins."""
    theirs, mine = port.permit(Kind.READ, 1, [0], 64), port.permit(Kind.READ, 2, [64], 64)
    their_key, my_key = theirs[PERMIT_BYTES:], mine[PERMIT_BYTES:]
    with closing(_sealed(port, theirs)) as another:
        for proof, status in (
            (lambda client: proof_of(my_key, client.channel_id), Status.REFUSED),
            (lambda _: proof_of(their_key, another.channel_id), Status.REFUSED),
            (lambda client: proof_of(their_key, client.channel_id), Status.OK),
        ):
            with closing(_sealed(port, mine)) as client:
                client.sendall(_shown(theirs, proof(client)))
                assert Reply.decode(receive_exactly(client, REPLY_BYTES))[0] is status


@pytest.mark.parametrize("says", ["nothing sealed", "another key", "a recording"])
def test_who_has_no_key_gets_no_byte(port: Port, says: str) -> None:
    permit = port.permit(Kind.READ, 1, [0], 64)
    client, server_random = _greeted(port)
    client_random = bytes(RANDOM_BYTES)
    client.sendall(client_random + permit[:PERMIT_BYTES])
    if says == "nothing sealed":
        client.sendall(_shown(permit, bytes(16)) * 20)
    elif says == "another key":
        sealed = SealedSocket(client, bytes(32), client_random, server_random, is_client=True)
        sealed.sendall(_shown(permit, bytes(16)))
    else:
        ours, theirs = socket.socketpair()
        recorded = SealedSocket(ours, permit[PERMIT_BYTES:], client_random, bytes(RANDOM_BYTES), is_client=True)
        recorded.sendall(_shown(permit, bytes(16)))
        client.sendall(theirs.recv(4_096))
        ours.close()
        theirs.close()
    assert _is_hung_up_on(client)
    client.close()
    assert not port.tally.any()


class _Between:
    """Stands between a client and a data port. Keeps what passes, and changes one byte of it.

    Args:
        flip_at: number of the byte to change, of those from the client or from the server; None: none.
    """

    def __init__(self, target: int, flip_at: tuple[bool, int] | None = None):
        self.seen = bytearray()
        self._flip_at = flip_at
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target), TIMEOUT_S)
                for source, sink, is_client in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=(source, sink, is_client), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_client: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if self._flip_at and self._flip_at[0] == is_client:
                    at = self._flip_at[1] - passed
                    if 0 <= at < len(data):
                        data[at] ^= 0x10
                self.seen += data
                passed += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def _changed(port: Port, is_client: bool, at: int) -> Iterator[TcpTransport]:
    """A transport of whose bytes, from the client or from the server, one is changed on the way."""
    with closing(_Between(port.info.port, (is_client, at))) as between:
        peer = Peer("127.0.0.1", between.port, NONCE, 2.0, sealed=True)
        with closing(TcpTransport(peer, 1)) as transport:
            yield transport


def test_a_byte_that_is_changed_on_the_way_is_an_error_or_nothing(port: Port) -> None:
    dice = random.Random(3)
    data = np.frombuffer(dice.randbytes(64 << 10), np.uint8)
    port.arena[: len(data)] = data
    for number in range(60):
        is_client = bool(number % 2)
        found = np.zeros_like(data)
        transfer = Transfer(1, [0], len(data), 5.0, MIB, port.permit(Kind.READ, 1, [0], len(data)))
        with _changed(port, is_client, dice.randrange(0, 120 if is_client else 66_000)) as transport:
            try:
                transport.read(transfer, Local(rows=[[found]]))
            except KVPoolError:
                continue
            assert np.array_equal(found, data)


@pytest.mark.parametrize("at", [GREETING_BYTES + 30, 150, 600, 1_100])
def test_a_write_that_is_changed_on_the_way_is_not_acknowledged(port: Port, at: int) -> None:
    transfer = Transfer(1, [0], 1_000, 5.0, MIB, port.permit(Kind.WRITE, 1, [0], 1_000))
    with _changed(port, True, at) as transport, pytest.raises(TransferError):
        transport.write(transfer, Local(rows=[[np.full(1_000, 7, np.uint8)]]))
    assert not port.arena[:1_000].any()


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_recorder_on_every_port_finds_no_byte_of_a_block(
    pool_server: Callable[..., ServerProcess], tmp_path: Path, transport: str
) -> None:
    authority = Authority.create(tmp_path / "pki")
    operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
    engine = files_in(authority.issue_principal(Principal("acme", Role.ENGINE_WRITE)))
    server = pool_server("--memory", "16MiB", *server_flags(authority.issue_server([])), tls=operator)
    grpc_port = _Between(int(server.endpoint.rpartition(":")[2]))
    endpoint = f"127.0.0.1:{grpc_port.port}"
    blocks = [payload(f"secret {number}", 256 << 10) for number in range(4)]
    spec = namespace_spec(group_spec(chunk_bytes=256 << 10), tenant="acme")
    run = run_of(*(f"secret {number}" for number in range(4)))
    data_ports: list[_Between] = []

    with pytest.MonkeyPatch.context() as patch:
        connect = Peer.connect

        def through(peer: Peer, timeout_s: float) -> tuple[socket.socket, bytes]:
            between = _Between(peer.port)
            data_ports.append(between)
            return connect(dataclasses.replace(peer, port=between.port), timeout_s)

        patch.setattr(Peer, "connect", through)
        config = ClientConfig(endpoint, transport, timeout_ms=10_000, data_timeout_ms=10_000, tls=engine)
        with Client(config) as client:
            namespace = client.open_namespace(spec)
            client.put_blocks(namespace, run, blocks)
            found = client.lookup(namespace, [run])
            loaded = client.get_blocks(namespace, found.lease_id, run)
            assert [bytes(each) for each in loaded] == [block.tobytes() for block in blocks]
    assert bool(data_ports) is (transport == "tcp")
    seen = bytes(grpc_port.seen) + b"".join(bytes(each.seen) for each in data_ports)
    assert len(seen) > 2 * sum(map(len, blocks))
    for block in blocks:
        for at in range(0, len(block), 4_096):
            assert block[at : at + 16].tobytes() not in seen
    for each in (grpc_port, *data_ports):
        each.close()
