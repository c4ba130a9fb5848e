"""The `shm` transport: the caller writes and reads the arena itself; bytes never pass through the server.

The transport checks the deadline before each batch: a process that was stopped for longer than its ticket lives must
not write when it continues, because its slots may belong to another ticket. A process that is stopped inside a batch
can still write late; the server's quarantine of expired tickets covers that race, and the checksum behind it.
"""

from __future__ import annotations

import time

from kvpool.errors import PoolTimeoutError
from kvpool.segment import Bytes, Segment
from kvpool.transport.base import Clock, Drain, Fill, Transfer


class ShmTransport:
    """Regions of an attached segment.

    Attributes:
        segment: closed with the transport.
    """

    name = "shm"
    one_sided = False
    in_place = False

    def __init__(self, segment: Segment, clock: Clock = time.monotonic):
        self.segment = segment
        self._clock = clock
        segment.map_ahead()

    def __repr__(self) -> str:
        return f"ShmTransport({self.segment})"

    @property
    def memory(self) -> Bytes:
        return self.segment.bytes

    def write(self, transfer: Transfer, fill: Fill) -> None:
        self._visit(transfer, fill)

    def read(self, transfer: Transfer, drain: Drain) -> None:
        self._visit(transfer, drain)

    def _visit(self, transfer: Transfer, visit: Fill | Drain) -> None:
        arena, region_bytes = self.segment.bytes, transfer.region_bytes
        transfer.check_bounds(len(arena))
        deadline = self._clock() + transfer.timeout_s
        for start, stop in transfer.batches():
            if self._clock() > deadline:
                raise PoolTimeoutError(f"a shared-memory transfer took more than {transfer.timeout_s:.3f} s")
            visit(start, [arena[offset : offset + region_bytes] for offset in transfer.starts[start:stop]])

    def close(self) -> None:
        self.segment.close()
