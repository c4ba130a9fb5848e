"""Keeps Python's cyclic garbage collector from stopping the server.

An entry is an object that the collector tracks, so a full collection among millions of them takes a good part of a
second; nobody is answered meanwhile. Entries need no collector: they are freed by their reference counts. So what has
come through one full collection is looked at by no later one (`gc.freeze`), and full collections come more often: each
sees only what is new since the last. Cycles among young objects are found as ever.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (700, 10, 3)
"""Python's own are 700, 10, 10: more entries are new by the time of a full collection."""


def keep_collections_short() -> None:
    """Sets this process's collector. Idempotent."""
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)
    gc.set_threshold(*THRESHOLDS)
    gc.collect()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """While millions of objects are made that stay: looking through them again and again costs as much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
