"""Keeps the memory that gRPC messages come and go in.

By default glibc gives a freed megabyte back to the kernel, and the next message pays page faults for the same memory
again: more than the copy into it. What is kept is bounded by the largest traffic at one time, plus `KEEP_BYTES`.
"""

from __future__ import annotations

import ctypes

KEEP_BYTES = 64 << 20
MMAP_FROM_BYTES = 32 << 20
"""Larger blocks are still mapped and unmapped one by one; glibc allows no more."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Sets this process's allocator; False where it cannot be set (not glibc), which costs only speed.

    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES))
