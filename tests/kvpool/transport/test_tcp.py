"""The `tcp` transport: the contract with one connection and with several, and whatever goes wrong."""

from __future__ import annotations

import ipaddress
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client import transport_choice as choice
from kvpool.client.block_io import InPlace
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import (
    InvalidRequestError,
    PoolTimeoutError,
    TransferError,
    UnavailableError,
)
from kvpool.transport import tcp_connection
from kvpool.transport.base import Buffers, Local, Transfer
from kvpool.transport.data_port import GREETING_BYTES, MAGIC, REPLY_BYTES, Header, Kind, Reply, Status
from kvpool.transport.data_port import pack_offsets as pack
from kvpool.transport.tcp import TcpTransport
from kvpool.transport.tcp_connection import Peer
from tests.conftest import Connect, StartServer
from tests.contracts.transport_contract import DEADLINE_S, Regions, Rig, TransportContract, never
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of
from tests.support.workers import Permitted, Port, data_port, is_worker, workers_of, workers_stopped

MIB = 1 << 20


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.more)], ids=["plain", "sealed"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    with data_port(sealed=request.param) as port:
        yield port


@pytest.fixture(scope="module")
def plain_port() -> Iterator[Port]:
    """For tests that speak the protocol themselves."""
    with data_port() as port:
        yield port


@pytest.fixture(params=[1, 3])
def num_connections(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def rig(port: Port, num_connections: int) -> Iterator[Rig]:
    ids, at = itertools.count(1), itertools.count(0, 4 * MIB)

    def regions(num_regions: int, region_bytes: int) -> Regions:
        # Every other one has a gap before it, so that some are neighbours and some are not.
        start = next(at) if num_regions * region_bytes < 3 * MIB else 16 * MIB
        offsets = tuple(start + nth * region_bytes + nth // 2 * 8 for nth in range(num_regions))
        return Regions(next(ids), offsets, lambda: next(ids))

    with closing(port.connect(num_connections)) as transport:
        yield Rig(Permitted(transport, port), regions)


class TestContract(TransportContract):
    pass


def _ignore(first: int, buffers: Buffers) -> None:
    pass


@pytest.fixture
def transport(port: Port, num_connections: int) -> Iterator[TcpTransport]:
    with closing(port.connect(num_connections)) as transport:
        yield transport


def test_regions_beyond_the_arena_are_refused_even_with_a_permit(port: Port, transport: TcpTransport) -> None:
    for offset in (len(port.arena) - 63, 1 << 63, (1 << 64) - 1):
        permit = port.permit(Kind.READ, 1, [offset], 64)
        with pytest.raises(InvalidRequestError, match="beyond the arena"):
            transport.read(Transfer(1, [offset], 64, DEADLINE_S, MIB, permit), Local(never))


def test_nothing_is_written_once_a_permit_has_expired_on_the_way(plain_port: Port) -> None:
    """A client that stops in the middle, as one that was stopped would: what it sends afterwards goes nowhere."""
    plain_port.arena[: 2 * MIB] = 0
    with _greeted(plain_port) as client:
        expires_at = time.monotonic() + 2.0
        client.sendall(_shown(plain_port, Kind.WRITE, [0], 2 * MIB, ttl_s=2.0))
        client.sendall(Header(Kind.MOVE, 0, 1, 2 * MIB).encode())
        client.sendall(bytes([1]) * MIB)
        wait_for(lambda: plain_port.arena[MIB - 1] == 1, "the first half to be written")
        time.sleep(max(0.0, expires_at - time.monotonic()) + 0.2)
        client.sendall(bytes([1]) * MIB)
        assert _reply(client) is Status.EXPIRED
    assert set(plain_port.arena[:MIB]) == {1} and set(plain_port.arena[MIB : 2 * MIB]) == {0}


def _greeted(port: Port) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port.info.port), timeout=10)
    assert client.recv(GREETING_BYTES, socket.MSG_WAITALL) == MAGIC + port.info.nonce
    return client


def _shown(port: Port, kind: Kind, offsets: list[int], region_bytes: int, ttl_s: float = 60.0) -> bytes:
    permit = port.permit(kind, 1, offsets, region_bytes, ttl_s)
    return Header(kind, 0, len(offsets), region_bytes, holding_id=1, permit=permit).encode() + pack(offsets).tobytes()


def _reply(client: socket.socket) -> Status:
    return Reply.decode(client.recv(REPLY_BYTES, socket.MSG_WAITALL))[0]


def test_too_many_connections_are_told_that_there_is_no_room(num_connections: int) -> None:
    with data_port(MIB, max_connections=1) as port, closing(port.connect(num_connections)) as transport:
        permit = port.permit(Kind.READ, 1, [0], 64)
        with _greeted(port) as busy:
            busy.sendall(_shown(port, Kind.WRITE, [0], 64) + Header(Kind.MOVE, 0, 1, 64).encode())
            wait_for(lambda: 1 in port.permits.active(), "the other's write to begin")
            with pytest.raises(UnavailableError, match="accepts no more connections; raise --data-workers"):
                transport.read(Transfer(1, [0], 64, DEADLINE_S, MIB, permit), Local(never))
        wait_for(lambda: _moves(port, transport), "room, once the other has gone")


def _moves(port: Port, transport: TcpTransport) -> bool:
    try:
        transport.read(Transfer(1, [0], 64, DEADLINE_S, MIB, port.permit(Kind.READ, 1, [0], 64)), Local(_ignore))
    except UnavailableError:
        return False
    return True


def test_connections_are_kept_and_replaced_when_they_have_ended_or_were_idle_for_long(
    port: Port, transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    connect = Peer.connect

    def noted(peer: Peer, timeout_s: float) -> tuple[socket.socket, bytes]:
        fresh = connect(peer, timeout_s)
        made.append(fresh[0])
        return fresh

    monkeypatch.setattr(Peer, "connect", noted)
    permit = port.permit(Kind.READ, 1, [0], 64)
    for _ in range(3):
        transport.read(Transfer(1, [0], 64, DEADLINE_S, MIB, permit), Local(_ignore))
    assert len(made) == 1
    made[0].shutdown(socket.SHUT_RDWR)  # As if the peer had ended it.
    transport.read(Transfer(1, [0], 64, DEADLINE_S, MIB, permit), Local(_ignore))
    assert len(made) == 2
    monkeypatch.setattr(tcp_connection, "IDLE_S", 0.0)
    transport.read(Transfer(1, [0], 64, DEADLINE_S, MIB, permit), Local(_ignore))
    assert len(made) == 3


def test_nothing_is_left_of_a_closed_transport(port: Port, num_connections: int) -> None:
    def left() -> tuple[int, int]:
        threads = sum(thread.name.startswith("kvpool-helper") for thread in threading.enumerate())
        return threads, _connections_to(port.info.port)

    wait_for(lambda: left() == (0, 0), "channels of other tests to end")
    transport = port.connect(num_connections)
    offsets = list(range(0, 8 * MIB, MIB))
    transport.read(Transfer(1, offsets, MIB, DEADLINE_S, MIB, port.permit(Kind.READ, 1, offsets, MIB)), Local(_ignore))
    threads, connections = left()
    assert 1 <= connections <= num_connections and bool(threads) is (num_connections > 1)
    transport.close()
    wait_for(lambda: left() == (0, 0), "its threads and sockets to be gone")
    with pytest.raises(TransferError, match="is closed"):
        transport.read(Transfer(1, [0], 64, DEADLINE_S, MIB, port.permit(Kind.READ, 1, [0], 64)), Local(never))


def _connections_to(port: int) -> int:
    """Established connections of this machine to a port, see proc_net(5), which may list one twice."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return len({row[1] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"})


def test_closing_ends_calls_under_way(port: Port, num_connections: int) -> None:
    transport = port.connect(num_connections)
    offsets = list(range(0, 32 * MIB, MIB))
    permit = port.permit(Kind.READ, 1, offsets, MIB)
    with pytest.raises((TransferError, UnavailableError)):
        transport.read(Transfer(1, offsets, MIB, DEADLINE_S, MIB, permit), Local(lambda *_: transport.close()))


@pytest.fixture
def server(pool_server: StartServer) -> ServerProcess:
    return pool_server("--memory", "64MiB", "--data-workers", "2", "--grace-ms", "3600000")


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients have as many connections as on many cores."""
    monkeypatch.setattr(choice, "movers_of", lambda num_cores, sharers: 3)


class Stored:
    """A client, and 24 blocks of 1 MiB that it has put."""

    def __init__(self, client: Client):
        self.client = client
        self.namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=MIB)))
        self.run = run_of(*range(24))
        client.put_blocks(self.namespace, self.run, [payload(idx, MIB) for idx in range(24)])

    def get(self, drain: object) -> None:
        lease_id = self.client.lookup(self.namespace, [self.run]).lease_id
        self.client.get(self.namespace, lease_id, [self.run], drain, batch_bytes=MIB)  # type: ignore[arg-type]

    def check(self) -> bool:
        """Whether what is got is what was put; False while nobody serves."""
        seen: list[bytes] = []
        try:
            self.get(lambda _, buffers: seen.extend(buffer.tobytes() for buffer in buffers))
        except (TransferError, UnavailableError, PoolTimeoutError):
            return False
        assert seen == [payload(idx, MIB).tobytes() for idx in range(24)]
        return True


