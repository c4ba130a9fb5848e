"""Memory of a transport, registered (pinned) with CUDA so that copies cross the bus straight from or to it.

A thread of its own registers the memory part by part; until a part is registered, its buffers cannot be borrowed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.transport.base import Buffers
from kvpool.transport.segment import MAP_STEP_BYTES, map_pages
from vllm_plugin.worker.copy import driver

logger = init_logger("vllm.kvpool.copy")

REGISTER_STEP_BYTES = 1 << 30
"""Of a registration, during which no thread of the engine starts work on its device: 45 ms if the pages are mapped, 700
if they are not (H200). Buffers that lie in two registrations take the slow way, so there are few."""


@dataclass(frozen=True, slots=True)
class StridedRun:
    """Buffers that lie evenly spaced in memory: one copy moves them all.

    Args:
        start: index of the first buffer, among those that are copied together.
        count: of buffers.
        address: of the first buffer.
        step: bytes from one buffer to the next.
    """

    start: int
    count: int
    address: int
    step: int


def strided_runs(offsets: Sequence[int], nbytes: int, base: int) -> list[StridedRun]:
    """Buffers of `nbytes` at `offsets` of memory that begins at address `base`, in as few runs as possible.

    CUDA copies from and to one registration at a time, each of which covers `REGISTER_STEP_BYTES`.
    """
    runs, part_bytes = [], REGISTER_STEP_BYTES
    start = 0
    while start < len(offsets):
        stop, step = start + 1, nbytes
        if stop < len(offsets) and nbytes <= offsets[stop] - offsets[start] <= driver.MAX_STEP_BYTES:
            step = offsets[stop] - offsets[start]
        part = offsets[start] // part_bytes
        while stop < len(offsets) and offsets[stop] - offsets[stop - 1] == step and offsets[stop] // part_bytes == part:
            stop += 1
        runs.append(StridedRun(start, stop - start, base + offsets[start], step))
        start = stop
    return runs


class CudaHost:
    """The CUDA runtime, for one device: registers memory with its driver."""

    def __init__(self, device: torch.device):
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        """Returns 0, or an error."""
        for start in range(address, address + nbytes, MAP_STEP_BYTES):
            map_pages(start, min(MAP_STEP_BYTES, address + nbytes - start))  # If it fails, CUDA maps them.
        driver.enter(self._device)
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):  # The device has failed: the engine ends.
            driver.enter(self._device)
            torch.cuda.cudart().cudaHostUnregister(address)


class PinnedMemory:
    """Memory that is registered with CUDA from its start on, and unregistered once it is closed and no copy uses it.

    Attributes:
        memory: uint8, contiguous.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], host: CudaHost):
        self.memory = memory
        self._host = host
        self._start = memory.ctypes.data
        self._lock = threading.Lock()  # Guards what follows.
        self._registered_bytes = 0  # From the start; whole parts.
        self._num_users = 1  # Borrowers, and the thread until it ends.
        self._closing = threading.Event()
        threading.Thread(target=self._register, name="kvpool-pin", daemon=True).start()

    def borrow(self, buffers: Buffers) -> list[StridedRun]:
        """Where buffers of one size lie, to be copied to and from directly; empty if they cannot be.

        The memory stays registered until the borrower calls `give_back`, once for each answer that is not empty.
        """
        nbytes = len(buffers[0])
        offsets = [buffer.__array_interface__["data"][0] - self._start for buffer in buffers]
        if min(offsets) < 0 or max(offsets) + nbytes > self._registered_bytes:
            return []
        if any(first % REGISTER_STEP_BYTES + nbytes > REGISTER_STEP_BYTES for first in offsets):
            return []  # It lies in two parts.
        with self._lock:
            if self._closing.is_set():
                return []
            self._num_users += 1
        return strided_runs(offsets, nbytes, self._start)

    def give_back(self) -> None:
        """Ends one use of the memory."""
        with self._lock:
            self._num_users -= 1
            self._unregister_if_unused()

    def close(self) -> None:
        """Ends registering and borrowing. The memory is unregistered with its last use. Idempotent."""
        with self._lock:
            self._closing.set()
            self._unregister_if_unused()

    def _register(self) -> None:
        try:
            for start in range(0, self.memory.nbytes, REGISTER_STEP_BYTES):
                nbytes = min(REGISTER_STEP_BYTES, self.memory.nbytes - start)
                if self._closing.is_set():
                    break
                if error := self._host.register(self._start + start, nbytes):
                    logger.warning(
                        "kvpool: CUDA does not pin the memory that KV blocks pass through (error %d): copies take one "
                        "step more, and are slower",
                        error,
                    )
                    break
                self._registered_bytes = start + nbytes
            else:
                text = "kvpool: all %d bytes of the memory that KV blocks pass through are pinned"
                logger.info(text, self.memory.nbytes)
        finally:
            self.give_back()

    def _unregister_if_unused(self) -> None:
        if self._closing.is_set() and self._num_users == 0:
            for start in range(0, self._registered_bytes, REGISTER_STEP_BYTES):
                self._host.unregister(self._start + start)
            self._registered_bytes = 0
