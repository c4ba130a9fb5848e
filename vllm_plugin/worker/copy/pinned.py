"""Memory of a transport, registered (pinned) with CUDA so that copies cross the bus straight from or to it.

A thread of its own registers the memory part by part; until a part is registered, its buffers cannot be borrowed. Of a
tenant's memory the parts are extents, which come and go: the thread registers those that have come, and unregisters
those that have gone, because registered pages stay in memory when an extent loses them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.transport.base import Buffers, Extents
from vllm_plugin.worker.copy import driver

logger = init_logger("vllm.kvpool.copy")

REGISTER_STEP_BYTES = 1 << 30
FOLLOW_S = 0.2
"""How often the thread looks which extents have come and gone."""


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


def strided_runs(
    offsets: Sequence[int], nbytes: int, base: int, part_bytes: int = REGISTER_STEP_BYTES
) -> list[StridedRun]:
    """Buffers of `nbytes` at `offsets` of memory that begins at address `base`, in as few runs as possible.

    CUDA copies from and to one registration at a time, each of which covers `part_bytes`.
    """
    runs = []
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


class Host(Protocol):
    """Registers memory with the driver."""

    def enter(self) -> None:
        """Called by a thread before it registers."""

    def register(self, address: int, nbytes: int) -> int:
        """Returns 0, or an error."""

    def unregister(self, address: int) -> None:
        """Undoes `register`."""


class CudaHost:
    """The CUDA runtime, for one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def register(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


@dataclass(slots=True)
class _Part:
    """Memory that is registered at once.

    Attributes:
        state: of the extent when it was registered; 0: it is not registered.
        num_loans: that it is part of.
    """

    address: int
    nbytes: int
    state: int = 0
    num_loans: int = 0


class Loan:
    """Buffers in registered memory, which stays registered until `give_back`.

    Attributes:
        runs: where they are.
    """

    def __init__(self, memory: PinnedMemory, runs: list[StridedRun], parts: set[int]):
        self.runs = runs
        self._memory = memory
        self._parts = parts

    def give_back(self) -> None:
        self._memory._end_loan(self._parts)


class PinnedMemory:
    """Memory that is registered with CUDA from its start on, and unregistered once it is closed and no copy uses it.

    Args:
        extents: which parts have pages; None: all have, and keep them.

    Attributes:
        memory: uint8, contiguous.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], host: Host, extents: Extents | None = None):
        self.memory = memory
        self._host = host
        self._extents = extents
        self._start = memory.ctypes.data
        self._part_bytes = REGISTER_STEP_BYTES if extents is None else extents.extent_bytes
        self._parts = [
            _Part(self._start + at, min(self._part_bytes, memory.nbytes - at))
            for at in range(0, memory.nbytes, self._part_bytes)
        ]
        self._lock = threading.Lock()  # Guards the parts' attributes, and what follows.
        self._num_users = 1  # Loans, and the thread until it ends.
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="kvpool-pin", daemon=True).start()

    def borrow(self, buffers: Buffers) -> Loan | None:
        """Buffers of one size that can be copied to and from directly; None if they cannot."""
        nbytes = len(buffers[0])
        offsets = [buffer.__array_interface__["data"][0] - self._start for buffer in buffers]
        if min(offsets) < 0 or max(offsets) + nbytes > self.memory.nbytes:
            return None
        if any(first % self._part_bytes + nbytes > self._part_bytes for first in offsets):
            return None  # It lies in two parts.
        parts = {first // self._part_bytes for first in offsets}
        runs = strided_runs(offsets, nbytes, self._start, self._part_bytes)
        with self._lock:
            if self._closing.is_set() or not all(map(self._is_pinned, parts)):
                return None
            for idx in parts:
                self._parts[idx].num_loans += 1
            self._num_users += 1
        return Loan(self, runs, parts)

    def _end_loan(self, parts: set[int]) -> None:
        with self._lock:
            for idx in parts:
                self._parts[idx].num_loans -= 1
            self._end_use()

    def close(self) -> None:
        """Ends registering and borrowing. The memory is unregistered with the last loan. Idempotent."""
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._unregister_if_unused()

    def _state_of(self, idx: int) -> int:
        return 1 if self._extents is None else self._extents.state(idx)

    def _is_pinned(self, idx: int) -> bool:
        """Whether the part's registered pages are those that lie there now."""
        return self._parts[idx].state == self._state_of(idx) != 0

    def _run(self) -> None:
        self._host.enter()
        may_register = True
        while not self._closing.is_set():
            for idx in range(len(self._parts)):
                may_register = self._follow(idx, may_register)
            if self._extents is None:
                break
            self._closing.wait(FOLLOW_S)
        if may_register and self._extents is None and not self._closing.is_set():
            logger.info("kvpool: all %d bytes of the memory that KV blocks pass through are pinned", self.memory.nbytes)
        with self._lock:
            self._end_use()

    def _follow(self, idx: int, may_register: bool) -> bool:
        """Registers a part whose pages have come, or unregisters one whose pages have gone.

        Returns whether further parts may be registered.
        """
        part, state = self._parts[idx], self._state_of(idx)
        with self._lock:
            if part.state not in (0, state) and not part.num_loans:
                self._host.unregister(part.address)
                part.state = 0
        if part.state or not state or not may_register or self._closing.is_set():
            return may_register
        if error := self._host.register(part.address, part.nbytes):
            logger.warning(
                "kvpool: CUDA does not pin the memory that KV blocks pass through (error %d): copies take one step "
                "more, and are slower",
                error,
            )
            return False
        with self._lock:
            part.state = state  # As before registering: if it has changed since, what is registered is of no use.
        return True

    def _end_use(self) -> None:
        self._num_users -= 1
        self._unregister_if_unused()

    def _unregister_if_unused(self) -> None:
        if self._closing.is_set() and self._num_users == 0:
            for part in self._parts:
                if part.state:
                    self._host.unregister(part.address)
                    part.state = 0
