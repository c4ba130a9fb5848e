"""The table beside the arena: what a later server has to know of the blocks in its slots.

It is anonymous memory that the server alone maps, and that outlives it as the arena does. Nothing is flushed and
nothing replayed: each fact has one place, and is there whole or not at all, because a checksum of it and of its place
stands before it. What has no checksum, zero, is not there.

    head        64 KiB: format, geometry, the segment's nonce and token, a secret of the checksums; then bytes of the
                arena that are backed, adoptions that have begun since one has ended, and for each extent until when
                clients may write to it, in whole seconds
    quotas      2 places of 1 MiB, of which the one with the higher order holds: the order, JSON
    policies    POLICIES places of 512 KiB: tenant, bytes of a slot, and what its policy has learned, as JSON
    namespaces  NAMESPACES places of 68 KiB: the order of opening, the spec as JSON
    extents     one after the other; each has
      class     8 bytes: bytes of a slot, 0 where no slot is used
      layout    8 bytes: bytes of a slot and shards of a block, as the records are that it has or has had; 0: none yet
      records   a slot each, see `records.py`

Clients choose hashes and sums, so an extent's records are erased before it has others: their bytes could be read as
another layout's. The file is sparse: it takes memory only where slots have had blocks, 96 bytes a slot, and 8 for each
further shard.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import NONCE_BYTES, TOKEN_BYTES, Quota
from kvpool.transport.segment import sealed_file
from kvpool_server.cache.arena import MAX_SLOTS_PER_EXTENT
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.server_access import Columns
from kvpool_server.keeping import records

TABLE = "kvpool-table"
"""Name of the file, and of its descriptor where it is kept."""
FORMAT = int.from_bytes(b"kvkeep\0\4", "little")
"""Changes with the layout: a table of another format is not read."""
NAMESPACES, POLICIES = 1_024, 16
PLACE_BYTES, POLICY_BYTES, QUOTAS_BYTES, HEAD_BYTES = 68 << 10, 512 << 10, 1 << 20, 64 << 10
CHECK = struct.Struct("<Q")
LATE = struct.Struct(">Q")
"""Big-endian: a write of a later time that a death cuts short leaves no earlier one."""
BACKED_AT, BEGUN_AT, LATE_AT = 1 << 10, 2 << 10, 3 << 10
Value = TypeVar("Value")
_HEAD = struct.Struct(f"<QQQI{NONCE_BYTES}s{TOKEN_BYTES}sQ")
_LENGTH = struct.Struct("<QI")
_ABSENT = bytes(CHECK.size)
_CLASS_AT, _LAYOUT_AT, _RECORDS_AT = 0, 8, 64 << 10  # What is erased begins at a page, whatever its size.
RECORDS_BYTES = 140 * MAX_SLOTS_PER_EXTENT
_EXTENT_BYTES = _RECORDS_AT + RECORDS_BYTES
_QUOTAS_AT = HEAD_BYTES
_POLICIES_AT = _QUOTAS_AT + 2 * QUOTAS_BYTES
_NAMESPACES_AT = _POLICIES_AT + POLICIES * POLICY_BYTES
_EXTENTS_AT = _NAMESPACES_AT + NAMESPACES * PLACE_BYTES


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

    @property
    def num_extents(self) -> int:
        return self.arena_bytes // self.extent_bytes


class Kind(NamedTuple):
    """Blocks of one group, whose namespace has a place."""

    place: int
    group_idx: int
    slot_bytes: int
    num_shards: int


class SlotTable:
    """A mapped table. Owned by the event loop; `close` last.

    Each change is made by one write, which a death may leave in part.

    Args:
        fd: of the file; closed with the table.

    Attributes:
        late_until: until when clients may write to each extent, also those of servers that have ended.
    """

    def __init__(self, fd: int, geometry: Geometry):
        self.fd, self.secret = fd, geometry.secret
        self.extent_bytes, self.num_extents = geometry.extent_bytes, geometry.num_extents
        self._pages = mmap.mmap(fd, file_bytes(self.num_extents))
        self._view = memoryview(self._pages)
        self._words = np.frombuffer(self._view, np.uint64)
        self._layouts = list(map(self._layout_of, range(self.num_extents)))  # Bytes of a slot, and shards.
        self._counts = [0] * self.num_extents  # Of records, since this object was made.
        self.late_until = [until for (until,) in LATE.iter_unpack(self._read(LATE_AT, LATE.size * self.num_extents))]

    @classmethod
    def create(cls, geometry: Geometry) -> SlotTable:
        """An empty table. Raises OSError."""
        geometry = geometry._replace(secret=geometry.secret or secrets.randbits(64))
        table = cls(sealed_file(TABLE, file_bytes(geometry.num_extents)), geometry)
        table._put_checked(0, _HEAD.pack(FORMAT, *geometry))
        return table

    @classmethod
    def reopen(cls, fd: int) -> SlotTable:
        """The table that another object, or another process, has made; `fd` is closed with it. Raises OSError."""
        geometry = geometry_of(fd)
        assert geometry is not None, "whoever reopens a table has looked at its head"
        return cls(fd, geometry)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            del self._words
            self._view.release()
            self._pages.close()
            os.close(self.fd)
            self.fd = -1

    def copy(self, other: SlotTable, idx: int | None = None) -> None:
        """Takes over what another table of the same secret says of an extent, which has no records here.

        Without `idx` it takes over quotas, policies and namespaces.
        """
        at, end = (HEAD_BYTES, _EXTENTS_AT) if idx is None else (self._start(idx), self._start(idx + 1))
        with contextlib.suppress(OSError):  # Nothing but holes follows.
            while (at := os.lseek(other.fd, at, os.SEEK_DATA)) < end:
                stop = min(os.lseek(other.fd, at, os.SEEK_HOLE), end)
                self._put(at, other._read(at, stop - at))
                at = stop
        if idx is not None:
            self._layouts[idx] = self._layout_of(idx)

    # The server's start, its namespaces and its quotas

    @property
    def backed_bytes(self) -> int:
        return min(int(CHECK.unpack_from(self._view, BACKED_AT)[0]), self.num_extents * self.extent_bytes)

    @backed_bytes.setter
    def backed_bytes(self, nbytes: int) -> None:
        self._put(BACKED_AT, CHECK.pack(nbytes))

    def begin(self) -> None:
        """An adoption begins."""
        self._put(BEGUN_AT, CHECK.pack(num_begun(self.fd) + 1))

    def has_begun(self) -> None:
        """The server with this memory serves clients."""
        self._put(BEGUN_AT, CHECK.pack(0))

    def put_late(self, idx: int, until: float) -> None:
        """Clients may write to an extent until then, by the system's monotonic clock."""
        if until > self.late_until[idx]:
            self.late_until[idx] = math.ceil(until)
            self._put(LATE_AT + idx * LATE.size, LATE.pack(self.late_until[idx]))

    def put_quotas(self, quotas: Sequence[Quota]) -> None:
        """Replaces all quotas."""
        order = self._limits()[0] + 1
        limits = {quota.subject: quota.limit_bytes for quota in quotas}
        at = _QUOTAS_AT + order % 2 * QUOTAS_BYTES
        if not self._put_text(at, QUOTAS_BYTES, order, msgspec.json.encode(limits)):
            self._put_text(at, QUOTAS_BYTES, order, b"{}")  # No quota may come back that has been removed.

    def quotas(self) -> list[Quota]:
        """Those of the last `put_quotas` that is there whole."""
        return [Quota(subject, limit_bytes) for subject, limit_bytes in self._limits()[1].items()]

    def _limits(self) -> tuple[int, dict[str, int]]:
        places = [self._json(_QUOTAS_AT + nth * QUOTAS_BYTES, QUOTAS_BYTES, dict[str, int]) for nth in range(2)]
        return max(filter(None, places), default=(0, {}), key=lambda each: each[0])

    def put_learned(self, place: int, stamp: int, slot_class: tuple[str, int] = ("", 0), learned: bytes = b"") -> None:
        """Puts what the policy of a slot class has learned in one of `POLICIES` places; `stamp` is the last call's."""
        at = _POLICIES_AT + place * POLICY_BYTES
        if not learned or not self._put_text(at, POLICY_BYTES, stamp, msgspec.json.encode((*slot_class, learned))):
            self._put(at, _ABSENT)

    def learned(self) -> tuple[int, dict[tuple[str, int], bytes]]:
        """The last stamp of `put_learned`, and what the policies of slot classes have learned."""
        learned, stamp = {}, 0
        for place in range(POLICIES):
            found = self._json(_POLICIES_AT + place * POLICY_BYTES, POLICY_BYTES, tuple[str, int, bytes])
            if found is not None:
                learned_at, (tenant, slot_bytes, text) = found
                learned[tenant, slot_bytes] = text
                stamp = max(stamp, learned_at)
        return stamp, learned

    def put_namespace(self, place: int, order: int, spec: NamespaceSpec) -> bool:
        """Puts a namespace in an empty place; False if it is too long.

        Args:
            order: the time of its opening: it may have been another server's.
        """
        return self._put_text(_NAMESPACES_AT + place * PLACE_BYTES, PLACE_BYTES, order, msgspec.json.encode(spec))

    def clear_namespace(self, place: int) -> None:
        """Empties the place of a namespace that has no record any more."""
        self._put(_NAMESPACES_AT + place * PLACE_BYTES, _ABSENT)

    def namespaces(self) -> list[tuple[int, NamespaceSpec]]:
        """The place and the spec of each namespace, in the order of opening."""
        found = []
        for place in range(NAMESPACES):
            content = self._json(_NAMESPACES_AT + place * PLACE_BYTES, PLACE_BYTES, NamespaceSpec)
            if content is not None:
                order, spec = content
                found.append((order, place, spec))
        return [(place, spec) for _, place, spec in sorted(found, key=lambda each: each[0])]

    # Extents and records

    def put_extent(self, idx: int, slot_bytes: int) -> None:
        """An extent without records has slots of a size from now on, or none: 0."""
        self._put(self._start(idx) + _CLASS_AT, CHECK.pack(slot_bytes))

    def put(self, place: int, entries: Sequence[Entry]) -> None:
        """Puts records of complete entries of one group into their slots, which have none, where extents take them."""
        group, at = entries[0].group, self._records_at(entries)
        found, start = records.records_of(place, entries, at, self.secret), 0
        for stop in range(1, len(entries) + 1):
            if stop < len(entries) and at[stop] - at[stop - 1] == found.strides[0]:
                continue  # Side by side.
            idx = entries[start].offset // self.extent_bytes
            if self._takes(idx, group.slot_class[1], group.spec.num_shards):
                self._put(at[start], found[start:stop].tobytes())
                self._counts[idx] += stop - start
            start = stop

    def clear(self, entry: Entry) -> None:
        """Removes the record of an entry's slot, if it has one."""
        group, (idx, within) = entry.group, divmod(entry.offset, self.extent_bytes)
        slot_bytes, num_shards = group.slot_class[1], group.spec.num_shards
        if self._layouts[idx] == (slot_bytes, num_shards):
            at = self._start(idx) + _RECORDS_AT + within // slot_bytes * records.record_bytes(num_shards)
            if self._words[at // records.WORD_BYTES]:
                self._put(at, _ABSENT)
                self._counts[idx] -= 1

    def mark(self, entries: Sequence[Entry]) -> None:
        """Writes the last uses and the ends of the pins of entries of one extent and group, if it has their records."""
        group = entries[0].group
        if self._layouts[entries[0].offset // self.extent_bytes] == (group.slot_class[1], group.spec.num_shards):
            records.mark(self._words, self._records_at(entries), entries)

    def sift(self, idx: int, keep: Callable[[Kind, Columns], Sequence[int]]) -> None:
        """Removes the records of an extent but for those that are there whole, and whose offsets `keep` returns."""
        slot_bytes, num_shards = self._layouts[idx]
        if not num_shards:
            return
        first, nbytes = self._start(idx) + _RECORDS_AT, records.record_bytes(num_shards)
        content = np.frombuffer(self._read(first, self._num_slots(slot_bytes) * nbytes), np.uint64)
        table = content.reshape(-1, nbytes // records.WORD_BYTES)
        there, start = np.flatnonzero(table[:, 0]), idx * self.extent_bytes
        are_whole = records.whole(table[there], first + there * nbytes, self.secret)
        whole, lost = there[are_whole], there[~are_whole].tolist()
        for (place, group_idx), nths in records.by_key(table[whole]).items():
            offsets = (start + whole[nths] * slot_bytes).tolist()
            kept = keep(Kind(place, group_idx, slot_bytes, num_shards), records.columns_of(table[whole[nths]], offsets))
            if len(kept) < len(offsets):
                lost += [(offset - start) // slot_bytes for offset in set(offsets).difference(kept)]
        self._counts[idx] = len(there) - len(lost)
        for slot in lost:
            self._put(first + slot * nbytes, _ABSENT)

    def slot_bytes(self, idx: int) -> int:
        """Of an extent's slots; 0: none is used."""
        return int(CHECK.unpack(self._read(self._start(idx) + _CLASS_AT, CHECK.size))[0])

    def _num_slots(self, slot_bytes: int) -> int:
        return min(self.extent_bytes // slot_bytes, MAX_SLOTS_PER_EXTENT)

    def _layout_of(self, idx: int) -> tuple[int, int]:
        (word,) = CHECK.unpack(self._read(self._start(idx) + _LAYOUT_AT, CHECK.size))
        slot_bytes, num_shards = word >> 16, word & 0xFFFF
        return (slot_bytes, num_shards) if slot_bytes and self._has_room(slot_bytes, num_shards) else (0, 0)

    def _has_room(self, slot_bytes: int, num_shards: int) -> bool:
        """Whether the records of such slots fit an extent."""
        return num_shards <= 0xFFFF and self._num_slots(slot_bytes) * records.record_bytes(num_shards) <= RECORDS_BYTES

    def _takes(self, idx: int, slot_bytes: int, num_shards: int) -> bool:
        """Whether an extent has records of a layout, which it gets if it has no others."""
        had_bytes, had_shards = self._layouts[idx]
        if (had_bytes, had_shards) == (slot_bytes, num_shards):
            return True
        if self._counts[idx] or not self._has_room(slot_bytes, num_shards):
            return False
        if had_shards:
            nbytes = self._num_slots(had_bytes) * records.record_bytes(had_shards)
            self._erase(self._start(idx) + _RECORDS_AT, nbytes)
        self._put(self._start(idx) + _LAYOUT_AT, CHECK.pack(slot_bytes << 16 | num_shards))
        self._layouts[idx] = (slot_bytes, num_shards)
        return True

    @staticmethod
    def _start(idx: int) -> int:
        return _EXTENTS_AT + idx * _EXTENT_BYTES

    def _records_at(self, entries: Sequence[Entry]) -> list[int]:
        """Where the records of entries of one group lie."""
        group, extent_bytes, first = entries[0].group, self.extent_bytes, _EXTENTS_AT + _RECORDS_AT
        slot_bytes, nbytes = group.slot_class[1], records.record_bytes(group.spec.num_shards)
        return [  # No calls: each block pays for it.
            first + offset // extent_bytes * _EXTENT_BYTES + offset % extent_bytes // slot_bytes * nbytes
            for offset in [entry.offset for entry in entries]
        ]

    # Bytes

    def _put_text(self, at: int, most: int, order: int, text: bytes) -> bool:
        content = _LENGTH.pack(order, len(text)) + text
        if CHECK.size + len(content) > most:
            return False
        self._put_checked(at, content)
        return True

    def _json(self, at: int, most: int, kind: type[Value]) -> tuple[int, Value] | None:
        """The order and the value that `_put_text` has put there, in JSON; None if none of this kind is there whole."""
        head, start = self._read(at, CHECK.size + _LENGTH.size), at + CHECK.size
        (check,), (order, length) = CHECK.unpack_from(head), _LENGTH.unpack_from(head, CHECK.size)
        content = self._read(start, _LENGTH.size + length) if check and length <= most else b""
        if check and check == check_of(at, content):
            with contextlib.suppress(msgspec.MsgspecError):  # Another release has written it.
                return order, msgspec.json.decode(content[_LENGTH.size :], type=kind)
        return None

    def _read(self, at: int, nbytes: int) -> bytes:
        """Reads the file, and not its pages: a hole that is touched there takes memory."""
        return os.pread(self.fd, nbytes, at)

    def _put_checked(self, at: int, content: bytes) -> None:
        self._put(at, CHECK.pack(check_of(at, content)) + content)

    def _erase(self, at: int, nbytes: int) -> None:
        """Zeroes bytes from the beginning of a page, and gives their memory back where the system can."""
        try:
            self._pages.madvise(mmap.MADV_REMOVE, at, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError:
            self._put(at, bytes(nbytes))

    def _put(self, at: int, data: bytes) -> None:
        self._view[at : at + len(data)] = data


def file_bytes(num_extents: int) -> int:
    """Of a table, most of which has no memory."""
    return _EXTENTS_AT + num_extents * _EXTENT_BYTES


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
