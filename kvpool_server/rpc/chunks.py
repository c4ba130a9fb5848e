"""Puts and gets whose bytes travel in the messages: of chunks by their keys, or of the regions of tickets and leases.

Regions are for engines that reach the arena in no other way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from kvpool.protocol import wire
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import Chunk, PutStatus
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.leases import Owner
from kvpool_server.rpc.handlers import Context, Handlers, owner_of
from kvpool_server.rpc.inline_chunks import get_chunk, put_chunk

PIECE_BYTES = 1 << 20
"""Largest payload of one message that carries bytes of regions. Larger messages copy no faster; smaller ones cost more
messages."""
INLINE_CHUNKS_PER_TURN = 64
"""Chunks of one PutChunks message that are stored before other calls get a turn."""
_PAYLOAD = pb.GetChunksResponse.PAYLOAD_FIELD_NUMBER


class ChunkHandlers(Handlers):
    """The RPCs PutChunks and GetChunks."""

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses, nbytes, owner = bytearray(), 0, owner_of(context)
        async for request in requests:
            if request.ticket_id or request.payload:
                nbytes += self._write(request, owner)
            if request.chunks:
                self.drain.check()
            self.check_count(len(request.chunks), "chunks")
            for nth, message in enumerate(request.chunks, 1):
                self.check_visible(wire.decode_key(message.key).namespace)
                chunk = wire.decode_chunk(message)
                status = await put_chunk(self.pool, self.memory, chunk, self.run, owner)
                statuses.append(status)
                if status is PutStatus.GRANTED:
                    self.metrics.add_bytes("write", len(chunk.payload))
                if nth % INLINE_CHUNKS_PER_TURN == 0:
                    await asyncio.sleep(0)  # Other calls do not wait for the whole message.
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
            yield self._encoded(index, await get_chunk(self.tiered, self.memory, address))
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
