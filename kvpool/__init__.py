"""kvpool: the client library of a distributed KV-cache pool. Imports neither torch nor vLLM.

What it exports beside errors is imported on first use: a data worker of the server needs one module, and no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvpool.protocol.errors import *  # noqa: F403
from kvpool.version import __version__ as __version__

if TYPE_CHECKING:
    from kvpool.client.admin import Admin as Admin
    from kvpool.client.block_io import InPlace as InPlace
    from kvpool.client.client import Client as Client
    from kvpool.client.client import PutResult as PutResult
    from kvpool.client.config import ClientConfig as ClientConfig
    from kvpool.client.events import Subscriber as Subscriber
    from kvpool.client.rpc import Namespace as Namespace
    from kvpool.client.rpc import PendingLookup as PendingLookup
    from kvpool.protocol.hashing import block_hashes as block_hashes
    from kvpool.protocol.hashing import checksum as checksum
    from kvpool.protocol.namespace import GroupSpec as GroupSpec
    from kvpool.protocol.namespace import NamespaceSpec as NamespaceSpec
    from kvpool.protocol.types import BlockRun as BlockRun
    from kvpool.protocol.types import Chunk as Chunk
    from kvpool.protocol.types import PoolKey as PoolKey
    from kvpool.protocol.types import PutStatus as PutStatus
    from kvpool.protocol.types import ShardRange as ShardRange
    from kvpool.security.curve import SubscriberKeys as SubscriberKeys
    from kvpool.security.name_key import NameKey as NameKey
    from kvpool.security.tls import TlsFiles as TlsFiles

_HOMES = {
    "client.admin": ("Admin",),
    "client.block_io": ("InPlace",),
    "client.client": ("Client", "PutResult"),
    "client.config": ("ClientConfig",),
    "client.events": ("Subscriber",),
    "client.rpc": ("Namespace", "PendingLookup"),
    "protocol.hashing": ("block_hashes", "checksum"),
    "protocol.namespace": ("GroupSpec", "NamespaceSpec"),
    "protocol.types": ("BlockRun", "Chunk", "PoolKey", "PutStatus", "ShardRange"),
    "security.curve": ("SubscriberKeys",),
    "security.name_key": ("NameKey",),
    "security.tls": ("TlsFiles",),
}
__all__ = ["__version__", *(name for name in globals() if name.endswith("Error"))]
__all__ += [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"kvpool.{module}"), name)
            return value
    raise AttributeError(f"module 'kvpool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
