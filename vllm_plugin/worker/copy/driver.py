"""CUDA's driver, called without releasing Python's lock (the GIL).

Ranks of a tensor-parallel engine wait for their next step in a loop that releases and acquires the lock about a million
times a second. A thread that releases the lock beside such a loop must be woken to acquire it again, often in vain, and
torch releases the lock in every call: with a call for each block a rank's load took four times as long as the bytes. So
calls that only start work on the device, which return at once, keep the lock here, and calls that wait release it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_SUCCESS, _NOT_READY = 0, 600
_EVENT_BLOCKING, _EVENT_NO_TIMING = 1, 2
_UNIFIED = 4
_CAPTURE_THREAD_LOCAL = 1
MAX_STEP_BYTES = (1 << 31) - 1
"""Largest distance of two rows in one copy."""


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
