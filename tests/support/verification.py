"""Verifies blocks of a pool that has no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.steps import finish
from kvpool_server.rpc.chunks import find_corrupt
from testbed.pool_at_once import PoolAtOnce


def verify(pool: PoolAtOnce, fingerprint: bytes, runs: Sequence[BlockRun], memory: Any) -> tuple[int, int]:
    """How many blocks were complete, and how many of them were dropped."""
    entries = finish(pool.removals.complete(fingerprint, runs))
    return len(entries), finish(pool.removals.drop_corrupt(finish(find_corrupt(entries, memory))))
