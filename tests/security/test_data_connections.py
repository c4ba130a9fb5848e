"""Connections to the data port that want nothing but its room. `test_admission.py` has the rules."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.transport.data_port import Header, Kind, Status, pack_offsets
from kvpool_server.data_plane import worker
from tests.conftest import Connect, StartServer
from tests.support.data_client import DataClient
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, payload, run_of
from tests.support.workers import Port, data_port

MIB = 1 << 20
NUM_SILENT = 300
PROVE_S = 0.5


@pytest.fixture
def server(pool_server: StartServer) -> ServerProcess:
    return pool_server("--memory", "64MiB", "--data-workers", "1")


def _put_and_get(client: Client, name: object) -> None:
    """Over TCP; raises if that fails."""
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=MIB)))
    assert namespace.transport.name == "tcp"
    client.put_blocks(namespace, run_of(name), [payload(name, MIB)])
    found = client.lookup(namespace, [run_of(name)])
    (block,) = client.get_blocks(namespace, found.lease_id, run_of(name))
    assert block is not None and np.array_equal(block, payload(name, MIB))
    client.release([found.lease_id])


def _address(client: Client) -> tuple[str, int]:
    return "127.0.0.1", client.rpc.open_namespace(namespace_spec()).data_port.port


@contextmanager
def _silent(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)]


def test_silent_connections_keep_nobody_from_the_data_port(server: ServerProcess, connect: Connect) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > NUM_SILENT + 100, "this test needs more file descriptors"
    before = connect(server, transport="network")
    _put_and_get(before, "before")
    with _silent(_address(before), NUM_SILENT):
        _put_and_get(before, "during")
        _put_and_get(connect(server, transport="network"), "a new client during the flood")
    _put_and_get(connect(server, transport="network"), "after")


@pytest.fixture
def port() -> Iterator[Port]:
    with data_port(MIB) as port:
        yield port


@pytest.fixture
def impatient_port(monkeypatch: pytest.MonkeyPatch, port: Port) -> Port:
    """A port that soon hangs up on a client that has shown no permit."""
    monkeypatch.setattr(worker, "PROVE_S", PROVE_S)
    return port


def _client(port: Port) -> DataClient:
    return DataClient(port.info.port, port.info.nonce)


def _trickle(client: DataClient, sent: bytes) -> None:
    """Sends bytes one by one, slowly, until the worker hangs up."""
    for nth in range(len(sent)):
        client.socket.sendall(sent[nth : nth + 1])
        time.sleep(PROVE_S / 20)
    raise AssertionError("the worker listened to the last byte")


def test_a_client_without_a_permit_is_hung_up_on(impatient_port: Port) -> None:
    with _client(impatient_port) as client:
        assert client.socket.recv(1) == b""


@pytest.mark.parametrize("num_offsets", [1, 30], ids=["in the header", "in the offsets"])
def test_a_permit_that_trickles_is_not_waited_for(impatient_port: Port, num_offsets: int) -> None:
    port = impatient_port
    offsets = list(range(num_offsets))
    permit = port.permit(Kind.READ, 1, offsets, 64)
    header = Header(Kind.READ, 0, num_offsets, 64, holding_id=1, permit=permit).encode()
    with _client(port) as client:
        if num_offsets > 1:
            client.socket.sendall(header)
            header = b""
        with pytest.raises(ConnectionError):
            _trickle(client, header + pack_offsets(offsets).tobytes())


def test_a_permit_that_has_ended_proves_nothing(port: Port) -> None:
    permit = port.permit(Kind.READ, 1, [0], 64)
    port.permits.end(1)
    with _client(port) as client:
        client.show(Kind.READ, 1, [0], 64, permit)
        assert client.reply() is Status.EXPIRED


def test_a_client_with_a_permit_may_pause(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PROVE_S", 4 * PROVE_S)  # A busy machine may pause before the permit is shown.
    with _client(port) as client:
        client.show(Kind.READ, 1, [0], 64, port.permit(Kind.READ, 1, [0], 64))
        time.sleep(5 * PROVE_S)
        client.move(0, 1, 64)
        assert client.reply() is Status.OK


@pytest.mark.parametrize("stalls", ["before the offsets", "in a write", "in a read"])
def test_a_client_that_stalls_makes_room_for_another(stalls: str) -> None:
    nbytes = 64 * MIB  # More than the sockets' buffers hold.
    kind = Kind.READ if stalls == "in a read" else Kind.WRITE
    with data_port(nbytes, max_connections=1) as port, _client(port) as stalled:
        stalled.show(kind, 1, [0], nbytes, port.permit(kind, 1, [0], nbytes))
        if stalls == "before the offsets":
            permit = port.permit(kind, 2, [0], nbytes)
            stalled.socket.sendall(Header(kind, 0, 1, nbytes, holding_id=2, permit=permit).encode())
        else:
            stalled.move(0, 1, nbytes)
        ends_at = time.monotonic() + worker.STALL_S / 2
        while not _is_served(port):
            assert time.monotonic() < ends_at
            time.sleep(0.1)


def _is_served(port: Port) -> bool:
    """Whether a new client gets bytes."""
    try:
        with _client(port) as client:
            client.show(Kind.READ, 3, [0], 64, port.permit(Kind.READ, 3, [0], 64))
            client.move(0, 1, 64)
            return client.reply() is Status.OK
    except ConnectionRefusedError:
        return False
