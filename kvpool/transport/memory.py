"""An in-process transport with fault injection, for tests and simulations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError, PoolTimeoutError, TransferError
from kvpool.transport.base import Clock, Drain, Fill, batches


@dataclass(slots=True)
class Faults:
    """What goes wrong, each consumed by the transfer it hits.

    Args:
        errors: raised by the next transfers, in order; None lets one pass.
        corrupt_reads: how many of the next reads deliver one flipped byte.
        truncate_reads: how many of the next reads end before the last region.
    """

    errors: list[KVPoolError | None] = field(default_factory=list)
    corrupt_reads: int = 0
    truncate_reads: int = 0


class MemoryTransport:
    """Regions of a plain array."""

    name = "memory"
    one_sided = False
    in_place = False
    memory = None

    def __init__(self, arena: npt.NDArray[np.uint8], faults: Faults | None = None, clock: Clock = time.monotonic):
        self._arena = arena
        self._clock = clock
        self.faults = faults if faults is not None else Faults()

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
        self._raise_next()
        deadline = self._clock() + timeout_s
        for start, stop in batches(len(offsets), region_bytes, batch_bytes):
            self._check_deadline(deadline, timeout_s)
            fill(start, [self._arena[offset : offset + region_bytes] for offset in offsets[start:stop]])

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
        self._raise_next()
        deadline = self._clock() + timeout_s
        corrupt, truncate = self.faults.corrupt_reads > 0, self.faults.truncate_reads > 0
        self.faults.corrupt_reads -= corrupt
        self.faults.truncate_reads -= truncate
        for start, stop in batches(len(offsets), region_bytes, batch_bytes):
            self._check_deadline(deadline, timeout_s)
            if truncate and stop == len(offsets):
                raise TransferError(f"injected: the transfer ended before region {offsets[-1]}")
            buffers = [self._arena[offset : offset + region_bytes].copy() for offset in offsets[start:stop]]
            if corrupt and start == 0:
                buffers[0][0] ^= 0xFF
            drain(start, buffers)

    def _raise_next(self) -> None:
        if self.faults.errors and (error := self.faults.errors.pop(0)) is not None:
            raise error

    def _check_deadline(self, deadline: float, timeout_s: float) -> None:
        if self._clock() > deadline:
            raise PoolTimeoutError(f"in-process transfer took more than {timeout_s:.3f} s")

    def close(self) -> None:
        """Nothing to end."""
