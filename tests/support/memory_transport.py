"""An in-process transport."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.transport.base import Local, Transfer, call_back


class MemoryTransport:
    """Regions of a plain array."""

    name = "memory"
    one_sided = False
    memory = None

    def __init__(self, arena: npt.NDArray[np.uint8]):
        self._arena = arena

    def write(self, transfer: Transfer, source: Local) -> None:
        for start, stop in transfer.batches():
            call_back(
                source.acting(is_write=True), source.sum, start, self._regions(transfer, start, stop), is_write=True
            )

    def read(self, transfer: Transfer, sink: Local) -> None:
        for start, stop in transfer.batches():
            copies = [region.copy() for region in self._regions(transfer, start, stop)]
            call_back(sink.acting(is_write=False), sink.sum, start, copies, is_write=False)

    def _regions(self, transfer: Transfer, start: int, stop: int) -> list[npt.NDArray[np.uint8]]:
        return [self._arena[offset : offset + transfer.region_bytes] for offset in transfer.starts(start, stop)]

    def close(self) -> None:
        """Nothing to end."""
