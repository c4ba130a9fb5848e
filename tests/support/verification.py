"""Verifies blocks of a pool that has no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import finish
from kvpool_server.rpc.verifier import find_corrupt


def verify(pool: Pool, fingerprint: bytes, runs: Sequence[BlockRun], memory: Any) -> tuple[int, int]:
    """How many blocks were complete, and how many of them were dropped."""
    entries = finish(pool.complete_in_steps(fingerprint, runs))
    return len(entries), finish(pool.drop_corrupt_in_steps(find_corrupt(entries, memory)))
