"""Keeps the memory of gRPC messages in this process when they are freed.

By default glibc returns a freed megabyte to the kernel, and the next message pays page faults, which cost more than the
copy into it. The memory kept is bounded by the largest traffic at one time, plus `KEEP_BYTES`.
"""

from __future__ import annotations

import ctypes

KEEP_BYTES = 64 << 20
MMAP_FROM_BYTES = 32 << 20
"""Larger allocations are still mapped and unmapped one by one; glibc allows no higher threshold."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Configures this process's malloc. False if it cannot be configured (not glibc), which costs only speed.

    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES))
