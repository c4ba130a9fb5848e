"""Memory that the bytes of callbacks pass through: one array, which a GPU's driver pins once, shared by all transfers.

Pages that were never used cost nothing. What was given back last is lent first: it may still be in a core's cache.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvpool.protocol.errors import PoolTimeoutError
from kvpool.transport.base import Bytes

STAGING_BYTES = 256 << 20
UNIT_BYTES = 1 << 20


class Staging:
    """`memory`: uint8 [nbytes]. Thread-safe.

    Args:
        nbytes: bound of what all transfers have together; a buffer that is larger by itself is memory of its own.
        memory: is there already, and is the bound instead; None: memory of its own.
    """

    def __init__(self, nbytes: int = STAGING_BYTES, memory: Bytes | None = None):
        if memory is None:
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            memory = np.frombuffer(pages, np.uint8)
        self.memory: Bytes = memory
        self._lent = bytearray(len(memory) // UNIT_BYTES)  # 1 for each unit that is lent, else 0.
        self._changed = threading.Condition()

    @contextmanager
    def borrowed(self, nbytes: int, count: int, timeout_s: float) -> Iterator[list[Bytes]]:
        """Up to `count` buffers of `nbytes`, at least one.

        Raises:
            PoolTimeoutError: other transfers hold all of the memory for `timeout_s`.
        """
        units = -(-max(nbytes, 1) // UNIT_BYTES)
        if units * UNIT_BYTES > len(self.memory):
            yield [np.empty(nbytes, np.uint8)]
            return
        free = bytes(units)
        starts: list[int] = []
        with self._changed:
            if not self._changed.wait_for(lambda: free in self._lent, max(timeout_s, 0)):
                raise PoolTimeoutError(
                    f"transfers under way held all {len(self.memory)} bytes of a client's staging memory until the "
                    "deadline; let fewer threads put and get at once"
                )
            while len(starts) < count and free in self._lent:
                starts.append(self._lent.index(free))
                self._lent[starts[-1] : starts[-1] + units] = b"\1" * units
        try:
            yield [self.memory[start * UNIT_BYTES :][:nbytes] for start in starts]
        finally:
            with self._changed:
                for start in starts:
                    self._lent[start : start + units] = free
                self._changed.notify_all()
