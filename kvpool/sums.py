"""Checksums of buffers. With many cores, threads compute them while the caller goes on copying.

One core copies and sums 4 GB/s on a GPU's host; a network delivers more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvpool.hashing import checksum
from kvpool.transport.base import Buffers

Checksums = Callable[[], Sequence[int]]
"""Returns one checksum a chunk of some buffers, in order. May wait until the bytes of all of them have been moved."""

CORES_A_THREAD = 4
MAX_THREADS = 4
MIN_THREADED_BYTES = 256 << 10
"""Buffers of fewer bytes are summed by the caller: waking a thread would cost more."""


class Summer:
    """Computes checksums. Thread-safe. A fork of the process gets threads of its own.

    Args:
        num_threads: threads beside the caller's; 0: the caller computes all checksums. None: by the number of cores.
    """

    def __init__(self, num_threads: int | None = None):
        self._num_threads = threads_of(len(os.sched_getaffinity(0))) if num_threads is None else num_threads
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._process_id = os.getpid()

    def begin(self, buffers: Buffers, chunk_bytes: int) -> Checksums:
        """Starts to sum every `chunk_bytes` of some buffers.

        Args:
            buffers: uint8, contiguous, of whole chunks. They must keep their bytes until the checksums were returned.
        """
        chunks = [buffer[at : at + chunk_bytes] for buffer in buffers for at in range(0, len(buffer), chunk_bytes)]
        if self._num_threads and len(chunks) * chunk_bytes >= MIN_THREADED_BYTES:
            return self._submit(chunks)
        return _known([checksum(chunk) for chunk in chunks])

    def close(self) -> None:
        """Ends the threads after what they have begun. Idempotent; `begin` then leaves the work to its caller."""
        with self._locked():
            self._num_threads = 0
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def _submit(self, chunks: Buffers) -> Checksums:
        with self._locked():
            if self._num_threads:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(self._num_threads, "kvpool-sums")
                with contextlib.suppress(RuntimeError):  # The interpreter ends, and accepts no more work.
                    return self._threads.submit(_sum_all, chunks).result
        return _known(_sum_all(chunks))

    def _locked(self) -> threading.Lock:
        if self._process_id != os.getpid():  # A fork, which has neither the threads nor the lock's holder.
            self._lock, self._threads, self._process_id = threading.Lock(), None, os.getpid()
        return self._lock


def _known(sums: list[int]) -> Checksums:
    return lambda: sums


def _sum_all(chunks: Buffers) -> list[int]:
    # Unlike `checksum`, releases the GIL.
    return [xxhash.xxh3_64(chunk.data).intdigest() for chunk in chunks]


def threads_of(num_cores: int) -> int:
    """How many threads sum in a process that may use so many cores."""
    return min(MAX_THREADS, num_cores // CORES_A_THREAD)