@pytest.mark.usefixtures("on_cores")
def test_workers_that_die_in_the_middle_are_an_error_and_are_replaced(server: ServerProcess, connect: Connect) -> None:
    stored = Stored(connect(server, transport="tcp"))
    before = workers_of(server)
    assert len(before) == 2

    def drain(indices: list[int], buffers: Buffers) -> None:
        if indices[0] == 2:
            for pid in before:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises((TransferError, UnavailableError)):
        stored.get(drain)
    wait_for(stored.check, "the next workers")
    wait_for(lambda: len(workers_of(server)) == 2, "both of them")
    assert not {*before} & {*workers_of(server)}
    wait_for(lambda: server.stderr.count("a data worker died") == 2, "the log to tell of both")


@pytest.mark.usefixtures("on_cores")
def test_a_server_that_stops_leaves_no_worker_not_even_one_that_is_stopped(server: ServerProcess) -> None:
    workers = workers_of(server)
    os.kill(workers[0], signal.SIGSTOP)
    server.terminate()
    assert server.wait() == 0
    assert not any(map(is_worker, workers))
    assert "Traceback" not in server.stderr


@pytest.mark.usefixtures("on_cores")
def test_stopped_workers_end_reads_when_they_stand_still_and_writes_at_their_deadline(
    server: ServerProcess, connect: Connect
) -> None:
    stored = Stored(connect(server, transport="tcp"))
    client = connect(server, transport="tcp", stall_timeout_ms=300, data_timeout_ms=2_000)
    namespace = client.open_namespace(stored.namespace.spec)
    lease_id = client.lookup(namespace, [stored.run]).lease_id
    arrays = [np.full(MIB, 0xEE, np.uint8) for _ in range(24)]
    with workers_stopped(server):
        with pytest.raises((PoolTimeoutError, UnavailableError), match=r"sent nothing for 0\.300 s|no answer"):
            client.get(namespace, lease_id, [stored.run], InPlace(arrays))
        for array in arrays:
            array[:] = 0xEE  # They are the caller's own again.
        started = time.monotonic()
        run = run_of(*range(100, 124))
        with pytest.raises((PoolTimeoutError, UnavailableError)):
            client.put(namespace, [run], lambda _, buffers: None)
        assert time.monotonic() - started < DEADLINE_S
    wait_for(stored.check, "the workers to go on")
    assert all((array == 0xEE).all() for array in arrays), "the get wrote after its end"
    wait_for(lambda: client.admin.stats().counters["revoked_tickets"] == 1, "the ticket to be revoked")
    wait_for(lambda: client.admin.stats().num_quarantined == 0, "the workers to leave the slots of the failed put")


