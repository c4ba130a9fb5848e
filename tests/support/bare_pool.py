"""A pool of equal blocks without bytes: an arena consists of offsets."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvpool.protocol.types import BlockRun, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.eviction import POLICIES
from testbed.pool_at_once import PoolAtOnce
from tests.support.values import group_spec, namespace_spec

SLOT_BYTES = 2 << 20


def make_pool(capacity: int, policy: str, clock: Callable[[], float]) -> tuple[PoolAtOnce, bytes]:
    """A pool of `capacity` blocks, and the fingerprint of a namespace in it."""
    arena = Arena(capacity * SLOT_BYTES, capacity * SLOT_BYTES)
    pool = PoolAtOnce(arena, clock, itertools.count(1).__next__, policy=POLICIES[policy])
    spec = namespace_spec(group_spec(chunk_bytes=SLOT_BYTES))
    return pool, pool.open_namespace(spec)[0].fingerprint


def put(pool: PoolAtOnce, fingerprint: bytes, run: BlockRun) -> None:
    """Stores blocks of one shard."""
    grant = pool.put_start(fingerprint, [run], ShardRange(0, 1))
    if grant.ticket_id:
        pool.put_end(grant.ticket_id, [0] * len(grant.offsets))
