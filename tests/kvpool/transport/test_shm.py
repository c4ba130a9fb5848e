import errno
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.protocol.errors import PoolTimeoutError, TransferError
from kvpool.transport import shm, tcp
from kvpool.transport.base import Buffers, Local, Pieces, Transfer
from kvpool.transport.segment import Segment
from kvpool.transport.shm import MIN_SHARED_BYTES, ShmTransport
from tests.conftest import Connect
from tests.contracts.transport_contract import Rig, Seen, ServerRegions, TransportContract, fill_payloads, never
from tests.support.clock import FakeClock
from tests.support.processes import ServerProcess
from tests.support.values import payload


class TestContract(TransportContract):
    @pytest.fixture(params=[1, 3])
    def rig(self, request: pytest.FixtureRequest, shm_client: Client) -> Iterator[Rig]:
        regions, clock = ServerRegions(shm_client), FakeClock()
        opened = regions.open(256).transport
        assert isinstance(opened, ShmTransport)
        transport = ShmTransport(opened.segment, request.param, clock)
        yield Rig(transport, regions, clock.advance)
        regions.give_back()


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(1 << 16)
    yield made
    made.close()


@pytest.mark.parametrize("offset", [(1 << 16) - 9, 1 << 16, 1 << 60])
def test_a_region_beyond_the_segment_is_refused_before_any_byte_moves(segment: Segment, offset: int) -> None:
    with pytest.raises(TransferError, match=rf"ends at {offset + 10}, beyond the arena's 65536 bytes"):
        ShmTransport(segment).write(Transfer(1, (0, offset), 10, 1.0, 1 << 20), Local(never))


def test_a_writer_that_was_stopped_for_longer_than_its_deadline_writes_no_more(segment: Segment) -> None:
    clock = FakeClock()

    def fill(first: int, buffers: Buffers) -> None:
        assert first == 0, "it wrote after its deadline"
        clock.advance(60)  # SIGSTOP, a debugger, a machine that was suspended.

    with pytest.raises(PoolTimeoutError, match=r"more than 5\.000 s"):
        ShmTransport(segment, clock=clock).write(Transfer(1, (0, 100), 100, 5.0, 100), Local(fill))


@pytest.mark.parametrize("num_movers", [1, 2])
def test_what_another_process_writes_late_is_not_signed(num_movers: int) -> None:
    """The writer of a ticket that has expired continues: readers must see that the bytes are not those of the put."""
    signed = Seen(MIN_SHARED_BYTES)

    def sum_late(first: int, regions: Sequence[Pieces]) -> None:
        segment.bytes[:] = 9
        signed(first, regions)

    segment = Segment.create(2 * MIN_SHARED_BYTES)
    offsets = (0, MIN_SHARED_BYTES)
    with closing(ShmTransport(segment, num_movers)) as transport:
        transport.write(Transfer(1, offsets, MIN_SHARED_BYTES, 30.0, 1), Local(fill_payloads, sum=sum_late))
    assert signed.regions == {idx: payload(idx, MIN_SHARED_BYTES).tobytes() for idx in range(2)}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_transfer_ends_well_although_the_transport_is_closed_meanwhile(
    segment: Segment, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has restarted, and another thread has attached to it anew."""
    monkeypatch.setattr(shm, "PART_BYTES", 100)
    segment.bytes[:200] = 7
    transport, read = ShmTransport(segment), np.zeros((2, 100), np.uint8)

    def drain(first: int, buffers: Buffers) -> None:
        transport.close()
        read[first] = buffers[0]

    rows = [[row] for row in read] if in_place else None
    sink = Local(None if in_place else drain, rows, lambda *_: transport.close())
    transport.read(Transfer(1, (0, 100), 100, 5.0, 100), sink)
    assert (read == 7).all()
    with pytest.raises(TransferError):
        transport.read(Transfer(1, (0,), 10, 1.0, 1), Local(never))


def test_no_thread_sums_any_more_once_a_transfer_has_failed() -> None:
    begun, ended = threading.Event(), []

    def sum_regions(first: int, regions: object) -> None:
        begun.set()
        time.sleep(0.1)
        ended.append(first)

    def drain(first: int, buffers: Buffers) -> None:
        assert begun.wait(30)  # On a helper.
        raise KeyError(first)

    segment = Segment.create(MIN_SHARED_BYTES)
    with closing(ShmTransport(segment, 2)) as transport, pytest.raises(KeyError):
        transport.read(Transfer(1, (0,), MIN_SHARED_BYTES, 30.0, 1), Local(drain, sum=sum_regions))
    assert ended == [0]


def test_a_process_without_memory_for_a_transport_uses_grpc_and_leaves_no_descriptor(
    shared_server: ServerProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def arenas() -> int:
        return sum("memfd:kvpool" in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())

    gc.collect()  # Others that no test uses any more are not closed meanwhile.
    client, before = connect(shared_server), arenas()
    for module in (shm, tcp):
        monkeypatch.setattr(module, "Staging", no_memory)
    choice = client.admin.try_transport()
    assert choice.transport.name == "grpc"
    assert "no shm: [Errno 12] Cannot allocate memory" in choice.why
    assert arenas() == before
