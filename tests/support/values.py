"""Specs, hashes and payloads for tests."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import BlockRun

_salts = itertools.count()
_M = TypeVar("_M", bound=Message)


def replaced(message: _M, **fields: Any) -> _M:
    """A copy of a message with other values of some fields, as `dataclasses.replace` makes of a dataclass."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    return copy


def group_spec(*, chunk_bytes: int = 256, num_shards: int = 1, **fields: Any) -> GroupSpec:
    defaults: dict[str, Any] = {
        "kind": "full_attention",
        "block_tokens": 16,
        "num_kv_heads": 8,
        "head_size_k": 64,
        "head_size_v": 64,
        "layer_names": ("model.layers.0", "model.layers.1"),
    }
    return GroupSpec(chunk_bytes=chunk_bytes, num_shards=num_shards, **{**defaults, **fields})


def namespace_spec(*groups: GroupSpec, **fields: Any) -> NamespaceSpec:
    """A spec that no other call returns, so that tests can share a server. Give `salt` for one that repeats."""
    fields.setdefault("salt", f"{os.getpid()}-{next(_salts)}")
    fields.setdefault("model", "test/model")
    return NamespaceSpec(groups=groups or (group_spec(),), **fields)


def block_hash(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def run_of(*names: object, group_idx: int = 0, parent: object = None) -> BlockRun:
    parent_hash = b"" if parent is None else block_hash(parent)
    return BlockRun(group_idx, [block_hash(name) for name in names], parent_hash)


def payload(name: object, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that belong to `name`: uint8 [nbytes]."""
    seed = int.from_bytes(block_hash(name)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
