"""Has glibc's malloc keep freed memory for the next gRPC message.

By default malloc returns a freed megabyte to the kernel, and the next message pays page faults for it: more than the
copy into it. The memory kept is bounded by the messages in flight at one time, plus `KEEP_BYTES`.
"""

from __future__ import annotations

import ctypes

KEEP_BYTES = 64 << 20
"""Free memory at the end of the heap that malloc keeps."""
MMAP_FROM_BYTES = 32 << 20
"""Larger allocations are still mapped and unmapped one by one; glibc allows no higher threshold."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Sets malloc's thresholds for this process; False if its C library has none, which costs only speed.

    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES))
