"""What the transfers of a transport share: threads that help callers move and sum bytes, and memory that the bytes of
callbacks pass through.

A caller never waits for a thread to become free: what no helper has begun, the caller does itself or drops.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kvpool.protocol.errors import PoolTimeoutError
from kvpool.transport.base import Bytes

STAGING_BYTES = 256 << 20
UNIT_BYTES = 1 << 20
MAX_MOVERS = 8
CORES_A_MOVER = 2
"""Over a network: the server has as many threads that move the same bytes, perhaps on the same host."""

T = TypeVar("T")


class Help(Future[None]):
    """Work that was given to the helpers. `cancel` says whether no helper has begun the work, nor will."""

    def __init__(self, work: Callable[[], object]):
        super().__init__()
        self._work = work

    def begin(self) -> None:
        """Does the work, on a helper's thread, unless it was cancelled."""
        if self.set_running_or_notify_cancel():
            try:
                self._work()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(None)

    def finish(self) -> None:
        """Does the work unless a helper has begun it; then waits for its end. Raises what the work raises."""
        if self.cancel():
            self._work()
        else:
            self.result()

    def drop(self) -> None:
        """Waits for the work's end if a helper has begun it; else nobody will. Raises nothing."""
        if not self.cancel():
            self.exception()


class Helpers:
    """At most `num_threads` threads, started when they are needed. Thread-safe. A fork gets threads of its own."""

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._process_id = os.getpid()

    def submit(self, work: Callable[[], object]) -> Help:
        """Lets a helper do some work, as soon as one is free."""
        given = Help(work)
        with self._locked():
            if self.num_threads:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(self.num_threads, "kvpool-helper")
                # The interpreter ends and accepts no more work, or it cannot start another thread: a thread that exists
                # may then begin the work all the same.
                with contextlib.suppress(RuntimeError):
                    self._threads.submit(given.begin)
        return given

    def share(self, items: Sequence[T], act: Callable[[T], object]) -> None:
        """Acts on every item once, on the caller's thread and on the helpers', in about their order.

        Raises the first error; then the remaining items are left out, and no thread acts any more.
        """
        left = iter(items)
        taking = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            while not errors:
                with taking:
                    item = next(left, None)
                if item is None:
                    return
                try:
                    act(item)
                except BaseException as error:
                    errors.append(error)

        shares = [self.submit(work) for _ in range(min(self.num_threads, len(items) - 1))]
        work()
        for share in shares:
            share.drop()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Ends the threads after what they have begun. Idempotent; later work is left to its caller."""
        with self._locked():
            self.num_threads = 0
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def _locked(self) -> threading.Lock:
        if self._process_id != os.getpid():  # A fork, which has neither the threads nor the lock's holder.
            self._lock, self._threads, self._process_id = threading.Lock(), None, os.getpid()
        return self._lock


def movers_of(num_cores: int, sharers: int = 1, cores_a_mover: int = CORES_A_MOVER) -> int:
    """How many threads move the bytes of one transfer, the caller's among them, and over how many connections.

    Args:
        num_cores: that this process may use.
        sharers: clients that share these cores, such as the ranks of one engine.
        cores_a_mover: 1 through shared memory, where no other process moves bytes.
    """
    return max(1, min(MAX_MOVERS, num_cores // cores_a_mover // sharers))


class Staging:
    """One array, `memory`, uint8 [nbytes], which a GPU's driver pins once, and which all transfers share. Thread-safe.

    Pages that were never used cost nothing. The lowest free address is lent first.

    Args:
        nbytes: bound of what all transfers have together; a buffer that is larger by itself is memory of its own.
        memory: is there already, and is the bound instead; None: memory of its own.
    """

    def __init__(self, nbytes: int = STAGING_BYTES, memory: Bytes | None = None):
        if memory is None:
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # The kernel may have no huge pages.
                pages.madvise(mmap.MADV_HUGEPAGE)
            memory = np.frombuffer(pages, np.uint8)
        self.memory: Bytes = memory
        self._lent = bytearray(len(memory) // UNIT_BYTES)  # 1 for each unit that is lent, else 0.
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def borrowed(self, nbytes: int, count: int, timeout_s: float) -> Iterator[list[Bytes]]:
        """Up to `count` buffers of `nbytes`, at least one. Raises PoolTimeoutError if there is none in `timeout_s`."""
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
