"""The gRPC service of a pool."""

from __future__ import annotations

from kvpool_server.rpc.blocks import BlockHandlers
from kvpool_server.rpc.chunks import ChunkHandlers
from kvpool_server.rpc.operators import OperatorHandlers
from kvpool_server.rpc.sessions import SessionHandlers


class PoolService(BlockHandlers, SessionHandlers, OperatorHandlers, ChunkHandlers):
    """Serves one pool: all RPCs of `proto/kvpool/v1/pool.proto`."""
