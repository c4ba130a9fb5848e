"""The `shm` transport: the caller writes and reads the arena itself; bytes never pass through the server.

Helpers copy and sum the caller's arrays beside it, and sum what its callbacks have copied.

Other processes write to the arena as well, so a read sums the caller's own copy of the bytes and never the arena: a
callback drains a private copy, of which the checksum is, unless the callback sums what it copies.

The transport checks the deadline before each batch: a process that was stopped for longer than its ticket lives must
not write when it continues, because its slots may belong to another ticket. A process that is stopped inside a batch
can still write late; the server's quarantine of expired tickets covers that race, and the checksum behind it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvpool.protocol.errors import PoolTimeoutError
from kvpool.transport.base import (
    Buffers,
    Clock,
    Drain,
    Fill,
    Pieces,
    Sink,
    Source,
    Sum,
    Transfer,
    copy_pieces,
    no_sum,
)
from kvpool.transport.helpers import Help, Helpers, Staging
from kvpool.transport.segment import Bytes, Segment

PART_BYTES = 1 << 20
"""What a thread copies and sums at once: about what stays in its core's cache."""

MIN_SHARED_BYTES = 256 << 10
"""Batches of fewer bytes are summed by the caller: waking a thread would cost more."""


class ShmTransport:
    """Regions of an attached segment.

    Args:
        num_movers: threads that move the bytes of one transfer, the caller's among them.

    Attributes:
        segment: closed with the transport.
        num_movers: as given.
    """

    name = "shm"
    one_sided = False

    def __init__(self, segment: Segment, num_movers: int = 1, clock: Clock = time.monotonic):
        self.segment = segment
        self.num_movers = num_movers
        self._helpers = Helpers(num_movers - 1)
        self._staging = Staging()
        self._clock = clock
        segment.map_ahead()

    def __repr__(self) -> str:
        return f"ShmTransport({self.segment})"

    @property
    def memory(self) -> Bytes:
        return self.segment.bytes

    def write(self, transfer: Transfer, source: Source) -> None:
        if source.rows is None:
            assert source.fill is not None
            self._visit(transfer, source.fill, source.sum)
        else:
            self._copy(transfer, source.rows, source.sum, is_write=True)

    def read(self, transfer: Transfer, sink: Sink) -> None:
        if sink.rows is None:
            assert sink.drain is not None
            if sink.sum is no_sum:  # The callback sums what it has copied.
                self._visit(transfer, sink.drain, sink.sum)
            else:
                self._drain_copies(transfer, sink.drain, sink.sum)
        else:
            self._copy(transfer, sink.rows, sink.sum, is_write=False)

    def _copy(self, transfer: Transfer, rows: Sequence[Pieces], sum_regions: Sum, is_write: bool) -> None:
        """Copies between the caller's arrays and the arena."""
        arena, deadline = self._begin(transfer)
        step = max(1, PART_BYTES // max(1, transfer.region_bytes))

        def move(first: int) -> None:
            self._check(deadline, transfer)
            part = rows[first : first + step]
            for pieces, region in zip(part, _regions(arena, transfer, first, first + len(part)), strict=True):
                copy_pieces(pieces, region, is_write=is_write)
            sum_regions(first, part)

        self._helpers.share(range(0, len(transfer.offsets), step), move)

    def _visit(self, transfer: Transfer, visit: Fill | Drain, sum_regions: Sum) -> None:
        """Shows the regions themselves to a callback, batch by batch, and sums them behind it."""
        arena, deadline = self._begin(transfer)
        summing: list[Help] = []
        try:
            for start, stop in transfer.batches():
                self._check(deadline, transfer)
                regions = _regions(arena, transfer, start, stop)
                wait = visit(start, regions)
                if wait is None:
                    summing += self._sum(sum_regions, start, regions)
            for each in summing:
                each.finish()
        except BaseException:
            for each in summing:
                each.drop()
            raise

    def _drain_copies(self, transfer: Transfer, drain: Drain, sum_regions: Sum) -> None:
        """Shows private copies of the regions to a callback, batch by batch, and sums the copies."""
        arena, deadline = self._begin(transfer)
        nbytes = transfer.region_bytes
        with self._staging.borrowed(transfer.batch_regions * nbytes, 1, transfer.timeout_s) as (staging,):
            for start, stop in transfer.batches():
                self._check(deadline, transfer)
                copies = [staging[at * nbytes : (at + 1) * nbytes] for at in range(stop - start)]
                for copy, region in zip(copies, _regions(arena, transfer, start, stop), strict=True):
                    copy[:] = region
                summing = list(self._sum(sum_regions, start, copies))
                try:
                    wait = drain(start, copies)
                    if wait is not None:
                        wait()
                    for each in summing:
                        each.finish()
                finally:
                    for each in summing:
                        each.drop()

    def _sum(self, sum_regions: Sum, first: int, regions: Buffers) -> Iterator[Help]:
        """Sums regions, or lets a helper do it."""
        rows = [[region] for region in regions]
        if len(regions) * len(regions[0]) >= MIN_SHARED_BYTES and self._helpers.num_threads:
            yield self._helpers.submit(lambda: sum_regions(first, rows))
        else:
            sum_regions(first, rows)

    def _begin(self, transfer: Transfer) -> tuple[Bytes, float]:
        """The arena and the deadline. The arena stays mapped for the transfer even if the transport is closed."""
        arena = self.segment.bytes
        transfer.check_bounds(len(arena))
        return arena, self._clock() + transfer.timeout_s

    def _check(self, deadline: float, transfer: Transfer) -> None:
        if self._clock() > deadline:
            raise PoolTimeoutError(f"a shared-memory transfer took more than {transfer.timeout_s:.3f} s")

    def close(self) -> None:
        self._helpers.close()
        self.segment.close()


def _regions(arena: Bytes, transfer: Transfer, start: int, stop: int) -> Buffers:
    nbytes = transfer.region_bytes
    return [arena[offset : offset + nbytes] for offset in transfer.starts(start, stop)]
