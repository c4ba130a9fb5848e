"""The `mooncake` transport over real engines: this process's, and a kvpool-server's, over TCP on loopback."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.transport_choice import choose
from kvpool.protocol.errors import ConfigError, PoolTimeoutError, TransferError, UnavailableError
from kvpool.transport import mooncake
from kvpool.transport.base import Buffers, Clock, Local, Transfer
from kvpool.transport.mooncake import MooncakeTransport
from kvpool.transport.mooncake_engine import RDMA_DEVICES, Engine
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import Connect, StartServer
from tests.contracts.transport_contract import (
    DEADLINE_S,
    REGION_BYTES,
    Regions,
    Rig,
    ServerRegions,
    TransportContract,
    never,
    read_bytes,
)
from tests.support.clock import FakeClock
from tests.support.faults import stopped
from tests.support.processes import ServerProcess, run_command, wait_for
from tests.support.values import group_spec, namespace_spec, run_of

pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine is not installed", exc_type=ImportError)

MIB = 1 << 20
FLAGS = ("--memory", "64MiB", "--grace-ms", "100", "--mooncake", "tcp", "--mooncake-trusted-network")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("mooncake"), *FLAGS)
    yield server
    server.stop()


@pytest.fixture
def start_server(pool_server: StartServer) -> StartServer:
    def start(*flags: str, **options: str) -> ServerProcess:
        return pool_server(*FLAGS, *flags, **options)

    return start


def _transport(regions: ServerRegions) -> MooncakeTransport:
    transport = regions.open(256).transport
    assert isinstance(transport, MooncakeTransport)
    return transport


@pytest.fixture
def rig(server: ServerProcess, connect: Connect) -> Iterator[Rig]:
    regions = ServerRegions(connect(server, transport="mooncake"))
    yield Rig(_transport(regions), regions)
    regions.give_back()


class TestContract(TransportContract):
    pass


@contextmanager
def _frozen(server: ServerProcess) -> Iterator[None]:
    """Stopped, and every thread of it has noticed."""
    with stopped(server):
        tasks = Path(f"/proc/{server.pid}/task")
        wait_for(
            lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()), "all threads to have stopped"
        )
        yield


def _moves(transport: MooncakeTransport, held: Regions) -> bool:
    """Whether a read succeeds. A server that was stopped may be slow to catch up on a busy machine."""
    try:
        transport.read(Transfer(1, held.offsets, MIB, DEADLINE_S, MIB), Local(lambda *_: None))
    except PoolTimeoutError:
        return False
    return True


@contextmanager
def _another(
    rig: Rig, stall_timeout_s: float = 5.0, clock: Clock = time.monotonic, **change: object
) -> Iterator[MooncakeTransport]:
    """A transport with an engine of its own to the rig's server, or to one whose `info` differs."""
    assert isinstance(rig.transport, MooncakeTransport)
    info = pb.MooncakeEngine()
    info.MergeFrom(rig.transport.info)
    info.MergeFrom(pb.MooncakeEngine(**change))
    with closing(MooncakeTransport(info, Engine("127.0.0.1", "tcp"), stall_timeout_s, clock)) as transport:
        yield transport


def test_a_region_beyond_the_arena_is_refused_before_any_byte_moves(rig: Rig) -> None:
    with pytest.raises(TransferError, match=r"beyond the arena's 67108864 bytes"):
        rig.transport.write(Transfer(1, (0, 64 * MIB - 9), 10, DEADLINE_S, MIB), Local(never))


def test_a_writer_that_was_stopped_for_longer_than_its_deadline_writes_no_more(rig: Rig) -> None:
    regions, clock = rig.regions(2, REGION_BYTES), FakeClock()

    def fill(first: int, buffers: Buffers) -> None:
        assert first == 0, "it went on after its deadline"
        for buffer in buffers:
            buffer[:] = 77
        clock.advance(60)  # SIGSTOP, a debugger, a machine that was suspended.

    held = Transfer(1, regions.offsets, REGION_BYTES, DEADLINE_S, MIB)
    before = read_bytes(rig.transport, held)
    with _another(rig, 1.0, clock) as transport, pytest.raises(PoolTimeoutError, match=r"more than 5\.000 s"):
        transport.write(Transfer(1, regions.offsets, REGION_BYTES, 5.0, REGION_BYTES), Local(fill))
    assert read_bytes(rig.transport, held) == before


def test_a_region_larger_than_the_registered_memory_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "STAGING_BYTES", MIB)
    with _another(rig) as transport, pytest.raises(TransferError, match="a batch of 1048577 bytes is larger than"):
        transport.read(Transfer(1, [0], MIB + 1, DEADLINE_S), Local(never))


