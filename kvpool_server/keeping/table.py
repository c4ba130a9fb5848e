"""The table beside the arena: what a later server has to know of the blocks in its slots.

It is anonymous memory that the server alone maps, and that outlives it as the arena does. Nothing is flushed and
nothing replayed: each fact has one place, and is there whole or not at all, because a checksum of it and of its place
stands before it. What has no checksum, zero, is not there.

    head        64 KiB: format, geometry, the segment's nonce and token, a secret of the checksums; then bytes of the
                arena that are backed, adoptions that have begun since one has ended, how long holds may last
    quotas      64 KiB: JSON
    namespaces  NAMESPACES places of 68 KiB: the order of opening, the spec as JSON
    extents     one after the other; each has
      class     8 bytes: bytes of a slot, 0 where no slot is used, and of a record
      marks     (int64, uint32) [slots]: the stamp of the last use of the entry in a slot, and the end of its pin in
                seconds of the system's monotonic clock, both as they were now and then
      records   a slot each: checksum, namespace, group, shards, hash, parent's hash, xxh3-64 of each shard

Clients choose hashes and sums, so an extent's records are erased before it has others: their bytes could be read as
another layout's. The file is sparse: it takes memory only where slots have had blocks, 100 bytes a slot, and 8 for each
further shard.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import HASH_BYTES, NONCE_BYTES, TOKEN_BYTES, Quota
from kvpool.transport.segment import sealed_file
from kvpool_server.cache.allocator.arena import MAX_SLOTS_PER_EXTENT
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.restoring import Columns

NAME = "kvpool-table"
FORMAT = int.from_bytes(b"kvkeep\0\1", "little")
"""Changes with the layout: a table of another format is not read."""
NAMESPACES = 1_024
PLACE_BYTES, QUOTAS_BYTES, HEAD_BYTES = 68 << 10, 64 << 10, 64 << 10
Value = TypeVar("Value")
_CHECK = struct.Struct("<Q")
_HEAD = struct.Struct(f"<QQQI{NONCE_BYTES}s{TOKEN_BYTES}sQ")
_LATE = struct.Struct("<dd")
_LENGTH = struct.Struct("<QI")
_KEY = struct.Struct("<HH")
_RECORD = struct.Struct(f"<HH{HASH_BYTES}s{HASH_BYTES}s")
_HASH_AT = _CHECK.size + _KEY.size
_PARENT_AT, _SUMS_AT = _HASH_AT + HASH_BYTES, _HASH_AT + 2 * HASH_BYTES
_ABSENT = bytes(_CHECK.size)
_ROOT = bytes(HASH_BYTES)
_MARK = struct.Struct("<qI")
_MARKS = np.dtype([("used", "<i8"), ("pinned_until", "<u4")])
assert _MARKS.itemsize == _MARK.size
_CLASS_AT, _MARKS_AT = 0, 64 << 10  # What is erased begins at a page, whatever its size.
_RECORDS_AT = _MARKS_AT + _MARK.size * MAX_SLOTS_PER_EXTENT
RECORDS_BYTES = 128 * MAX_SLOTS_PER_EXTENT
_EXTENT_BYTES = _RECORDS_AT + RECORDS_BYTES
_BACKED_AT, _BEGUN_AT, _LATE_AT = 1 << 10, 2 << 10, 3 << 10
_QUOTAS_AT = HEAD_BYTES
_NAMESPACES_AT = _QUOTAS_AT + QUOTAS_BYTES
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


class SlotTable:
    """A mapped table. Owned by the event loop; `close` last.

    Each change is made by one write, which a death may leave in part.

    Args:
        fd: of the file; closed with the table.
        extent_bytes, num_extents: of the arena.
        secret: as in the head.
    """

    def __init__(self, fd: int, extent_bytes: int, num_extents: int, secret: int = 0):
        self.fd = fd
        self._secret = secret
        self._extent_bytes = extent_bytes
        self._pages = mmap.mmap(fd, file_bytes(num_extents))
        self._view = memoryview(self._pages)
        self._classes = [self._class_of(idx) for idx in range(num_extents)]
        self._counts = [0] * num_extents  # Of records, since this object was made.

    @classmethod
    def create(cls, geometry: Geometry) -> SlotTable:
        """An empty table. Raises OSError."""
        num_extents = geometry.arena_bytes // geometry.extent_bytes
        secret = geometry.secret or secrets.randbits(64)
        table = cls(sealed_file(NAME, file_bytes(num_extents)), geometry.extent_bytes, num_extents, secret)
        table._put_checked(0, _HEAD.pack(FORMAT, *geometry[:-1], secret))
        return table

    @classmethod
    def reopen(cls, fd: int) -> SlotTable:
        """The table that another object, or another process, has made; `fd` is closed with it. Raises OSError."""
        geometry = geometry_of(fd)
        assert geometry is not None, "whoever reopens a table has looked at its head"
        return cls(fd, geometry.extent_bytes, geometry.arena_bytes // geometry.extent_bytes, geometry.secret)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._view.release()
            self._pages.close()
            os.close(self.fd)
            self.fd = -1

    # The server's start, its namespaces and its quotas

    @property
    def backed_bytes(self) -> int:
        return int(_CHECK.unpack_from(self._view, _BACKED_AT)[0])

    @backed_bytes.setter
    def backed_bytes(self, nbytes: int) -> None:
        self._put(_BACKED_AT, _CHECK.pack(nbytes))

    def begin(self) -> None:
        """An adoption begins."""
        self._put(_BEGUN_AT, _CHECK.pack(num_begun(self.fd) + 1))

    def has_begun(self) -> None:
        """The server with this memory serves clients."""
        self._put(_BEGUN_AT, _CHECK.pack(0))

    def put_holds(self, hold_s: float, until: float) -> None:
        """Says how long a client may write from now on, and until when those of servers before may, by the clock."""
        self._put(_LATE_AT, _LATE.pack(hold_s, until))

    def late_until(self, now: float) -> float:
        """Until when clients of the servers before may write, if all of them have ended."""
        hold_s, until = _LATE.unpack(self._read(_LATE_AT, _LATE.size))
        return max(now + hold_s, until)

    def put_quotas(self, quotas: Sequence[Quota]) -> None:
        """Replaces all quotas."""
        limits = {quota.subject: quota.limit_bytes for quota in quotas}
        self._put_json(_QUOTAS_AT, QUOTAS_BYTES, 0, msgspec.json.encode(limits))

    def quotas(self) -> list[Quota]:
        """Those of the last `put_quotas` that is there whole."""
        _, limits = self._json(_QUOTAS_AT, QUOTAS_BYTES, dict[str, int]) or (0, {})
        return [Quota(subject, limit_bytes) for subject, limit_bytes in limits.items()]

    def put_namespace(self, place: int, order: int, spec: NamespaceSpec) -> bool:
        """Puts a namespace in an empty place; False if it is too long.

        Args:
            order: a higher one was opened later.
        """
        return self._put_json(_NAMESPACES_AT + place * PLACE_BYTES, PLACE_BYTES, order, msgspec.json.encode(spec))

    def clear_namespace(self, place: int) -> None:
        """Empties the place of a namespace that has no record any more."""
        self._put(_NAMESPACES_AT + place * PLACE_BYTES, _ABSENT)

    def namespaces(self) -> list[tuple[int, int, NamespaceSpec]]:
        """The order of opening, the place and the spec of each namespace, in that order."""
        found = []
        for place in range(NAMESPACES):
            content = self._json(_NAMESPACES_AT + place * PLACE_BYTES, PLACE_BYTES, NamespaceSpec)
            if content is not None:
                found.append((content[0], place, content[1]))
        return sorted(found, key=lambda each: each[0])

    # Extents and records

    def put_extent(self, idx: int, slot_bytes: int) -> None:
        """An extent without records has slots of a size from now on, or none: 0."""
        self._put_class(idx, slot_bytes, 0)

    def put(self, place: int, entry: Entry) -> None:
        """Puts the record of a complete entry into its slot, which has none; nothing if its extent has others' size."""
        group, offset, sums = entry.group, entry.offset, entry.checksums
        slot_bytes, nbytes = group.slot_class[1], _SUMS_AT + 8 * len(sums)
        idx, within = divmod(offset, self._extent_bytes)
        if self._classes[idx] != (slot_bytes, nbytes) and not self._has_records(idx, slot_bytes, nbytes):
            return
        slot = within // slot_bytes
        start = _EXTENTS_AT + idx * _EXTENT_BYTES
        _MARK.pack_into(self._view, start + _MARKS_AT + _MARK.size * slot, entry.used, 0)
        at = start + _RECORDS_AT + slot * nbytes
        content = _RECORD.pack(place, group.idx, entry.block_hash, entry.parent_hash or _ROOT) + sums.tobytes()
        self._put(at, _CHECK.pack(_check_of(at ^ self._secret, content)) + content)
        self._counts[idx] += 1

    def clear(self, offset: int, slot_bytes: int, num_shards: int) -> None:
        """Removes the record of a slot, if it has one."""
        idx, slot = self._slot(offset, slot_bytes)
        at = self._record_at(idx, slot)
        has_such = self._classes[idx] == (slot_bytes, _SUMS_AT + 8 * num_shards)
        if has_such and self._view[at : at + _CHECK.size] != _ABSENT:
            self._put(at, _ABSENT)
            self._counts[idx] -= 1

    def mark(self, start_offset: int, slot_bytes: int, uses: Sequence[int], pins: Sequence[int]) -> None:
        """Sets the last uses of some slots, and the ends of their pins."""
        idx, slot = self._slot(start_offset, slot_bytes)
        if self._classes[idx][0] == slot_bytes:
            marks = np.empty(len(uses), _MARKS)
            marks["used"], marks["pinned_until"] = uses, pins
            self._put(self._start(idx) + _MARKS_AT + _MARK.size * slot, marks.tobytes())

    def records(self, idx: int) -> Iterator[tuple[tuple[int, int], int, Columns]]:
        """The blocks of an extent that are there whole: place and index of a group, its shards, its blocks."""
        slot_bytes, record_bytes = self._classes[idx]
        first = self._record_at(idx, 0)
        raw, checks = self._checks(idx)
        marks = np.frombuffer(self._read(self._start(idx) + _MARKS_AT, _MARK.size * len(checks)), _MARKS)
        found: dict[bytes, list[int]] = {}
        content = memoryview(raw)
        there = np.flatnonzero(checks)
        for slot, check in zip(there.tolist(), checks[there].tolist(), strict=True):
            at = slot * record_bytes
            if check == _check_of(first + at ^ self._secret, content[at + _CHECK.size : at + record_bytes]):
                found.setdefault(raw[at + _CHECK.size : at + _HASH_AT], []).append(slot)
        for key, slots in found.items():
            starts = [slot * record_bytes for slot in slots]
            parents = [raw[at + _PARENT_AT : at + _SUMS_AT] for at in starts]
            columns = Columns(
                [idx * self._extent_bytes + slot * slot_bytes for slot in slots],
                [raw[at + _HASH_AT : at + _PARENT_AT] for at in starts],
                [b"" if parent == _ROOT else parent for parent in parents],
                [array("Q", raw[at + _SUMS_AT : at + record_bytes]) for at in starts],
                marks["used"][slots].tolist(),
                marks["pinned_until"][slots].tolist(),
            )
            yield _KEY.unpack(key), (record_bytes - _SUMS_AT) // 8, columns

    def keep_only(self, idx: int, offsets: Sequence[int]) -> None:
        """Removes all records of an extent but those of these slots; what is left of a record in part goes, too."""
        _, checks = self._checks(idx)
        if offsets:
            checks[(np.array(offsets) - idx * self._extent_bytes) // self._classes[idx][0]] = 0
        for slot in np.flatnonzero(checks).tolist():
            self._put(self._record_at(idx, slot), _ABSENT)
        self._counts[idx] = len(offsets)

    def _checks(self, idx: int) -> tuple[bytes, npt.NDArray[np.uint64]]:
        """The bytes of an extent's records, and the checksum of each."""
        count, record_bytes = self._num_slots(idx), self._classes[idx][1]
        raw = self._read(self._record_at(idx, 0), count * record_bytes)
        columns = np.frombuffer(raw, np.uint8).reshape(count, record_bytes)[:, : _CHECK.size]
        return raw, np.array(columns, order="C").view(np.uint64).reshape(-1) if count else np.zeros(0, np.uint64)

    def slot_bytes(self, idx: int) -> int:
        """Of an extent's slots; 0: none is used."""
        return self._classes[idx][0]

    def _num_slots(self, idx: int) -> int:
        """Of an extent that has, or has had, records."""
        slot_bytes, record_bytes = self._classes[idx]
        if not record_bytes:
            return 0
        return min(self._extent_bytes // slot_bytes, MAX_SLOTS_PER_EXTENT, RECORDS_BYTES // record_bytes)

    def _class_of(self, idx: int) -> tuple[int, int]:
        (word,) = _CHECK.unpack(self._read(self._start(idx) + _CLASS_AT, _CHECK.size))
        slot_bytes, record_bytes = word >> 16, word & 0xFFFF
        if not 0 < slot_bytes <= self._extent_bytes:
            return (0, 0)
        return (slot_bytes, record_bytes if record_bytes > _SUMS_AT else 0)

    def _has_records(self, idx: int, slot_bytes: int, record_bytes: int) -> bool:
        """Has an extent have records of a size, if it has no others."""
        slots = min(self._extent_bytes // slot_bytes, MAX_SLOTS_PER_EXTENT)
        if self._counts[idx] or record_bytes > 0xFFFF or slots * record_bytes > RECORDS_BYTES:
            return False
        self._put_class(idx, slot_bytes, record_bytes)
        return True

    def _put_class(self, idx: int, slot_bytes: int, record_bytes: int) -> None:
        self._erase(self._record_at(idx, 0), self._num_slots(idx) * self._classes[idx][1])
        self._put(self._start(idx) + _CLASS_AT, _CHECK.pack(slot_bytes << 16 | record_bytes))
        self._classes[idx] = (slot_bytes, record_bytes)

    def _slot(self, offset: int, slot_bytes: int) -> tuple[int, int]:
        idx, within = divmod(offset, self._extent_bytes)
        return idx, within // slot_bytes

    @staticmethod
    def _start(idx: int) -> int:
        return _EXTENTS_AT + idx * _EXTENT_BYTES

    def _record_at(self, idx: int, slot: int) -> int:
        return _EXTENTS_AT + idx * _EXTENT_BYTES + _RECORDS_AT + slot * self._classes[idx][1]

    # Bytes

    def _put_json(self, at: int, most: int, order: int, text: bytes) -> bool:
        content = _LENGTH.pack(order, len(text)) + text
        if _CHECK.size + len(content) > most:
            return False
        self._put_checked(at, content)
        return True

    def _json(self, at: int, most: int, kind: type[Value]) -> tuple[int, Value] | None:
        """The order and the value that `_put_json` has put there; None if they are not there whole, or of this kind."""
        head, start = self._read(at, _CHECK.size + _LENGTH.size), at + _CHECK.size
        (check,), (order, length) = _CHECK.unpack_from(head), _LENGTH.unpack_from(head, _CHECK.size)
        content = self._read(start, _LENGTH.size + length) if check and length <= most else b""
        if not check or check != _check_of(start - _CHECK.size, content):
            return None
        with contextlib.suppress(msgspec.MsgspecError):  # Another release has written it.
            return order, msgspec.json.decode(content[_LENGTH.size :], type=kind)
        return None

    def _read(self, at: int, nbytes: int) -> bytes:
        """Reads the file, and not its pages: a hole that is touched there takes memory."""
        return os.pread(self.fd, nbytes, at)

    def _put_checked(self, at: int, content: bytes) -> None:
        self._put(at, _CHECK.pack(_check_of(at, content)) + content)

    def _erase(self, at: int, nbytes: int) -> None:
        """Zeroes bytes from the beginning of a page, and gives their memory back."""
        if nbytes:
            self._pages.madvise(mmap.MADV_REMOVE, at, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def _put(self, at: int, data: bytes) -> None:
        self._view[at : at + len(data)] = data


def file_bytes(num_extents: int) -> int:
    """Of a table, most of which has no memory."""
    return _EXTENTS_AT + num_extents * _EXTENT_BYTES


def geometry_of(fd: int) -> Geometry | None:
    """What the head of a table says; None if it is no table of this format."""
    head = os.pread(fd, _CHECK.size + _HEAD.size, 0)
    if len(head) < _CHECK.size + _HEAD.size:
        return None
    (check,), content = _CHECK.unpack_from(head), head[_CHECK.size :]
    found, arena_bytes, extent_bytes, has_tenants, *rest = _HEAD.unpack(content)
    if found != FORMAT or check != _check_of(0, content):
        return None
    return Geometry(arena_bytes, extent_bytes, bool(has_tenants), *rest)


def num_begun(fd: int) -> int:
    """How many adoptions of a table have begun since a server with it has served clients."""
    return int(_CHECK.unpack(os.pread(fd, _CHECK.size, _BEGUN_AT))[0])


def _check_of(at: int, content: bytes | memoryview) -> int:
    """Of content at a place; never 0."""
    return xxhash.xxh3_64_intdigest(content, at) or 1


def same_arena(one: Geometry, other: Geometry) -> str:
    """What differs between two arenas beside their nonces and tokens, in words; empty: nothing does."""
    names = ("arena_bytes", "extent_bytes", "has_tenants")
    differing = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return "; ".join(f"{name} was {before}, and is {after}" for name, before, after in differing if before != after)
