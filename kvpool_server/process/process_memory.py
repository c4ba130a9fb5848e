"""Tunes malloc and Python's garbage collector for the server.

By default malloc returns a freed megabyte to the kernel, and the next gRPC message pays page faults for it: more than
the copy into it. What messages have taken beyond `KEEP_BYTES` is returned some seconds after they have gone.

The collector tracks every entry, so a full collection among millions of entries takes a good part of a second, during
which the server answers no call. Entries do not need the collector: their reference counts free them. So objects that
survive one full collection are exempt from later ones (`gc.freeze`). Full collections run more often, and each examines
only objects made since the last. Cycles among young objects are still found.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEEP_BYTES = 64 << 20
"""Free memory at the end of the heap that malloc keeps."""
TRIM_EVERY_S = 4.0
MMAP_FROM_BYTES = 32 << 20
"""Larger allocations are still mapped and unmapped one by one; glibc allows no higher threshold."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
THRESHOLDS = (700, 10, 3)
"""Python's defaults are 700, 10, 10, with which more new entries wait for each full collection."""


def keep_freed_memory() -> None:
    """Sets malloc's thresholds for this process; a C library without them costs only speed. Source: mallopt(3)."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)


def own_bytes() -> int:
    """Memory of this process without the arena and program files."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) << 10


async def return_freed_memory() -> None:
    """Returns what malloc keeps to the kernel now and then, if the process has grown by `KEEP_BYTES`; until cancelled.

    A thread does it, and holds malloc's locks for a two-hundredth of the time at most. Source: malloc_trim(3).
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def seconds_of_trim() -> float:
        began = time.monotonic()
        trim(0)
        return time.monotonic() - began

    enough, wait_s = own_bytes() + KEEP_BYTES, TRIM_EVERY_S
    while trim is not None:
        await asyncio.sleep(wait_s)
        if own_bytes() > enough:
            wait_s = max(TRIM_EVERY_S, 200 * await asyncio.to_thread(seconds_of_trim))


def keep_collections_short() -> None:
    """Configures this process's garbage collector, and exempts what is there. Idempotent."""
    if freeze_survivors not in gc.callbacks:
        gc.callbacks.append(freeze_survivors)
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Turns the collector off while the body makes millions of lasting objects, and exempts these from it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_survivors(phase: str, info: dict[str, int]) -> None:
    """A callback of the collector: exempts from later collections what a full collection has kept."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
