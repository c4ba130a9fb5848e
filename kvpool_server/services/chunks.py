"""Puts and gets of single chunks, whose bytes travel in the messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.types import PutStatus
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.inline_chunks import get_chunk, put_chunk
from kvpool_server.metrics import RpcMetrics
from kvpool_server.services.call import check_deadline, owner_of
from kvpool_server.services.served_pool import ServedPool
from kvpool_server.verifier import Verifier

INLINE_CHUNKS_PER_TURN = 64
"""Chunks of one PutChunks message that are stored before other calls get a turn."""


class ChunkService:
    """See the module.

    Args:
        memory: the arena, uint8 [arena_bytes].
        verifier: drops blocks of which a get has found wrong bytes.
    """

    def __init__(self, served: ServedPool, memory: npt.NDArray[np.uint8], metrics: RpcMetrics, verifier: Verifier):
        self._tiered = served.tiered
        self._pool = served.pool
        self._boot_token = served.boot_token
        self._drain = served.drain
        self._run = served.run
        self._reader = served.reader
        self._memory = memory
        self._metrics = metrics
        self._verifier = verifier

    async def PutChunks(self, requests: AsyncIterator[pb.PutChunksRequest], context: Any) -> pb.PutChunksResponse:
        statuses, owner = bytearray(), owner_of(context)
        async for request in requests:
            self._drain.check()
            self._reader.check_count(len(request.chunks), "chunks")
            for nth, message in enumerate(request.chunks, 1):
                self._reader.key(message.key)
                chunk = wire.decode_chunk(message)
                status = await put_chunk(self._pool, self._memory, chunk, self._run, owner)
                statuses.append(status)
                if status is PutStatus.GRANTED:
                    self._metrics.add_bytes("write", len(chunk.payload))
                if nth % INLINE_CHUNKS_PER_TURN == 0:
                    await asyncio.sleep(0)  # Other calls do not wait for the whole message.
        return pb.PutChunksResponse(boot_token=self._boot_token, statuses=bytes(statuses))

    async def GetChunks(self, request: pb.GetChunksRequest, context: Any) -> AsyncIterator[pb.GetChunksResponse]:
        self._drain.check()
        check_deadline(context)
        self._reader.check_count(len(request.keys), "keys")
        for index, key in enumerate(request.keys):
            chunk = await get_chunk(self._tiered, self._memory, self._reader.key(key), self._verifier.verify)
            reply = pb.GetChunksResponse(boot_token=self._boot_token, index=index, found=chunk is not None)
            if chunk is not None:
                self._metrics.add_bytes("read", len(chunk.payload))
                reply.chunk.CopyFrom(wire.encode_chunk(chunk))
            yield reply