def test_a_server_killed_in_the_middle_of_a_read_is_an_error_within_the_deadline(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    regions = ServerRegions(connect(server, transport="mooncake", stall_timeout_ms=5_000))
    transport, held = _transport(regions), regions(24, MIB)
    seen: list[int] = []

    def drain(first: int, buffers: Buffers) -> None:
        seen.append(first)
        if first == 4:
            server.kill()

    started = time.monotonic()
    with pytest.raises((UnavailableError, TransferError)):
        transport.read(Transfer(1, held.offsets, MIB, DEADLINE_S, MIB), Local(drain))
    assert time.monotonic() - started < DEADLINE_S
    assert 4 in seen and len(seen) < 24
    with pytest.raises((UnavailableError, TransferError)):
        transport.read(Transfer(1, held.offsets, MIB, DEADLINE_S, MIB), Local(never))


def test_a_read_that_stands_still_is_given_up_and_its_buffers_are_nobodys_until_it_ends(
    start_server: StartServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    monkeypatch.setattr(mooncake, "STAGING_BYTES", MIB)  # Of one call.
    regions = ServerRegions(connect(server, transport="mooncake", stall_timeout_ms=200))
    transport, held = _transport(regions), regions(8, MIB)
    with _frozen(server):
        started = time.monotonic()
        with pytest.raises(PoolTimeoutError, match=r"sent nothing for 0\.200 s"):
            transport.read(Transfer(1, held.offsets, MIB, 60.0, MIB), Local(never))
        assert time.monotonic() - started < 10
        with pytest.raises(PoolTimeoutError, match=r"held all 1048576 bytes"):
            transport.read(Transfer(1, held.offsets, MIB, 0.5, MIB), Local(never))
    wait_for(lambda: _moves(transport, held), "what was given up to end")


LEAVES_IN_THE_MIDDLE = """
import sys
from kvpool.client.client import Client
from kvpool.transport.base import Local, Transfer
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import PoolTimeoutError
import os, signal

client = Client(ClientConfig(sys.argv[1], transport="mooncake", stall_timeout_ms=200))
transport = client.admin.try_transport().transport
os.kill(int(sys.argv[2]), signal.SIGSTOP)
try:
    transport.read(Transfer(1, range(0, 32 << 20, 1 << 20), 1 << 20, 10.0, 1 << 20), Local(lambda *_: None))
except PoolTimeoutError:
    print("given up")
"""


def test_a_process_may_end_while_transfers_that_it_gave_up_go_on(start_server: StartServer) -> None:
    server = start_server()
    try:
        done = run_command(sys.executable, "-c", LEAVES_IN_THE_MIDDLE, server.endpoint, str(server.pid))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr


def test_a_write_that_was_given_up_keeps_its_slots_from_others(start_server: StartServer, connect: Connect) -> None:
    server = start_server("--grace-ms", "3600000")
    client = connect(server, transport="mooncake", data_timeout_ms=300, ticket_ttl_ms=1_000)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=8 * MIB)))

    with ExitStack() as stack:

        def fill(indices: Sequence[int], buffers: Buffers) -> None:
            stack.enter_context(_frozen(server))

        with pytest.raises(PoolTimeoutError):
            client.put(namespace, [run_of("a")], fill)
    wait_for(lambda: client.admin.stats().num_quarantined == 1, "the slot to be in quarantine")
    assert not client.admin.stats().counters.get("revoked_tickets")


def test_an_engine_that_does_not_answer_at_first_contact_is_an_error_within_the_deadline(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    info = _transport(ServerRegions(connect(server, transport="mooncake"))).info
    transport = MooncakeTransport(info, Engine("127.0.0.1", "tcp"), 1.0)
    with _frozen(server), pytest.raises(PoolTimeoutError, match=r"did not answer within 0\.500 s"):
        transport.prove(0.5)
    transport.close()
    with pytest.raises(TransferError, match="is closed"):
        transport.read(Transfer(1, (0,), 10, DEADLINE_S, MIB), Local(never))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"nonce": bytes(16)}, TransferError),
        ({"base_address": 4096}, TransferError),
        ({"session": "127.0.0.1:1"}, UnavailableError),
    ],
)
def test_an_engine_that_does_not_reach_the_servers_memory_is_found_out(
    rig: Rig, change: dict[str, object], error: type[Exception]
) -> None:
    with _another(rig, 1.0, **change) as transport, pytest.raises(error):
        transport.prove(DEADLINE_S)


def test_a_server_without_an_engine_says_how_to_get_one(shared_server: ServerProcess, connect: Connect) -> None:
    with pytest.raises(TransferError, match="has no Transfer Engine; start it with --mooncake tcp"):
        connect(shared_server, transport="mooncake").open_namespace(namespace_spec())


def test_auto_goes_on_without_rdma_where_only_the_server_has_it(rig: Rig, server: ServerProcess) -> None:
    assert isinstance(rig.transport, MooncakeTransport)
    if RDMA_DEVICES.is_dir():
        pytest.skip("this machine has RDMA")
    offer = pb.PingResponse(piece_bytes=1, mooncake=rig.transport.info)
    offer.mooncake.protocol = "rdma"
    with grpc.insecure_channel(server.endpoint) as channel:
        choice = choose(ClientConfig(server.endpoint), offer, channel)
        assert choice.transport.name == "grpc" and "no mooncake: no RDMA device in" in choice.why
        with pytest.raises(ConfigError, match="no RDMA device in"):
            choose(ClientConfig(server.endpoint, transport="mooncake"), offer, channel)
