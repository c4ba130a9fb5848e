"""What every transport does, whatever carries its bytes. Subclasses say how to get regions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvpool.client.client import Client, Namespace
from kvpool.protocol.errors import PoolTimeoutError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import PutStatus, ShardRange
from kvpool.transport.base import Buffers, Local, Pieces, Transfer, Transport
from tests.support.values import group_spec, namespace_spec, payload, run_of

REGION_BYTES = 96
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Regions:
    """Regions that may be written, and (once `seal` has run) read."""

    ticket_id: int
    offsets: tuple[int, ...]
    seal: Callable[[], int]
    """Makes what was written readable; returns the lease."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A transport, where its regions come from, and its clock."""

    transport: Transport
    regions: Callable[[int, int], Regions]
    pass_time: Callable[[float], None] = time.sleep


class ServerRegions:
    """Regions of a real server: namespaces whose blocks are one region each."""

    def __init__(self, client: Client):
        self._client = client
        self._tickets: list[int] = []
        self._leases: list[int] = []
        self._namespaces: list[Namespace] = []

    def open(self, region_bytes: int) -> Namespace:
        self._namespaces.append(self._client.open_namespace(namespace_spec(group_spec(chunk_bytes=region_bytes))))
        return self._namespaces[-1]

    def give_back(self) -> None:
        """Leaves the server as it was, for the next test."""
        self._client.release(self._leases)
        for ticket_id in self._tickets:
            self._client.rpc.put_revoke(ticket_id)
        for namespace in self._namespaces:
            self._client.admin.clear(namespace.fingerprint)

    def __call__(self, num_regions: int, region_bytes: int) -> Regions:
        namespace = self.open(region_bytes)
        run = run_of(*range(num_regions))
        grant = self._client.rpc.put_start(namespace, [run], ShardRange(0, 1))
        assert set(grant.statuses) == {PutStatus.GRANTED}
        self._tickets.append(grant.ticket_id)

        def seal() -> int:
            sums = [checksum(payload(idx, region_bytes)) for idx in range(num_regions)]
            self._client.rpc.put_end(grant.ticket_id, sums)
            self._leases.append(self._client.lookup(namespace, [run]).lease_id)
            return self._leases[-1]

        return Regions(grant.ticket_id, grant.offsets, seal)


class UnheardError(Exception):
    """No library would raise this."""


class Seen:
    """A `sum` that notes what it is shown."""

    def __init__(self, region_bytes: int):
        self._region_bytes = region_bytes
        self.regions: dict[int, bytes] = {}

    def __call__(self, first: int, regions: Sequence[Pieces]) -> None:
        for idx, pieces in enumerate(regions, first):
            seen = np.concatenate(pieces).tobytes()
            assert len(seen) == self._region_bytes
            assert self.regions.setdefault(idx, seen) is seen, f"region {idx} was summed twice"


def fill_payloads(first: int, buffers: Buffers) -> None:
    for idx, buffer in enumerate(buffers, first):
        buffer[:] = payload(idx, len(buffer))


def never(first: int, buffers: Buffers) -> None:
    raise AssertionError("bytes arrived, or were wanted")


def read_bytes(transport: Transport, transfer: Transfer) -> list[bytes]:
    """What the regions of a transfer hold, in order."""
    read: list[bytes] = []
    transport.read(transfer, Local(lambda _, buffers: read.extend(buffer.tobytes() for buffer in buffers)))
    return read


