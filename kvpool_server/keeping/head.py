"""The head of a table: which arena it is of, and how its adoptions went."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import xxhash

from kvpool.protocol.types import NONCE_BYTES, TOKEN_BYTES

FORMAT = int.from_bytes(b"kvkeep\0\4", "little")
"""Changes with the layout: a table of another format is not read."""
CHECK = struct.Struct("<Q")
LATE = struct.Struct(">Q")
"""Big-endian: a write of a later time that a death cuts short leaves no earlier one."""
BACKED_AT, BEGUN_AT, LATE_AT = 1 << 10, 2 << 10, 3 << 10
_HEAD = struct.Struct(f"<QQQI{NONCE_BYTES}s{TOKEN_BYTES}sQ")


class Geometry(NamedTuple):
    """What a table and its arena agree on.

    Args:
        has_tenants: an extent belongs to one tenant.
        nonce, token: of the arena's segment.
        secret: of the checksums of records.
    """

    arena_bytes: int
    extent_bytes: int
    has_tenants: bool
    nonce: bytes
    token: bytes
    secret: int = 0


def head_of(geometry: Geometry) -> bytes:
    """The first bytes of a table, behind their checksum."""
    return _HEAD.pack(FORMAT, *geometry)


def geometry_of(fd: int) -> Geometry | None:
    """What the head of a table says; None if it is no table of this format."""
    head = os.pread(fd, CHECK.size + _HEAD.size, 0)
    if len(head) < CHECK.size + _HEAD.size:
        return None
    (check,), content = CHECK.unpack_from(head), head[CHECK.size :]
    found, arena_bytes, extent_bytes, has_tenants, *rest = _HEAD.unpack(content)
    if found != FORMAT or check != check_of(0, content):
        return None
    return Geometry(arena_bytes, extent_bytes, bool(has_tenants), *rest)


def num_begun(fd: int) -> int:
    """How many adoptions of a table have begun since a server with it has served clients."""
    return int(CHECK.unpack(os.pread(fd, CHECK.size, BEGUN_AT))[0])


def check_of(at: int, content: bytes | memoryview) -> int:
    """The checksum of content at a place; never 0."""
    return xxhash.xxh3_64_intdigest(content, at) or 1
