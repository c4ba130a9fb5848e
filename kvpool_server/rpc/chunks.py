"""The RPCs that touch the arena's bytes: PutChunks and GetChunks, whose bytes travel in the messages, and Verify.

A message names its bytes by the keys of chunks or, for engines that reach the arena in no other way, by the regions of
a ticket or lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from kvpool.protocol import wire
from kvpool.protocol.errors import ChecksumError, InvalidRequestError
from kvpool.protocol.hashing import MAX_LOCKED_BYTES, checksum
from kvpool.protocol.messages import MESSAGE_BYTES
from kvpool.protocol.types import BlockRun, Chunk, PoolKey, PutStatus, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.access.authentication import Context
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.leases import Owner
from kvpool_server.cache.server_access import pin
from kvpool_server.cache.steps import Run, Steps, finish
from kvpool_server.rpc.handlers import Handlers, owner_of
from kvpool_server.sharing.fair_slots import FairSlots
from kvpool_server.tiering.tiered_pool import MAX_WAIT_MS
from kvpool_server.tiers.tier import is_sound

log = structlog.get_logger()

PIECE_BYTES = 1 << 20
"""Largest payload of a reply that carries bytes of regions. Larger messages copy no faster; smaller ones cost more
messages."""
WRITTEN_BYTES = MESSAGE_BYTES - (1 << 10)
"""Of a request."""
MAX_CHUNK_BYTES = 4 << 20
TTL_MS = 60_000
VERIFIED_BYTES = 64 << 20
"""Bytes that a thread verifies before it looks whether the call was cancelled."""
MAX_WAITING = 64
"""Calls of `Verify` of one caller that wait for their turn: one call at a time verifies blocks."""
_PAYLOAD = pb.GetChunksResponse.PAYLOAD_FIELD_NUMBER


class ChunkHandlers(Handlers):
    """The RPCs PutChunks, GetChunks and Verify."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._verifications = FairSlots(1, 1, MAX_WAITING)

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses, nbytes, owner = bytearray(), 0, owner_of(context)
        async for request in requests:
            if request.ticket_id or request.payload:
                nbytes += self._write(request, owner)
            if request.chunks:
                self.drain.check()
            self.check_count(len(request.chunks), "chunks")
            with closing(self._put(request.chunks, owner)) as steps:  # They end with the call, as its request does.
                statuses += await self.run(steps)
        return pb.PutChunksResponse(boot_token=self.boot_token, statuses=bytes(statuses), nbytes=nbytes)

    def _write(self, request: pb.PutChunksRequest, owner: Owner) -> int:
        """Writes bytes to a region of a ticket, which a drain lets finish; returns how many."""
        payload = np.frombuffer(request.payload, np.uint8)
        self.pool.writable(request.ticket_id, request.offset, len(payload), owner)
        self.memory[request.offset : request.offset + len(payload)] = payload
        self.metrics.add_bytes("write", len(payload))
        return len(payload)

    def _encoded(self, index: int, chunk: Chunk | None) -> bytes:
        """The reply of one key, with no other copy of its payload: a client may be slow to read it."""
        reply = pb.GetChunksResponse(boot_token=self.boot_token, index=index, found=chunk is not None)
        if chunk is not None:
            self.metrics.add_bytes("read", len(chunk.payload))
            reply.chunk.CopyFrom(wire.encode_chunk(chunk))
        return reply.SerializeToString()

    async def GetChunks(self, request: pb.GetChunksRequest, context: Context) -> AsyncIterator[bytes]:
        self.check_count(len(request.keys), "keys")
        self.check_count(len(request.offsets), "regions")
        if request.offsets and not request.region_bytes:
            raise InvalidRequestError("region_bytes is 0; give the bytes of one region")
        if request.keys:
            self.drain.check()
        for index, key in enumerate(request.keys):
            address = wire.decode_key(key)
            self.check_visible(address.namespace)
            yield self._encoded(index, await self._get(address))
        owner, last = owner_of(context), len(request.offsets) - 1
        for nth, region in enumerate(request.offsets):
            end = region + request.region_bytes
            for offset in range(region, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - offset)
                self.pool.readable(request.lease_id, offset, size, owner)
                self.metrics.add_bytes("read", size)
                if nth == last and offset + size == end:
                    context.set_code(grpc.StatusCode.OK)  # A client may hang up as soon as it has every byte.
                piece = pb.GetChunksResponse(boot_token=self.boot_token, offset=offset)
                yield wire.with_payload(piece, _PAYLOAD, self.memory[offset : offset + size].data)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        fingerprint, runs = self.fingerprint(request.namespace), self.runs(request.runs)
        async with self._verifications.slot(owner_of(context).name):
            found = await self.run(self.pool.removals.complete(fingerprint, runs))
            entries = [entry for entry in found if entry.live]  # Others may have dropped some since the last step.
            lease_id = pin(self.pool, entries)  # Keeps the bytes in their place.
            try:
                corrupt = await verified(entries, self.memory, self.run)
            finally:
                self.pool.release([lease_id])
        dropped = await self.run(self.pool.removals.drop_corrupt(corrupt))
        if dropped:
            log.error("corrupt blocks dropped", checked=len(entries), dropped=dropped)
        return pb.VerifyResponse(boot_token=self.boot_token, num_checked=len(entries), num_dropped=dropped)

    def _put(self, chunks: Sequence[pb.Chunk], owner: Owner) -> Steps[bytes]:
        """As `_put_one` of each; a step stores one chunk."""
        statuses = bytearray()
        for message in chunks:
            if statuses:
                yield
            self.check_visible(wire.decode_key(message.key).namespace)
            chunk = wire.decode_chunk(message)
            status = yield from self._put_one(chunk, owner)
            statuses.append(status)
            if status is PutStatus.GRANTED:
                self.metrics.add_bytes("write", len(chunk.payload))
        return bytes(statuses)

    def _put_one(self, chunk: Chunk, owner: Owner) -> Steps[PutStatus]:
        """Stores a chunk in the arena. GRANTED: the chunk has been stored.

        Raises ChecksumError, InvalidRequestError for a payload of another length than the group's, and OutOfSpaceError.
        """
        key = chunk.key
        if checksum(chunk.payload) != chunk.checksum:
            raise ChecksumError(
                f"chunk {key.block_hash.hex()} shard {key.shard}: the payload's xxh3-64 is not {chunk.checksum:#x}"
            )
        block = BlockRun(key.group_idx, [key.block_hash], chunk.parent_hash)
        nbytes = self.pool.group_spec(key.namespace, block).chunk_bytes
        if len(chunk.payload) != nbytes:
            raise InvalidRequestError(
                f"chunk {key.block_hash.hex()} has {len(chunk.payload)} bytes; group {key.group_idx}'s chunks have "
                f"{nbytes}"
            )
        shards = ShardRange(key.shard, 1)
        grant = yield from self.put_start(key.namespace, [block], shards, TTL_MS, owner)
        for offset in grant.offsets:
            self.pool.writable(grant.ticket_id, offset, nbytes, owner)
            self.memory[offset : offset + nbytes] = np.frombuffer(chunk.payload, np.uint8)
            finish(self.pool.put_end_in_steps(grant.ticket_id, [chunk.checksum], owner))
        return grant.statuses[0]

    async def _get(self, key: PoolKey) -> Chunk | None:
        """The chunk at an address; None if the block is missing, or if its bytes have changed, which drops it.

        Raises InvalidRequestError if the group's chunks are larger than a message may be.
        """
        pool, run = self.pool, BlockRun(key.group_idx, [key.block_hash])
        nbytes = pool.group_spec(key.namespace, run).chunk_bytes
        if nbytes > MAX_CHUNK_BYTES:
            raise InvalidRequestError(
                f"group {key.group_idx}'s chunks have {nbytes} bytes; GetChunks sends at most {MAX_CHUNK_BYTES}: look "
                "up and read instead"
            )
        # The client gets no lease, so it cannot look up again: the lookup waits for a tier.
        found = await self.tiered.lookup(key.namespace, [run], True, lease_ttl_ms=TTL_MS, wait_ms=MAX_WAIT_MS)
        if not found.lease_id:
            return None
        try:
            located = finish(pool.lookups.get(found.lease_id, key.namespace, [run], ShardRange(key.shard, 1)))
        finally:
            pool.release([found.lease_id])
        if not located.offsets:  # It has been evicted since, with an extent of its tenant's.
            return None
        # The event loop runs no other call between the release and this copy.
        payload = self.memory[located.offsets[0] : located.offsets[0] + nbytes].tobytes()
        if checksum(payload) != located.checksums[0]:
            finish(pool.removals.drop_corrupt(finish(pool.removals.complete(key.namespace, [run]))))
            log.error("corrupt block dropped", block=key.block_hash.hex())
            return None
        return Chunk(key, payload, located.checksums[0])


async def verified(entries: Sequence[Entry], memory: npt.NDArray[np.uint8], run: Run) -> list[Entry]:
    """The corrupt ones of complete entries of one group, which are pinned. Large chunks are hashed in a thread."""
    if not entries:
        return []
    spec, corrupt = entries[0].group.spec, list[Entry]()
    if spec.chunk_bytes <= MAX_LOCKED_BYTES:  # A thread that hashes many keeps the event loop waiting.
        with closing(find_corrupt(entries, memory)) as steps:  # They end with the call.
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
