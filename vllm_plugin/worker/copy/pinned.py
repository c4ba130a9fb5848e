"""Memory of a transport, registered (pinned) with CUDA so that copies cross the bus straight from or to it.

A thread of its own registers the memory step by step; until a step is registered, its buffers cannot be borrowed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.transport.base import Buffers
from vllm_plugin.worker.copy import driver

logger = init_logger("vllm.kvpool.copy")

REGISTER_STEP_BYTES = 1 << 30


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
    """Buffers of `nbytes` at `offsets` of memory that begins at address `base`, in as few runs as possible."""
    runs = []
    start = 0
    while start < len(offsets):
        stop, step = start + 1, nbytes
        if stop < len(offsets) and nbytes <= offsets[stop] - offsets[start] <= driver.MAX_STEP_BYTES:
            step = offsets[stop] - offsets[start]
        # CUDA copies from and to one registration at a time.
        registration = offsets[start] // REGISTER_STEP_BYTES
        while (
            stop < len(offsets)
            and offsets[stop] - offsets[stop - 1] == step
            and offsets[stop] // REGISTER_STEP_BYTES == registration
        ):
            stop += 1
        runs.append(StridedRun(start, stop - start, base + offsets[start], step))
        start = stop
    return runs


class PinnedMemory:
    """Memory that is registered with CUDA from its start on, and unregistered once it is closed and no copy uses it.

    Attributes:
        memory: uint8, contiguous.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], device: torch.device):
        self.memory = memory
        self._device = device
        self._start = memory.ctypes.data
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._registered_bytes = 0
        self._users = 1  # The thread, until it ends.
        self._closing = False
        threading.Thread(target=self._register, name="kvpool-pin", daemon=True).start()

    def borrow(self, buffers: Buffers) -> list[StridedRun] | None:
        """Where buffers of one size can be copied to and from directly, until `give_back`; None if they cannot."""
        nbytes = len(buffers[0])
        offsets = [buffer.__array_interface__["data"][0] - self._start for buffer in buffers]
        with self._lock:
            if self._closing or not all(self._covers(offset, nbytes) for offset in offsets):
                return None
            self._users += 1
        return strided_runs(offsets, nbytes, self._start)

    def give_back(self) -> None:
        """Ends one `borrow`."""
        with self._lock:
            self._users -= 1
            self._unregister_if_unused()

    def close(self) -> None:
        """Ends registering and borrowing; the memory is unregistered when the last user has given it back."""
        with self._lock:
            self._closing = True
            self._unregister_if_unused()

    def _covers(self, first: int, nbytes: int) -> bool:
        last = first + nbytes - 1
        return (
            first >= 0 and last < self._registered_bytes and first // REGISTER_STEP_BYTES == last // REGISTER_STEP_BYTES
        )

    def _register(self) -> None:
        torch.cuda.set_device(self._device)
        for at in range(0, self.memory.nbytes, REGISTER_STEP_BYTES):
            if self._closing:
                break
            nbytes = min(REGISTER_STEP_BYTES, self.memory.nbytes - at)
            error = torch.cuda.cudart().cudaHostRegister(self._start + at, nbytes, 0)
            if int(error) != 0:
                logger.warning(
                    "kvpool: CUDA does not pin the memory that KV blocks pass through (%s): copies take one step more, "
                    "and are slower",
                    error,
                )
                break
            with self._lock:
                self._registered_bytes = at + nbytes
        else:
            logger.info("kvpool: all %d bytes of the memory that KV blocks pass through are pinned", self.memory.nbytes)
        self.give_back()

    def _unregister_if_unused(self) -> None:
        if self._closing and self._users == 0:
            for at in range(0, self._registered_bytes, REGISTER_STEP_BYTES):
                torch.cuda.cudart().cudaHostUnregister(self._start + at)
            self._registered_bytes = 0
