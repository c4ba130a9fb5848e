"""An in-process transport with fault injection."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.protocol.errors import KVPoolError, PoolTimeoutError, TransferError
from kvpool.transport.base import Clock, Sink, Source, Transfer


@dataclass(slots=True)
class Faults:
    """Faults to inject; each is used up by the transfer that it hits.

    Args:
        errors: raised by the next transfers, in order; for a None, that transfer succeeds.
        corrupt_reads: number of next reads that deliver one flipped byte.
        truncate_reads: number of next reads that end before the last region.
    """

    errors: list[KVPoolError | None] = field(default_factory=list)
    corrupt_reads: int = 0
    truncate_reads: int = 0


class MemoryTransport:
    """Regions of a plain array."""

    name = "memory"
    one_sided = False
    memory = None

    def __init__(self, arena: npt.NDArray[np.uint8], faults: Faults | None = None, clock: Clock = time.monotonic):
        self._arena = arena
        self._clock = clock
        self.faults = faults if faults is not None else Faults()

    def write(self, transfer: Transfer, source: Source) -> None:
        fill = source.filling()
        self._raise_next()
        deadline = self._clock() + transfer.timeout_s
        for start, stop in transfer.batches():
            self._check_deadline(deadline, transfer)
            regions = self._regions(transfer, start, stop)
            fill(start, regions)
            source.sum(start, [[region] for region in regions])

    def read(self, transfer: Transfer, sink: Sink) -> None:
        drain = sink.draining()
        self._raise_next()
        deadline = self._clock() + transfer.timeout_s
        corrupt, truncate = self.faults.corrupt_reads > 0, self.faults.truncate_reads > 0
        self.faults.corrupt_reads -= corrupt
        self.faults.truncate_reads -= truncate
        for start, stop in transfer.batches():
            self._check_deadline(deadline, transfer)
            if truncate and stop == len(transfer.offsets):
                raise TransferError(f"injected: the transfer ended before region {transfer.starts()[-1]}")
            buffers = [region.copy() for region in self._regions(transfer, start, stop)]
            if corrupt and start == 0:
                buffers[0][0] ^= 0xFF
            sink.sum(start, [[buffer] for buffer in buffers])
            drain(start, buffers)

    def _regions(self, transfer: Transfer, start: int, stop: int) -> list[npt.NDArray[np.uint8]]:
        return [self._arena[offset : offset + transfer.region_bytes] for offset in transfer.starts(start, stop)]

    def _raise_next(self) -> None:
        if self.faults.errors and (error := self.faults.errors.pop(0)) is not None:
            raise error

    def _check_deadline(self, deadline: float, transfer: Transfer) -> None:
        if self._clock() > deadline:
            raise PoolTimeoutError(f"an in-process transfer took more than {transfer.timeout_s:.3f} s")

    def close(self) -> None:
        """Nothing to end."""
