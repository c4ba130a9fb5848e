"""The bytes of leased and ticketed regions through gRPC, for clients that reach the arena in no other way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from kvpool.errors import InvalidRequestError
from kvpool.types import Piece
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.services.handlers import Context, Handlers, check_deadline, owner_of

PIECE_BYTES = 1 << 20
"""Largest payload of one Write or Read message. Larger messages copy no faster; smaller ones cost more calls."""


class TransferHandlers(Handlers):
    """The RPCs Write and Read."""

    async def Write(self, pieces: AsyncIterator[Piece], context: Any) -> pb.WriteResponse:
        nbytes, owner = 0, owner_of(context)
        async for piece in pieces:
            payload = np.frombuffer(piece.payload, np.uint8)
            self.pool.writable(piece.token, piece.offset, len(payload), owner)
            self.memory[piece.offset : piece.offset + len(payload)] = payload
            nbytes += len(payload)
        self.metrics.add_bytes("write", nbytes)
        return pb.WriteResponse(boot_token=self.boot_token, nbytes=nbytes)

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Piece]:
        check_deadline(context)
        self.check_count(len(request.offsets), "regions")
        if request.offsets and not request.region_bytes:
            raise InvalidRequestError("region_bytes is 0; give the bytes of one region")
        nbytes, total, owner = 0, len(request.offsets) * request.region_bytes, owner_of(context)
        try:
            for region in request.offsets:
                for offset in range(region, region + request.region_bytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, region + request.region_bytes - offset)
                    self.pool.readable(request.lease_id, offset, size, owner)
                    nbytes += size
                    if nbytes == total:
                        context.set_code(grpc.StatusCode.OK)  # A client may hang up as soon as it has every byte.
                    # gRPC copies the piece into a message before the event loop runs anything else.
                    yield Piece(self.boot_token, offset, self.memory[offset : offset + size].data)
        finally:
            self.metrics.add_bytes("read", nbytes)
