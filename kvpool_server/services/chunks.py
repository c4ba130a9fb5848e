"""Puts and gets of single chunks, whose bytes travel in the messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvpool import wire
from kvpool.types import PutStatus
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.inline_chunks import get_chunk, put_chunk
from kvpool_server.services.handlers import Handlers, check_deadline, owner_of

INLINE_CHUNKS_PER_TURN = 64
"""Chunks of one PutChunks message that are stored before other calls get a turn."""


class ChunkHandlers(Handlers):
    """The RPCs of clients that see no tickets, leases or regions."""

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses, owner = bytearray(), owner_of(context)
        async for request in requests:
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
        return pb.PutChunksResponse(boot_token=self.boot_token, statuses=bytes(statuses))

    async def GetChunks(self, request: pb.GetChunksRequest, context: Any) -> AsyncIterator[pb.GetChunksResponse]:
        self.drain.check()
        check_deadline(context)
        self.check_count(len(request.keys), "keys")
        for index, key in enumerate(request.keys):
            address = wire.decode_key(key)
            self.check_visible(address.namespace)
            chunk = await get_chunk(self.tiered, self.memory, address, self.verifier.verify)
            reply = pb.GetChunksResponse(boot_token=self.boot_token, index=index, found=chunk is not None)
            if chunk is not None:
                self.metrics.add_bytes("read", len(chunk.payload))
                reply.chunk.CopyFrom(wire.encode_chunk(chunk))
            yield reply
