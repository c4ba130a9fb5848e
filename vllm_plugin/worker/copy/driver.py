"""CUDA's driver, called without releasing Python's lock (the GIL), and memory that is registered with CUDA.

Ranks of a tensor-parallel engine wait for their next step in a loop that releases and acquires the lock about a million
times a second. A thread that releases the lock beside such a loop must be woken to acquire it again, often in vain, and
torch releases the lock in every call: with a call for each block a rank's load took four times as long as the bytes. So
calls that only start work on the device, which return at once, keep the lock here, and calls that wait release it.

A transport's memory is registered (pinned) with CUDA, so that copies cross the bus straight from or to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from kvpool.transport.base import Buffers
from kvpool.transport.segment import MAP_STEP_BYTES, map_pages

logger = init_logger("vllm.kvpool.copy")

_SUCCESS, _NOT_READY = 0, 600
_EVENT_BLOCKING, _EVENT_NO_TIMING = 1, 2
_UNIFIED = 4
_CAPTURE_THREAD_LOCAL = 1
MAX_STEP_BYTES = (1 << 31) - 1
"""Largest distance of two rows in one copy."""
REGISTER_STEP_BYTES = 1 << 30
"""Of a registration, during which no thread of the engine starts work on its device: 45 ms if the pages are mapped, 700
if they are not (H200). Buffers that lie in two registrations take the slow way, so there are few."""


def enter(device: torch.device) -> None:
    """Lets this thread call the driver: threads start on device 0, without a context, and may call little of it while
    another thread captures a CUDA graph, as engines do at their start; what they call ends the capture with an error.
    """
    torch.cuda.set_device(device)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_THREAD_LOCAL)))


class Event:
    """A CUDA event: a position in a stream's work."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        _call("cuEventCreate", ctypes.byref(handle), _EVENT_BLOCKING | _EVENT_NO_TIMING)
        self.handle = handle.value or 0

    def __del__(self) -> None:
        if handle := getattr(self, "handle", 0):
            _held().cuEventDestroy_v2(ctypes.c_void_p(handle))

    def record(self, stream: int) -> None:
        """Sets the event behind all work that the stream has been given so far."""
        _call("cuEventRecord", ctypes.c_void_p(self.handle), ctypes.c_void_p(stream))

    def synchronize(self) -> None:
        """Returns when the event is reached, or was never set."""
        code = _held().cuEventQuery(ctypes.c_void_p(self.handle))
        if code == _NOT_READY:
            code = _free().cuEventSynchronize(ctypes.c_void_p(self.handle))
        _check(code, "cuEventSynchronize")


def wait(stream: int, event: int) -> None:
    """Lets a stream wait for an event, given by its handle."""
    _call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)


def copy(stream: int, target: int, source: int, nbytes: int) -> None:
    """Begins a copy between two addresses, on the device or in pinned memory."""
    _call(
        "cuMemcpyAsync",
        ctypes.c_uint64(target),
        ctypes.c_uint64(source),
        ctypes.c_size_t(nbytes),
        ctypes.c_void_p(stream),
    )


def copy_rows(
    stream: int, target: int, target_step: int, source: int, source_step: int, nbytes: int, count: int
) -> None:
    """Begins a copy of `count` rows of `nbytes`, `target_step` and `source_step` bytes apart."""
    if count == 1 or target_step == source_step == nbytes:
        copy(stream, target, source, nbytes * count)
        return
    rows = _Memcpy2D(
        src_type=_UNIFIED,
        src_device=source,
        src_pitch=source_step,
        dst_type=_UNIFIED,
        dst_device=target,
        dst_pitch=target_step,
        width=nbytes,
        height=count,
    )
    _call("cuMemcpy2DAsync_v2", ctypes.byref(rows), ctypes.c_void_p(stream))


_SIDE: dict[str, Any] = {
    "x": ctypes.c_size_t, "y": ctypes.c_size_t, "type": ctypes.c_int, "host": ctypes.c_void_p,
    "device": ctypes.c_uint64, "array": ctypes.c_void_p, "pitch": ctypes.c_size_t,
}  # fmt: skip


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = (
        *((f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in _SIDE.items()),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@functools.cache
def _held() -> ctypes.PyDLL:
    """The driver; calls keep the lock."""
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def _free() -> ctypes.CDLL:
    """The driver; calls release the lock."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    _check(getattr(_held(), name)(*arguments), name)


def _check(code: int, name: str) -> None:
    if code != _SUCCESS:
        raise RuntimeError(f"the CUDA driver's {name} failed with code {code} (see CUresult in cuda.h)")


@dataclass(frozen=True, slots=True)
class StridedRun:
    """`count` buffers that lie evenly spaced in memory, `step` bytes apart: one copy moves them all.

    Args:
        start: index of the first buffer, among those that are copied together.
        address: of the first buffer.
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
        if stop < len(offsets) and nbytes <= offsets[stop] - offsets[start] <= MAX_STEP_BYTES:
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
        enter(self._device)
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):  # The device has failed: the engine ends.
            enter(self._device)
            torch.cuda.cudart().cudaHostUnregister(address)


class PinnedMemory:
    """Memory that is registered with CUDA from its start on, and unregistered once it is closed and no copy uses it.

    A thread registers it part by part; until a part is registered, its buffers cannot be borrowed.

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
