"""Puts and gets of single chunks whose bytes travel in the messages: the client sees no tickets, leases or regions."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol.errors import ChecksumError, InvalidRequestError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun, Chunk, PoolKey, PutStatus, ShardRange
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Run, finish
from kvpool_server.tiering.tiered_pool import TieredPool

log = structlog.get_logger()

MAX_CHUNK_BYTES = 4 << 20
TTL_MS = 60_000
PROMOTION_TIMEOUT_S = 2.0
"""How long a get waits for a block to be promoted from a tier. The client has no lease, so it cannot look up again."""


async def put_chunk(pool: Pool, memory: npt.NDArray[np.uint8], chunk: Chunk, run: Run, owner: Owner) -> PutStatus:
    """Stores a chunk in the arena. GRANTED: the chunk has been stored.

    Args:
        memory: the arena: uint8 [arena_bytes].
        run: does work in steps.
        owner: of the ticket.

    Raises:
        ChecksumError: the payload differs from its checksum.
        InvalidRequestError: the payload is not as long as the group's chunks are.
        OutOfSpaceError: the pool has no room.
    """
    key = chunk.key
    if checksum(chunk.payload) != chunk.checksum:
        raise ChecksumError(
            f"chunk {key.block_hash.hex()} shard {key.shard}: the payload's xxh3-64 is not {chunk.checksum:#x}"
        )
    block = BlockRun(key.group_idx, [key.block_hash], chunk.parent_hash)
    nbytes = pool.group_spec(key.namespace, block).chunk_bytes
    if len(chunk.payload) != nbytes:
        raise InvalidRequestError(
            f"chunk {key.block_hash.hex()} has {len(chunk.payload)} bytes; group {key.group_idx}'s chunks have {nbytes}"
        )
    grant = await run(pool.put_start_in_steps(key.namespace, [block], ShardRange(key.shard, 1), TTL_MS, owner))
    for offset in grant.offsets:
        pool.writable(grant.ticket_id, offset, nbytes, owner)
        memory[offset : offset + nbytes] = np.frombuffer(chunk.payload, np.uint8)
        finish(pool.put_end_in_steps(grant.ticket_id, [chunk.checksum], owner))
    return grant.statuses[0]


async def get_chunk(tiered: TieredPool, memory: npt.NDArray[np.uint8], key: PoolKey) -> Chunk | None:
    """The chunk at an address; None if the block is missing, or if its bytes have changed, which drops it.

    Args:
        memory: the arena: uint8 [arena_bytes].

    Raises InvalidRequestError if the group's chunks are larger than a message may be.
    """
    pool = tiered.pool
    run = BlockRun(key.group_idx, [key.block_hash])
    nbytes = pool.group_spec(key.namespace, run).chunk_bytes
    if nbytes > MAX_CHUNK_BYTES:
        raise InvalidRequestError(
            f"group {key.group_idx}'s chunks have {nbytes} bytes; GetChunks sends at most {MAX_CHUNK_BYTES}: look "
            "up and read instead"
        )
    lease_id = await _lease(tiered, key.namespace, run)
    if not lease_id:
        return None
    try:
        located = finish(pool.lookups.get(lease_id, key.namespace, [run], ShardRange(key.shard, 1)))
    finally:
        pool.release([lease_id])
    # The event loop runs no other call between the release and this copy.
    payload = memory[located.offsets[0] : located.offsets[0] + nbytes].tobytes()
    if checksum(payload) != located.checksums[0]:
        finish(pool.removals.drop_corrupt(finish(pool.removals.complete(key.namespace, [run]))))
        log.error("corrupt block dropped", block=key.block_hash.hex())
        return None
    return Chunk(key, payload, located.checksums[0])


async def _lease(tiered: TieredPool, fingerprint: bytes, run: BlockRun) -> int:
    """A lease on a block, which may first have to be promoted from a tier; 0 for a miss."""
    ends_at = time.monotonic() + PROMOTION_TIMEOUT_S
    while True:
        found = await tiered.lookup(fingerprint, [run], prefix_only=True, lease_ttl_ms=TTL_MS)
        if found.lease_id or not found.retry_after_ms or time.monotonic() > ends_at:
            return found.lease_id
        await asyncio.sleep(found.retry_after_ms / 1000)
