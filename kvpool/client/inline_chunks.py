"""Puts and gets whose bytes travel inside the call: no regions, no tickets. Clients in any language can make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import grpc

from kvpool.client.rpc import PoolRpc
from kvpool.protocol import replies, wire
from kvpool.protocol.errors import ChecksumError, InvalidReplyError
from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import Chunk, PoolKey, PutStatus
from kvpool.v1 import pool_pb2 as pb

MESSAGE_BYTES = 4 << 20
"""Most bytes of one message, which are a server's limit, but for a single chunk."""
MAX_CHUNKS = 4_096
"""Most chunks of one message."""


_FRAME_BYTES = 8


class InlineChunks:
    """Chunks by their keys, on a client's connection. Thread-safe."""

    def __init__(self, rpc: PoolRpc):
        self._rpc = rpc

    def put(self, chunks: Sequence[Chunk]) -> tuple[PutStatus, ...]:
        """Stores chunks; returns one status a chunk.

        Raises:
            InvalidRequestError, ChecksumError: a chunk is malformed, or differs from its checksum.
            InvalidReplyError: the answer is not of these chunks.
            OutOfSpaceError: no room.
        """
        reply = self._rpc.call(
            self._rpc.stub.PutChunks, _messages(map(self._named, chunks)), self._rpc.config.data_timeout_ms
        )
        return replies.put_statuses(reply, len(chunks))

    def get(self, keys: Sequence[PoolKey]) -> list[Chunk | None]:
        """The chunks of `keys`, verified; None for each miss.

        Raises ChecksumError for wrong bytes, InvalidReplyError for an answer that is not of these keys.
        """
        found: list[Chunk | None] = []
        named = [self._named_key(key) for key in keys]
        request = pb.GetChunksRequest(keys=[wire.message_of(key, pb.PoolKey) for key in named])
        call = self._rpc.call(self._rpc.stub.GetChunks, request, self._rpc.config.data_timeout_ms)
        try:
            for nth, reply in enumerate(call):
                chunk = replies.chunk(reply, nth, named)
                if chunk is not None and checksum(chunk.payload) != chunk.checksum:
                    raise ChecksumError(
                        f"chunk {chunk.key.block_hash.hex()} shard {chunk.key.shard} differs from its checksum; "
                        "treat it as a miss"
                    )
                found.append(chunk and replace(chunk, key=keys[nth]))
        except grpc.RpcError as error:
            raise wire.error_of(error, self._rpc.config.endpoint) from None
        finally:
            call.cancel()  # Nothing more is read after an error.
        if len(found) != len(keys):
            raise InvalidReplyError(f"the server answered {len(found)} of {len(keys)} keys")
        return found

    def _named(self, chunk: Chunk) -> Chunk:
        """The chunk under its block's name on the wire."""
        parent = chunk.parent_hash and self._rpc.name_of(chunk.parent_hash)
        return replace(chunk, key=self._named_key(chunk.key), parent_hash=parent)

    def _named_key(self, key: PoolKey) -> PoolKey:
        return replace(key, block_hash=self._rpc.name_of(key.block_hash))


def _messages(chunks: Iterable[Chunk]) -> Iterator[pb.PutChunksRequest]:
    message, nbytes = pb.PutChunksRequest(), 0
    for chunk in chunks:
        encoded = wire.encode_chunk(chunk)
        size = encoded.ByteSize() + _FRAME_BYTES
        if message.chunks and (nbytes + size > MESSAGE_BYTES or len(message.chunks) == MAX_CHUNKS):
            yield message
            message, nbytes = pb.PutChunksRequest(), 0
        message.chunks.append(encoded)
        nbytes += size
    if message.chunks:
        yield message
