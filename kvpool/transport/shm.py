"""The `shm` transport: the caller writes and reads the arena itself; bytes never pass through the server.

Each batch is preceded by a look at the clock. A process that was stopped for longer than its ticket lives must not
write when it wakes: its slots may be another's. What is left of that race (stopped inside one batch) is covered by
the server's quarantine of expired tickets, and behind it by the checksum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpool.errors import PoolTimeoutError, TransferError
from kvpool.segment import Bytes, Segment
from kvpool.transport.base import Clock, Drain, Fill, batches


class ShmTransport:
    """Regions of an attached segment."""

    name = "shm"
    one_sided = False
    in_place = False

    def __init__(self, segment: Segment, clock: Clock = time.monotonic):
        self._segment = segment
        self._clock = clock
        segment.map_ahead()

    def __repr__(self) -> str:
        return f"ShmTransport({self._segment})"

    @property
    def memory(self) -> Bytes:
        return self._segment.bytes

    def write(
        self,
        ticket_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        fill: Fill,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        self._visit(offsets, region_bytes, fill, batch_bytes, timeout_s)

    def read(
        self,
        lease_id: int,
        offsets: Sequence[int],
        region_bytes: int,
        drain: Drain,
        batch_bytes: int,
        timeout_s: float,
        permit: bytes = b"",
    ) -> None:
        self._visit(offsets, region_bytes, drain, batch_bytes, timeout_s)

    def _visit(
        self, offsets: Sequence[int], region_bytes: int, visit: Fill | Drain, batch_bytes: int, timeout_s: float
    ) -> None:
        arena = self._segment.bytes
        if offsets and max(offsets) + region_bytes > len(arena):
            raise TransferError(
                f"a region ends at {max(offsets) + region_bytes}, beyond the segment's {len(arena)} bytes"
            )
        deadline = self._clock() + timeout_s
        for start, stop in batches(len(offsets), region_bytes, batch_bytes):
            if self._clock() > deadline:
                raise PoolTimeoutError(f"shared-memory transfer took more than {timeout_s:.3f} s")
            visit(start, [arena[offset : offset + region_bytes] for offset in offsets[start:stop]])

    def close(self) -> None:
        self._segment.close()
