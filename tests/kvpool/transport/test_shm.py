from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client
from kvpool.errors import PoolTimeoutError, TransferError
from kvpool.segment import Segment
from kvpool.transport.base import Buffers, Sink, Source, Transfer
from kvpool.transport.shm import ShmTransport
from tests.contracts.transport_contract import Rig, ServerRegions, TransportContract
from tests.support.clock import FakeClock


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
def segment(ram_dir: Path) -> Iterator[Segment]:
    made = Segment.create(str(ram_dir), 1 << 16)
    yield made
    made.close()


def _never(first: int, buffers: Buffers) -> None:
    raise AssertionError("called")


@pytest.mark.parametrize("offset", [(1 << 16) - 9, 1 << 16, 1 << 60])
def test_a_region_beyond_the_segment_is_refused_before_any_byte_moves(segment: Segment, offset: int) -> None:
    with pytest.raises(TransferError, match=rf"ends at {offset + 10}, beyond the arena's 65536 bytes"):
        ShmTransport(segment).write(Transfer(1, (0, offset), 10, 1.0, 1 << 20), Source(_never))


def test_the_last_bytes_of_the_segment_are_a_region(segment: Segment) -> None:
    def fill(first: int, buffers: Buffers) -> None:
        buffers[0][:] = 7

    ShmTransport(segment).write(Transfer(1, [(1 << 16) - 10], 10, 1.0, 1 << 20), Source(fill))
    assert segment.bytes[-11:].tolist() == [0] + [7] * 10


def test_a_writer_that_was_stopped_for_longer_than_its_deadline_writes_no_more(segment: Segment) -> None:
    clock = FakeClock()

    def fill(first: int, buffers: Buffers) -> None:
        assert first == 0, "it wrote after its deadline"
        clock.advance(60)  # SIGSTOP, a debugger, a machine that was suspended.

    with pytest.raises(PoolTimeoutError, match=r"more than 5\.000 s"):
        ShmTransport(segment, clock=clock).write(Transfer(1, (0, 100), 100, 5.0, 100), Source(fill))


def test_a_closed_transport_moves_nothing(segment: Segment) -> None:
    transport = ShmTransport(segment)
    transport.close()
    with pytest.raises(TransferError):
        transport.read(Transfer(1, (0,), 10, 1.0, 1), Sink(_never))
