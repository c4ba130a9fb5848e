"""kvpool: the client library of a distributed KV-cache pool. Imports neither torch nor vLLM.

What it exports is imported on first use: a data worker of the server needs one module, and no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.block_io import InPlace as InPlace
    from kvpool.client import Client as Client
    from kvpool.client import PutResult as PutResult
    from kvpool.config import ClientConfig as ClientConfig
    from kvpool.errors import ConfigError as ConfigError
    from kvpool.errors import KVPoolError as KVPoolError
    from kvpool.errors import PermissionDeniedError as PermissionDeniedError
    from kvpool.errors import UnauthenticatedError as UnauthenticatedError
    from kvpool.hashing import block_hashes as block_hashes
    from kvpool.hashing import checksum as checksum
    from kvpool.name_key import NameKey as NameKey
    from kvpool.namespace import GroupSpec as GroupSpec
    from kvpool.namespace import NamespaceSpec as NamespaceSpec
    from kvpool.rpc import Namespace as Namespace
    from kvpool.rpc import PendingLookup as PendingLookup
    from kvpool.tls import TlsFiles as TlsFiles
    from kvpool.types import BlockRun as BlockRun
    from kvpool.types import Chunk as Chunk
    from kvpool.types import PoolKey as PoolKey
    from kvpool.types import PutStatus as PutStatus
    from kvpool.types import ShardRange as ShardRange
    from kvpool.version import __version__ as __version__

_HOMES = {
    "block_io": ("InPlace",),
    "client": ("Client", "PutResult"),
    "config": ("ClientConfig",),
    "errors": ("ConfigError", "KVPoolError", "PermissionDeniedError", "UnauthenticatedError"),
    "hashing": ("block_hashes", "checksum"),
    "name_key": ("NameKey",),
    "namespace": ("GroupSpec", "NamespaceSpec"),
    "rpc": ("Namespace", "PendingLookup"),
    "tls": ("TlsFiles",),
    "types": ("BlockRun", "Chunk", "PoolKey", "PutStatus", "ShardRange"),
    "version": ("__version__",),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"kvpool.{module}"), name)
            return value
    raise AttributeError(f"module 'kvpool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
