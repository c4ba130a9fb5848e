import numpy as np
import pytest

from kvpool.protocol.errors import LeaseExpiredError, TransferError, UnavailableError
from kvpool.transport.base import Buffers, Sink, Source, Transfer
from tests.contracts.transport_contract import DEADLINE_S, REGION_BYTES, Regions, Rig, TransportContract
from tests.support.clock import FakeClock
from tests.support.memory_transport import Faults, MemoryTransport
from tests.support.values import payload

ARENA_BYTES = 16 << 20


class TestContract(TransportContract):
    @pytest.fixture
    def rig(self) -> Rig:
        clock, taken = FakeClock(), [0]

        def regions(num_regions: int, region_bytes: int) -> Regions:
            start = taken[0]
            taken[0] += num_regions * region_bytes
            assert taken[0] <= ARENA_BYTES
            return Regions(1, tuple(range(start, taken[0], region_bytes)), lambda: 1)

        return Rig(MemoryTransport(np.zeros(ARENA_BYTES, np.uint8), clock=clock), regions, clock.advance)


OFFSETS = tuple(idx * REGION_BYTES for idx in range(4))


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def transport(faults: Faults) -> MemoryTransport:
    arena = np.concatenate([payload(idx, REGION_BYTES) for idx in range(4)])
    return MemoryTransport(arena, faults)


def _read(transport: MemoryTransport) -> list[bytes]:
    read: list[bytes] = []

    def drain(first: int, buffers: Buffers) -> None:
        read.extend(buffer.tobytes() for buffer in buffers)

    transport.read(Transfer(1, OFFSETS, REGION_BYTES, DEADLINE_S, 2 * REGION_BYTES), Sink(drain))
    return read


GOOD = [payload(idx, REGION_BYTES).tobytes() for idx in range(4)]


def test_injected_errors_hit_the_next_transfers_in_order(transport: MemoryTransport, faults: Faults) -> None:
    faults.errors = [UnavailableError("gone"), None, LeaseExpiredError("late")]

    def never(first: int, buffers: Buffers) -> None:
        raise AssertionError("a failed transfer moves nothing")

    with pytest.raises(UnavailableError, match="gone"):
        transport.write(Transfer(1, OFFSETS, REGION_BYTES, DEADLINE_S, 1), Source(never))
    assert _read(transport) == GOOD
    with pytest.raises(LeaseExpiredError, match="late"):
        _read(transport)
    assert _read(transport) == GOOD


def test_a_corrupt_read_differs_in_one_byte_and_leaves_the_arena_as_it_is(
    transport: MemoryTransport, faults: Faults
) -> None:
    faults.corrupt_reads = 2
    for _ in range(2):
        bad = b"".join(_read(transport))
        assert sum(a != b for a, b in zip(bad, b"".join(GOOD), strict=True)) == 1
    assert _read(transport) == GOOD


def test_a_truncated_read_ends_before_its_last_region(transport: MemoryTransport, faults: Faults) -> None:
    faults.truncate_reads = 1
    seen: list[int] = []
    with pytest.raises(TransferError, match=f"before region {OFFSETS[-1]}"):
        transport.read(
            Transfer(1, OFFSETS, REGION_BYTES, DEADLINE_S, 2 * REGION_BYTES), Sink(lambda first, _: seen.append(first))
        )
    assert seen == [0]
    assert _read(transport) == GOOD


def test_a_reader_cannot_change_the_arena(transport: MemoryTransport) -> None:
    def scribble(first: int, buffers: Buffers) -> None:
        for buffer in buffers:
            buffer[:] = 0

    transport.read(Transfer(1, OFFSETS, REGION_BYTES, DEADLINE_S, 1), Sink(scribble))
    assert _read(transport) == GOOD