class TransportContract:
    """Subclasses give a fixture `rig`."""

    def _write(self, rig: Rig, regions: Regions, region_bytes: int = REGION_BYTES, batch_bytes: int = 1 << 20) -> None:
        transfer = Transfer(regions.ticket_id, regions.offsets, region_bytes, DEADLINE_S, batch_bytes)
        rig.transport.write(transfer, Local(fill_payloads))

    @pytest.fixture
    def stored(self, rig: Rig) -> tuple[Regions, int]:
        """Seven regions that were written, and the lease to read them."""
        regions = rig.regions(7, REGION_BYTES)
        self._write(rig, regions)
        return regions, regions.seal()

    @pytest.mark.parametrize(
        ("num_regions", "region_bytes", "batch_bytes"),
        [
            (1, REGION_BYTES, 1 << 20),
            *((7, REGION_BYTES, batch_bytes) for batch_bytes in (REGION_BYTES, 3 * REGION_BYTES + 5)),
            *((40, REGION_BYTES, batch_bytes) for batch_bytes in (1, 1 << 20)),
            *((3, region_bytes, 2 * region_bytes) for region_bytes in (1, (1 << 20) + 3)),
        ],
    )
    def test_callbacks_see_every_region_once_in_order_in_batches_of_the_size_asked_for(
        self, rig: Rig, num_regions: int, region_bytes: int, batch_bytes: int
    ) -> None:
        """What was written is read, and summed once, whoever moved it."""
        regions = rig.regions(num_regions, region_bytes)
        written, read = Seen(region_bytes), Seen(region_bytes)
        batches: dict[str, list[tuple[int, int]]] = {"filled": [], "drained": []}
        drained: dict[int, bytes] = {}

        def note(what: str, first: int, buffers: Buffers) -> None:
            assert all(buffer.shape == (region_bytes,) and buffer.dtype == np.uint8 for buffer in buffers)
            batches[what].append((first, len(buffers)))

        def fill(first: int, buffers: Buffers) -> None:
            note("filled", first, buffers)
            fill_payloads(first, buffers)

        def drain(first: int, buffers: Buffers) -> None:
            note("drained", first, buffers)
            drained.update((idx, buffer.tobytes()) for idx, buffer in enumerate(buffers, first))

        transfer = Transfer(regions.ticket_id, regions.offsets, region_bytes, DEADLINE_S, batch_bytes)
        rig.transport.write(transfer, Local(fill, sum=written))
        rig.transport.read(replace(transfer, holding_id=regions.seal()), Local(drain, sum=read))
        step = max(1, batch_bytes // region_bytes)
        expected = [(at, min(step, num_regions - at)) for at in range(0, num_regions, step)]
        assert batches == {"filled": expected, "drained": expected}
        payloads = {idx: payload(idx, region_bytes).tobytes() for idx in range(num_regions)}
        assert drained == written.regions == read.regions == payloads

    @pytest.mark.parametrize("waits", [{0, 1, 2, 3, 4, 5, 6}, {1, 2, 5}])
    def test_buffers_stay_until_a_drain_no_longer_looks_at_them(
        self, rig: Rig, stored: tuple[Regions, int], waits: set[int]
    ) -> None:
        regions, lease_id = stored
        kept: dict[int, np.ndarray] = {}

        def drain(first: int, buffers: Buffers) -> Callable[[], object] | None:
            if first not in waits:
                return None
            kept[first] = buffers[0]

            def wait() -> None:
                time.sleep(0.01)
                assert kept.pop(first).tobytes() == payload(first, REGION_BYTES).tobytes()

            return wait

        rig.transport.read(Transfer(lease_id, regions.offsets, REGION_BYTES, DEADLINE_S, 1), Local(drain))
        for idx, buffer in kept.items():  # Those that are never used again.
            assert buffer.tobytes() == payload(idx, REGION_BYTES).tobytes()

    @pytest.mark.parametrize("region_bytes", [1, REGION_BYTES, 300_001])
    @pytest.mark.parametrize("num_pieces", [1, 3])
    def test_bytes_move_between_arrays_of_the_caller(self, rig: Rig, region_bytes: int, num_pieces: int) -> None:
        """In one piece a region, or in several."""
        regions = rig.regions(7, region_bytes)
        written, read = Seen(region_bytes), Seen(region_bytes)
        given = [np.array_split(payload(idx, region_bytes), num_pieces) for idx in range(7)]
        rig.transport.write(
            Transfer(regions.ticket_id, regions.offsets, region_bytes, DEADLINE_S), Local(rows=given, sum=written)
        )
        into = [np.array_split(np.zeros(region_bytes, np.uint8), num_pieces) for _ in range(7)]
        rig.transport.read(
            Transfer(regions.seal(), regions.offsets, region_bytes, DEADLINE_S), Local(rows=into, sum=read)
        )
        expected = {idx: payload(idx, region_bytes).tobytes() for idx in range(7)}
        assert {idx: np.concatenate(pieces).tobytes() for idx, pieces in enumerate(into)} == expected
        assert written.regions == read.regions == expected

    def test_regions_may_be_read_in_any_order_and_none_are_no_work(self, rig: Rig, stored: tuple[Regions, int]) -> None:
        regions, lease_id = stored
        order = [5, 0, 3]
        offsets = [regions.offsets[idx] for idx in order]
        read = read_bytes(rig.transport, Transfer(lease_id, offsets, REGION_BYTES, DEADLINE_S, 2 * REGION_BYTES))
        assert read == [payload(idx, REGION_BYTES).tobytes() for idx in order]
        rig.transport.read(Transfer(lease_id, (), REGION_BYTES, DEADLINE_S, 1), Local(never))
        rig.transport.write(Transfer(regions.ticket_id, (), REGION_BYTES, DEADLINE_S, 1), Local(never))

    def test_a_part_of_each_region_may_be_moved(self, rig: Rig) -> None:
        """As a rank does with its shards of whole slots."""
        regions = rig.regions(3, REGION_BYTES)
        half = REGION_BYTES // 2
        for skip_bytes in (0, half):

            def fill(first: int, buffers: Buffers, skip_bytes: int = skip_bytes) -> None:
                for idx, buffer in enumerate(buffers, first):
                    buffer[:] = payload(idx, REGION_BYTES)[skip_bytes : skip_bytes + half]

            rig.transport.write(_part(regions.ticket_id, regions, skip_bytes, half), Local(fill))
        read = read_bytes(rig.transport, _part(regions.seal(), regions, 5, 7))
        assert read == [payload(idx, REGION_BYTES)[5:12].tobytes() for idx in range(3)]

    @pytest.mark.parametrize("is_write", [True, False])
    @pytest.mark.parametrize("fails_at", [0, 4])
    def test_an_exception_in_a_callback_ends_the_transfer_and_reaches_the_caller_unchanged(
        self, rig: Rig, stored: tuple[Regions, int], fails_at: int, is_write: bool
    ) -> None:
        failure = UnheardError("of")
        calls: list[int] = []

        def call(first: int, buffers: Buffers) -> None:
            calls.append(first)
            if first == fails_at:
                raise failure
            if is_write:
                fill_payloads(first, buffers)

        regions, lease_id = (rig.regions(7, REGION_BYTES), 0) if is_write else stored
        holding_id = regions.ticket_id if is_write else lease_id
        transfer = Transfer(holding_id, regions.offsets, REGION_BYTES, DEADLINE_S, 2 * REGION_BYTES)
        move = rig.transport.write if is_write else rig.transport.read
        with pytest.raises(UnheardError) as caught:
            move(transfer, Local(call))
        assert caught.value is failure
        assert calls == [*range(0, fails_at + 1, 2)]

    def test_a_transfer_past_its_deadline_times_out(self, rig: Rig) -> None:
        regions = rig.regions(2, REGION_BYTES)

        def fill(first: int, buffers: Buffers) -> None:
            fill_payloads(first, buffers)
            rig.pass_time(0.3)

        with pytest.raises(PoolTimeoutError):
            rig.transport.write(Transfer(regions.ticket_id, regions.offsets, REGION_BYTES, 0.1, 1), Local(fill))
        region_bytes = 1 << 20
        regions = rig.regions(8, region_bytes)
        self._write(rig, regions, region_bytes)
        with pytest.raises(PoolTimeoutError):
            rig.transport.read(
                Transfer(regions.seal(), regions.offsets, region_bytes, 0.2, 1), Local(lambda *_: rig.pass_time(0.3))
            )

    def test_threads_share_a_transport(self, rig: Rig) -> None:
        all_regions = [rig.regions(5, REGION_BYTES) for _ in range(4)]

        def work(regions: Regions) -> None:
            self._write(rig, regions, batch_bytes=1)
            transfer = Transfer(regions.seal(), regions.offsets, REGION_BYTES, DEADLINE_S, 1)
            assert read_bytes(rig.transport, transfer) == [payload(idx, REGION_BYTES).tobytes() for idx in range(5)]

        with ThreadPoolExecutor(len(all_regions)) as threads:
            list(threads.map(work, all_regions))

    def test_close_is_idempotent(self, rig: Rig) -> None:
        rig.transport.close()
        rig.transport.close()


def _part(holding_id: int, regions: Regions, skip_bytes: int, nbytes: int) -> Transfer:
    """Bytes [skip_bytes, skip_bytes + nbytes) of each region, two regions a batch."""
    return Transfer(
        holding_id,
        regions.offsets,
        nbytes,
        DEADLINE_S,
        2 * nbytes,
        skip_bytes=skip_bytes,
        permitted_bytes=REGION_BYTES,
    )
