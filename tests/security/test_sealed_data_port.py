"""An encrypted data port: nobody between reads or changes a byte, and a permit is useless without its key."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError
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
from tests.conftest import StartServer
from tests.support.certificates import files_in, server_flags
from tests.support.data_client import receive_exactly
from tests.support.recorder import Recorder
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


def test_a_byte_that_is_changed_on_the_way_is_an_error_or_nothing(port: Port) -> None:
    dice = random.Random(3)
    data = np.frombuffer(dice.randbytes(64 << 10), np.uint8)
    for number in range(80):
        is_write, is_client = number % 4 == 0, bool(number % 2) or number % 4 == 0
        port.arena[: len(data)] = 0 if is_write else data
        kind, found = (Kind.WRITE, data) if is_write else (Kind.READ, np.zeros_like(data))
        transfer = Transfer(1, [0], len(data), 5.0, MIB, port.permit(kind, 1, [0], len(data)))
        most = 120 if is_client and not is_write else 66_000
        changed_at = dice.randrange(0, most) if number else 1 << 30  # All bytes of the first transfer arrive.
        recorder = Recorder(f"127.0.0.1:{port.info.port}", (is_client, changed_at))
        peer = Peer("127.0.0.1", recorder.server_address[1], NONCE, 2.0, sealed=True)
        with recorder, closing(TcpTransport(peer, 1)) as transport:
            try:
                if is_write:
                    transport.write(transfer, Local(rows=[[found]]))
                else:
                    transport.read(transfer, Local(rows=[[found]]))
            except KVPoolError:
                assert number and not (is_write and port.arena[: len(data)].any())
                continue
            finally:
                recorder.shutdown()
            assert np.array_equal(found, data) and np.array_equal(port.arena[: len(data)], data)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_recorder_on_every_port_finds_no_byte_of_a_block(
    pool_server: StartServer, tmp_path: Path, transport: str
) -> None:
    authority = Authority.create(tmp_path / "pki")
    operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
    engine = files_in(authority.issue_principal(Principal("acme", Role.ENGINE_WRITE)))
    server = pool_server("--memory", "16MiB", *server_flags(authority.issue_server([])), tls=operator)
    recorders = [Recorder(server.endpoint)]
    names = [f"secret {number}" for number in range(4)]
    blocks, run = [payload(name, 256 << 10) for name in names], run_of(*names)
    spec = namespace_spec(group_spec(chunk_bytes=256 << 10), tenant="acme", model="secret/model")

    with pytest.MonkeyPatch.context() as patch:
        connect = Peer.connect

        def through(peer: Peer, timeout_s: float) -> tuple[socket.socket, bytes]:
            recorders.append(Recorder(f"127.0.0.1:{peer.port}"))
            return connect(dataclasses.replace(peer, port=recorders[-1].server_address[1]), timeout_s)

        patch.setattr(Peer, "connect", through)
        config = ClientConfig(recorders[0].endpoint, transport, timeout_ms=10_000, data_timeout_ms=10_000, tls=engine)
        with Client(config) as client:
            namespace = client.open_namespace(spec)
            client.put_blocks(namespace, run, blocks)
            found = client.lookup(namespace, [run])
            loaded = client.get_blocks(namespace, found.lease_id, run)
            assert [bytes(each) for each in loaded] == [block.tobytes() for block in blocks]
    assert len(recorders) > 1 or transport == "grpc"
    for each in recorders:
        each.shutdown()
        each.server_close()
    seen = b"".join(bytes(each.seen) for each in recorders)
    assert len(seen) > 2 * sum(map(len, blocks))
    parts = [block[at : at + 16].tobytes() for block in blocks for at in range(0, len(block), 4_096)]
    for secret in (*parts, b"secret/model", b"/kvpool/acme/", *(name[:16] for name in run.block_hashes)):
        assert secret not in seen
