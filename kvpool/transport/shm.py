"""The `shm` transport: the caller writes and reads the arena itself; bytes never pass through the server.

Helpers copy and sum the caller's arrays beside it, and sum what its callbacks copy.

Other processes write to the arena as well, so no checksum is of bytes in the arena: a callback fills or drains private
copies, of which the checksums are, unless the callback sums what it copies.

The transport checks the deadline before each batch: a process that was stopped for longer than its ticket lives must
not write when it continues, because its slots may belong to another ticket. A process that is stopped inside a batch
can still write late; the server's quarantine of expired tickets covers that race, and the checksum behind it.
"""

from __future__ import annotations

import time
from functools import partial

from kvpool.protocol.errors import PoolTimeoutError
from kvpool.transport.base import Buffers, Clock, Local, Sum, Transfer, call_back, copy_pieces, no_sum
from kvpool.transport.helpers import Help, Helpers, Staging
from kvpool.transport.segment import Bytes, Segment

PART_BYTES = 1 << 20
"""What a thread copies and sums at once: about what stays in its core's cache."""

MIN_SHARED_BYTES = 256 << 10
"""Batches of fewer bytes are summed by the caller: waking a thread would cost more."""


class ShmTransport:
    """Regions of an attached segment.

    Args:
        segment: closed with the transport; also an attribute.
        num_movers: threads that move the bytes of one transfer, the caller's among them; also an attribute.
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

    def write(self, transfer: Transfer, local: Local) -> None:
        self._move(transfer, local, is_write=True)

    def read(self, transfer: Transfer, local: Local) -> None:
        self._move(transfer, local, is_write=False)

    def _move(self, transfer: Transfer, local: Local, is_write: bool) -> None:
        """Copies between the caller's arrays and the arena, or calls back."""
        arena = self.segment.bytes  # It stays mapped for the transfer even if the transport is closed.
        transfer.check_bounds(len(arena))
        deadline = self._clock() + transfer.timeout_s
        if (rows := local.rows) is None:
            self._call_back(transfer, local, arena, deadline, is_write)
            return
        step = max(1, PART_BYTES // max(1, transfer.region_bytes))

        def move(first: int) -> None:
            self._check(deadline, transfer)
            part = rows[first : first + step]
            for pieces, region in zip(part, _regions(arena, transfer, first, first + len(part)), strict=True):
                copy_pieces(pieces, region, is_write=is_write)
            local.sum(first, part)

        self._helpers.share(range(0, len(transfer.offsets), step), move)

    def _call_back(self, transfer: Transfer, local: Local, arena: Bytes, deadline: float, is_write: bool) -> None:
        """Shows a callback private copies of the regions, batch by batch, and sums the copies.

        A callback that sums what it copies sees the regions themselves.
        """
        act, nbytes = local.acting(is_write=is_write), transfer.region_bytes
        if local.sum is no_sum:
            for start, stop in transfer.batches():
                self._check(deadline, transfer)
                act(start, _regions(arena, transfer, start, stop))
            return
        with self._staging.borrowed(transfer.batch_regions * nbytes, 1, transfer.timeout_s) as (staging,):
            for start, stop in transfer.batches():
                copies = [staging[at * nbytes : (at + 1) * nbytes] for at in range(stop - start)]
                pairs = list(zip(copies, _regions(arena, transfer, start, stop), strict=True))
                self._check(deadline, transfer)
                if is_write:
                    call_back(act, no_sum, start, copies, is_write=is_write)
                    self._check(deadline, transfer)
                else:
                    for copy, region in pairs:
                        copy[:] = region
                summing = self._sum(local.sum, start, copies)
                try:
                    if is_write:
                        for copy, region in pairs:
                            region[:] = copy
                    else:
                        call_back(act, no_sum, start, copies, is_write=is_write)
                    summing.finish()
                finally:
                    summing.drop()

    def _sum(self, sum_regions: Sum, first: int, regions: Buffers) -> Help:
        """Sums regions before the returned `Help` has finished, on a helper's thread if that pays."""
        work = partial(sum_regions, first, [[region] for region in regions])
        return self._helpers.submit(work) if len(regions) * len(regions[0]) >= MIN_SHARED_BYTES else Help(work)

    def _check(self, deadline: float, transfer: Transfer) -> None:
        if self._clock() >= deadline:
            raise PoolTimeoutError(f"a shared-memory transfer took more than {transfer.timeout_s:.3f} s")

    def close(self) -> None:
        self._helpers.close()
        self.segment.close()


def _regions(arena: Bytes, transfer: Transfer, start: int, stop: int) -> Buffers:
    nbytes = transfer.region_bytes
    return [arena[offset : offset + nbytes] for offset in transfer.starts(start, stop)]
