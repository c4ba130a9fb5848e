"""kvpool: the client library of a distributed KV-cache pool. Imports neither torch nor vLLM."""

from kvpool.client import Client, Namespace, PendingLookup, PutResult
from kvpool.config import ClientConfig
from kvpool.errors import KVPoolError
from kvpool.hashing import block_hashes, checksum
from kvpool.namespace import GroupSpec, NamespaceSpec
from kvpool.types import BlockRun, Chunk, PoolKey, PutStatus, ShardRange
from kvpool.version import __version__

__all__ = [
    "BlockRun",
    "Chunk",
    "Client",
    "ClientConfig",
    "GroupSpec",
    "KVPoolError",
    "Namespace",
    "NamespaceSpec",
    "PendingLookup",
    "PoolKey",
    "PutResult",
    "PutStatus",
    "ShardRange",
    "__version__",
    "block_hashes",
    "checksum",
]
