"""kvpool: the client library of a distributed KV-cache pool. Imports neither torch nor vLLM.

What it exports is imported on first use: a data worker of the server needs one module, and no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.client import Client, PutResult
    from kvpool.config import ClientConfig
    from kvpool.errors import KVPoolError
    from kvpool.hashing import block_hashes, checksum
    from kvpool.namespace import GroupSpec, NamespaceSpec
    from kvpool.rpc import Namespace, PendingLookup
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

_HOMES = {
    "client": ("Client", "PutResult"),
    "config": ("ClientConfig",),
    "errors": ("KVPoolError",),
    "hashing": ("block_hashes", "checksum"),
    "namespace": ("GroupSpec", "NamespaceSpec"),
    "rpc": ("Namespace", "PendingLookup"),
    "types": ("BlockRun", "Chunk", "PoolKey", "PutStatus", "ShardRange"),
    "version": ("__version__",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"kvpool.{module}"), name)
            return value
    raise AttributeError(f"module 'kvpool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
