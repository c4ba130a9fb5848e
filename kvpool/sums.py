"""Checksums of buffers. Where cores are many, threads compute them beside what the caller does.

One core copies and sums 4 GB/s on a host of a GPU; a network brings more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvpool.hashing import checksum
from kvpool.transport.base import Buffers

Checksums = Callable[[], Sequence[int]]
"""Gives the checksum of each chunk of some buffers, in order, once their bytes have all been moved."""

CORES_A_THREAD = 4
MAX_THREADS = 4
WORTH_BYTES = 256 << 10
"""What is worth waking a thread for."""


class Summer:
    """Computes checksums.

    Args:
        num_threads: beside the caller's; 0: the caller does all.
    """

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, buffers: Buffers, chunk_bytes: int) -> Checksums:
        """Sums every `chunk_bytes` of some buffers.

        Args:
            buffers: uint8, contiguous, of whole chunks; they keep their bytes until the sums have been asked for.
        """
        chunks = [buffer[at : at + chunk_bytes] for buffer in buffers for at in range(0, len(buffer), chunk_bytes)]
        if self._num_threads and len(chunks) * chunk_bytes >= WORTH_BYTES:
            return self._later(chunks)
        return _known([checksum(chunk) for chunk in chunks])

    def _later(self, chunks: Buffers) -> Checksums:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, "kvpool-sums")
            try:
                return self._threads.submit(_sum_all, chunks).result
            except RuntimeError:  # The interpreter ends, and takes no more work.
                return _known(_sum_all(chunks))

    def forget_threads(self) -> None:
        """After a fork, which has none of them."""
        self._lock = threading.Lock()
        self._threads = None


def _known(sums: list[int]) -> Checksums:
    return lambda: sums


def _sum_all(chunks: Buffers) -> list[int]:
    # Not `checksum`, which holds on to Python's lock.
    return [xxhash.xxh3_64(chunk.data).intdigest() for chunk in chunks]


def threads_of(num_cores: int) -> int:
    """How many threads sum in a process that may use so many cores."""
    return min(MAX_THREADS, num_cores // CORES_A_THREAD)


SUMMER = Summer(threads_of(len(os.sched_getaffinity(0))))
os.register_at_fork(after_in_child=SUMMER.forget_threads)
