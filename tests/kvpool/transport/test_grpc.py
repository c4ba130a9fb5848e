import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import InvalidRequestError, LeaseExpiredError, PoolTimeoutError
from kvpool.transport.base import Buffers, Local, Transfer
from kvpool.transport.grpc import GrpcTransport
from tests.conftest import Connect, StartServer
from tests.contracts.transport_contract import (
    DEADLINE_S,
    REGION_BYTES,
    Rig,
    ServerRegions,
    TransportContract,
    fill_payloads,
    never,
)
from tests.support.faults import stopped
from tests.support.processes import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One without a data port: all bytes go through gRPC."""
    flags = ("--memory", "64MiB", "--grace-ms", "100", "--data-listen", "")
    server = ServerProcess(tmp_path_factory.mktemp("grpc"), *flags)
    yield server
    server.stop()


@pytest.fixture
def rig(server: ServerProcess, connect: Connect) -> Iterator[Rig]:
    regions = ServerRegions(connect(server, transport="grpc"))
    transport = regions.open(256).transport
    assert isinstance(transport, GrpcTransport)
    yield Rig(transport, regions)
    regions.give_back()


class TestContract(TransportContract):
    pass


def test_tickets_and_leases_that_are_not_live_move_nothing(rig: Rig) -> None:
    with pytest.raises(LeaseExpiredError, match=r"ticket 0x7b is not live.*put_start again"):
        rig.transport.write(Transfer(123, (0,), REGION_BYTES, DEADLINE_S, 1), Local(fill_payloads))
    with pytest.raises(LeaseExpiredError, match=r"lease 0x7b is not live.*look up again"):
        rig.transport.read(Transfer(123, (0,), REGION_BYTES, DEADLINE_S, 1), Local(never))


@pytest.mark.parametrize("shift", [-1, 1, REGION_BYTES, 1 << 40])
def test_bytes_beside_the_tickets_regions_are_refused(rig: Rig, shift: int) -> None:
    regions = rig.regions(3, REGION_BYTES)
    middle = regions.offsets[1]
    outside = middle + shift if shift != REGION_BYTES else max(regions.offsets) + REGION_BYTES
    with pytest.raises(InvalidRequestError, match=rf"\[{outside}, {outside + REGION_BYTES}\) is in no region"):
        rig.transport.write(Transfer(regions.ticket_id, (outside,), REGION_BYTES, DEADLINE_S, 1), Local(fill_payloads))


def test_bytes_beside_the_leased_blocks_are_refused(rig: Rig) -> None:
    ours, theirs = rig.regions(1, REGION_BYTES), rig.regions(1, REGION_BYTES)

    for regions in (ours, theirs):
        rig.transport.write(
            Transfer(regions.ticket_id, regions.offsets, REGION_BYTES, DEADLINE_S, 1), Local(fill_payloads)
        )
    lease_id = ours.seal()
    theirs.seal()
    with pytest.raises(InvalidRequestError, match="is in no block of lease"):
        rig.transport.read(Transfer(lease_id, theirs.offsets, REGION_BYTES, DEADLINE_S, 1), Local(never))
    with pytest.raises(InvalidRequestError, match="is in no block of lease"):
        rig.transport.read(Transfer(lease_id, (ours.offsets[0] + 1,), REGION_BYTES, DEADLINE_S, 1), Local(never))


def test_nothing_is_filled_once_a_write_has_ended(rig: Rig) -> None:
    """gRPC's own thread may be in `fill` when the deadline passes; until it is out, its buffers are in use."""
    regions = rig.regions(3, REGION_BYTES)
    inside = threading.Event()
    calls: list[int] = []

    def slow(first: int, buffers: Buffers) -> None:
        inside.set()
        calls.append(first)
        time.sleep(0.5)
        inside.clear()

    with pytest.raises(PoolTimeoutError):
        rig.transport.write(Transfer(regions.ticket_id, regions.offsets, REGION_BYTES, 0.2, 1), Local(slow))
    assert not inside.is_set()
    filled = len(calls)
    time.sleep(0.6)  # As long as another fill would take to begin and end.
    assert len(calls) == filled


def test_a_read_that_stands_still_is_given_up_long_before_its_deadline(pool_server: StartServer) -> None:
    server = pool_server("--memory", "64MiB", "--data-listen", "")
    region_bytes, count = 1 << 20, 32  # Far more than is on its way at any time.
    config = ClientConfig(server.endpoint, transport="grpc", stall_timeout_ms=200)
    with Client(config) as client, ExitStack() as stack:
        regions = ServerRegions(client)
        held = regions(count, region_bytes)
        lease_id = held.seal()  # Nobody looks at what the bytes are.
        seen: list[int] = []

        def drain(first: int, buffers: Buffers) -> None:
            if not seen:
                stack.enter_context(stopped(server))
            seen.append(first)

        transport = regions.open(1).transport
        started = time.monotonic()
        with pytest.raises(PoolTimeoutError, match=r"sent nothing for 0\.200 s"):
            transport.read(Transfer(lease_id, held.offsets, region_bytes, 60.0, 1), Local(drain))
        assert len(seen) < count and time.monotonic() - started < 10
