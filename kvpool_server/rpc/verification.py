"""Compares blocks with their checksums where they lie."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.protocol.hashing import MAX_LOCKED_BYTES
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.steps import Run, Steps, finish
from kvpool_server.tiers.tier import is_sound

VERIFIED_BYTES = 64 << 20
"""Bytes that a thread verifies before it looks whether the call was cancelled."""


async def verified(entries: Sequence[Entry], memory: npt.NDArray[np.uint8], run: Run) -> list[Entry]:
    """The corrupt ones of complete entries of one group, which are pinned. Large chunks are hashed in a thread."""
    if not entries:
        return []
    spec, corrupt = entries[0].group.spec, list[Entry]()
    if spec.chunk_bytes <= MAX_LOCKED_BYTES:  # A thread that hashes many keeps the event loop waiting.
        with contextlib.closing(find_corrupt(entries, memory)) as steps:  # They end with the call.
            return await run(steps)
    count = max(1, VERIFIED_BYTES // spec.slot_bytes)
    for start in range(0, len(entries), count):
        corrupt += await asyncio.to_thread(finish, find_corrupt(entries[start : start + count], memory))
    return corrupt


def find_corrupt(entries: Sequence[Entry], memory: npt.NDArray[np.uint8]) -> Steps[list[Entry]]:
    """Those of some complete entries whose bytes in the arena differ from their checksums; a step for each entry."""
    corrupt: list[Entry] = []
    for entry in entries:
        view = memory[entry.offset :][: entry.group.spec.slot_bytes].data
        if not is_sound(view, entry.checksums):
            corrupt.append(entry)
        yield
    return corrupt