def test_a_port_that_does_not_answer_means_grpc_and_ping_says_why(server: ServerProcess, connect: Connect) -> None:
    choice = connect(server, transport="network").admin.try_transport()
    with closing(choice.transport):
        assert choice.route.startswith("tcp over the data port 127.0.0.1:") and not choice.is_fallback
    with workers_stopped(server):
        choice = connect(server, transport="network", stall_timeout_ms=300).admin.try_transport()
    assert choice.transport.name == "grpc"
    assert choice.is_fallback and "no answer in time" in choice.route
    assert choice.route.startswith("grpc (slow: cannot reach the data port 127.0.0.1:")


def test_a_data_port_elsewhere_is_told_and_none_means_grpc(pool_server: StartServer, connect: Connect) -> None:
    elsewhere = pool_server("--data-listen", "127.0.0.2:0")
    assert "over the data port 127.0.0.2:" in connect(elsewhere, transport="tcp").admin.try_transport().route
    server = pool_server("--data-listen", "")
    choice = connect(server, transport="network").admin.try_transport()
    assert choice.is_fallback and choice.transport.name == "grpc"
    assert choice.route == "grpc (slow: the server has no data port; see --data-listen)"
    assert (
        choice.why == "no mooncake: the server offers no RDMA; no tcp: the server has no data port; see --data-listen"
    )
    with pytest.raises(TransferError, match="the server has no data port"):
        connect(server, transport="tcp").admin.try_transport()
    asked = connect(server, transport="grpc").admin.try_transport()
    assert (asked.route, asked.why, asked.is_fallback) == ("grpc", "transport=grpc", False)


def test_a_port_that_is_another_servers_is_found_out(port: Port) -> None:
    with pytest.raises(TransferError, match="belongs to another server"):
        Peer("127.0.0.1", port.info.port, bytes(range(16)), 5.0).connect(5.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnavailableError, match="no answer in time"):
        Peer(*silent.getsockname(), port.info.nonce, 5.0).connect(0.1)
    with pytest.raises(UnavailableError, match="Connection refused"):
        Peer("127.0.0.1", 1, port.info.nonce, 5.0).connect(5.0)


def test_no_transfer_waits_for_a_name_server(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolution of a name has no deadline; the client resolves the endpoint's when it attaches."""
    resolve = socket.getaddrinfo

    def only_addresses(host: str, *options: Any, **named: Any) -> Any:
        assert ipaddress.ip_address(host)
        return resolve(host, *options, **named)

    endpoint = server.endpoint.replace("127.0.0.1", "localhost")
    with Client(ClientConfig(endpoint, transport="tcp", timeout_ms=10_000)) as client:
        stored = Stored(client)
        monkeypatch.setattr(socket, "getaddrinfo", only_addresses)
        monkeypatch.setattr(tcp_connection, "IDLE_S", 0.0)  # Each transfer connects anew.
        assert stored.check()
