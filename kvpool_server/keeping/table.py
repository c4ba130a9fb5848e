"""The table beside the arena: what a later server has to know of the blocks in its slots.

It is anonymous memory that the server alone maps, and that outlives it as the arena does. Nothing is flushed and
nothing replayed: each fact has one place, and is there whole or not at all, because a checksum of it and of its place
stands before it. What has no checksum, zero, is not there.

    head        64 KiB: format, geometry, the segment's nonce and token, a secret of the checksums; then bytes of the
                arena that are backed, adoptions that have begun since one has ended, until when clients may write
    quotas      64 KiB: JSON
    policies    POLICIES places of 512 KiB: tenant, bytes of a slot, and what its policy has learned, as msgpack
    namespaces  NAMESPACES places of 68 KiB: the order of opening, the spec as JSON
    extents     one after the other; each has
      class     8 bytes: bytes of a slot, 0 where no slot is used, and of a record
      marks     (int64, uint32) [slots]: the stamp of the last use of the entry in a slot, and the end of its pin in
                seconds of the system's monotonic clock, both as they were now and then
      records   a slot each: checksum, place of the namespace, group, hash, parent's hash, xxh3-64 of each shard

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
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import HASH_BYTES, Quota
from kvpool.transport.segment import sealed_file
from kvpool_server.cache.allocator.arena import MAX_SLOTS_PER_EXTENT
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.restoring import Columns
from kvpool_server.keeping.head import (
    BACKED_AT,
    BEGUN_AT,
    CHECK,
    LATE,
    LATE_AT,
    Geometry,
    check_of,
    geometry_of,
    head_of,
    num_begun,
)

TABLE = "kvpool-table"
"""Name of the file, and of its descriptor where it is kept."""
NAMESPACES, POLICIES = 1_024, 16
PLACE_BYTES, POLICY_BYTES, QUOTAS_BYTES, HEAD_BYTES = 68 << 10, 512 << 10, 64 << 10, 64 << 10
Value = TypeVar("Value")
_LENGTH = struct.Struct("<QI")
_KEY = struct.Struct("<HH")
_RECORD = struct.Struct(f"<HH{HASH_BYTES}s{HASH_BYTES}s")
_HASH_AT = CHECK.size + _KEY.size
_PARENT_AT, _SUMS_AT = _HASH_AT + HASH_BYTES, _HASH_AT + 2 * HASH_BYTES
_ABSENT = bytes(CHECK.size)
_ROOT = bytes(HASH_BYTES)
_MARK = struct.Struct("<qI")
_MARKS = np.dtype([("used", "<i8"), ("pinned_until", "<u4")])
assert _MARKS.itemsize == _MARK.size
_CLASS_AT, _MARKS_AT = 0, 64 << 10  # What is erased begins at a page, whatever its size.
_RECORDS_AT = _MARKS_AT + _MARK.size * MAX_SLOTS_PER_EXTENT
RECORDS_BYTES = 128 * MAX_SLOTS_PER_EXTENT
_EXTENT_BYTES = _RECORDS_AT + RECORDS_BYTES
_QUOTAS_AT = HEAD_BYTES
_POLICIES_AT = _QUOTAS_AT + QUOTAS_BYTES
_NAMESPACES_AT = _POLICIES_AT + POLICIES * POLICY_BYTES
_EXTENTS_AT = _NAMESPACES_AT + NAMESPACES * PLACE_BYTES


class Kind(NamedTuple):
    """Which blocks are alike: those of one group, whose namespace has a place."""

    place: int
    group_idx: int
    slot_bytes: int
    num_shards: int


class SlotTable:
    """A mapped table. Owned by the event loop; `close` last.

    Each change is made by one write, which a death may leave in part.

    Args:
        fd: of the file; closed with the table.
        extent_bytes, num_extents: of the arena.
        secret: as in the head.

    Attributes:
        fd, extent_bytes, num_extents, secret: as given.
        late_until: until when clients may write, also those of servers that have ended.
    """

    def __init__(self, fd: int, extent_bytes: int, num_extents: int, secret: int = 0):
        self.fd, self.extent_bytes, self.num_extents, self.secret = fd, extent_bytes, num_extents, secret
        self._pages = mmap.mmap(fd, file_bytes(num_extents))
        self._view = memoryview(self._pages)
        self._classes = [self._class_of(idx) for idx in range(num_extents)]  # Bytes of a slot, and of a record.
        self._counts = [0] * num_extents  # Of records, since this object was made.
        (self.late_until,) = LATE.unpack(self._read(LATE_AT, LATE.size))

    @classmethod
    def create(cls, geometry: Geometry) -> SlotTable:
        """An empty table. Raises OSError."""
        num_extents = geometry.arena_bytes // geometry.extent_bytes
        secret = geometry.secret or secrets.randbits(64)
        table = cls(sealed_file(TABLE, file_bytes(num_extents)), geometry.extent_bytes, num_extents, secret)
        table._put_checked(0, head_of(geometry._replace(secret=secret)))
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

    def copy(self, other: SlotTable, idx: int | None = None) -> None:
        """Takes over what another table of the same secret says.

        Args:
            idx: of an extent, which has no records here; None: quotas, policies and namespaces.
        """
        at, end = (HEAD_BYTES, _EXTENTS_AT) if idx is None else (self._start(idx), self._start(idx + 1))
        with contextlib.suppress(OSError):  # Nothing but holes follows.
            while (at := os.lseek(other.fd, at, os.SEEK_DATA)) < end:
                stop = min(os.lseek(other.fd, at, os.SEEK_HOLE), end)
                self._put(at, other._read(at, stop - at))
                at = stop
        if idx is not None:
            self._classes[idx] = self._class_of(idx)

    # The server's start, its namespaces and its quotas

    @property
    def backed_bytes(self) -> int:
        return int(CHECK.unpack_from(self._view, BACKED_AT)[0])

    @backed_bytes.setter
    def backed_bytes(self, nbytes: int) -> None:
        self._put(BACKED_AT, CHECK.pack(nbytes))

    def begin(self) -> None:
        """An adoption begins."""
        self._put(BEGUN_AT, CHECK.pack(num_begun(self.fd) + 1))

    def has_begun(self) -> None:
        """The server with this memory serves clients."""
        self._put(BEGUN_AT, CHECK.pack(0))

    def put_late(self, until: float) -> None:
        """Clients may write until then, by the system's monotonic clock."""
        if until > self.late_until:
            self.late_until = until
            self._put(LATE_AT, LATE.pack(until))

    def put_quotas(self, quotas: Sequence[Quota]) -> None:
        """Replaces all quotas."""
        limits = {quota.subject: quota.limit_bytes for quota in quotas}
        self._put_text(_QUOTAS_AT, QUOTAS_BYTES, 0, msgspec.json.encode(limits))

    def quotas(self) -> list[Quota]:
        """Those of the last `put_quotas` that is there whole."""
        _, limits = self._json(_QUOTAS_AT, QUOTAS_BYTES, dict[str, int]) or (0, {})
        return [Quota(subject, limit_bytes) for subject, limit_bytes in limits.items()]

    def put_learned(self, place: int, stamp: int, slot_class: tuple[str, int] = ("", 0), learned: bytes = b"") -> None:
        """Puts what the policy of a slot class has learned in one of `POLICIES` places.

        Args:
            stamp: of the pool's last call.
        """
        at = _POLICIES_AT + place * POLICY_BYTES
        if not learned or not self._put_text(at, POLICY_BYTES, stamp, msgspec.msgpack.encode((*slot_class, learned))):
            self._put(at, _ABSENT)

    def learned(self) -> tuple[int, dict[tuple[str, int], bytes]]:
        """The last stamp of `put_learned`, and what the policies of slot classes have learned."""
        learned, stamp = {}, 0
        for place in range(POLICIES):
            found = self._text(_POLICIES_AT + place * POLICY_BYTES, POLICY_BYTES)
            with contextlib.suppress(msgspec.MsgspecError):  # Another release has written it.
                if found is not None:
                    tenant, slot_bytes, text = msgspec.msgpack.decode(found[1], type=tuple[str, int, bytes])
                    learned[tenant, slot_bytes] = text
                    stamp = max(stamp, found[0])
        return stamp, learned

    def put_namespace(self, place: int, order: int, spec: NamespaceSpec) -> bool:
        """Puts a namespace in an empty place; False if it is too long.

        Args:
            order: a higher one was opened later.
        """
        return self._put_text(_NAMESPACES_AT + place * PLACE_BYTES, PLACE_BYTES, order, msgspec.json.encode(spec))

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
        idx, within = divmod(offset, self.extent_bytes)
        if self._classes[idx] != (slot_bytes, nbytes) and not self._has_records(idx, slot_bytes, nbytes):
            return
        slot, start = within // slot_bytes, _EXTENTS_AT + idx * _EXTENT_BYTES  # No calls: each block pays for it.
        at = start + _RECORDS_AT + slot * nbytes
        content = _RECORD.pack(place, group.idx, entry.block_hash, entry.parent_hash or _ROOT) + sums.tobytes()
        _MARK.pack_into(self._view, start + _MARKS_AT + _MARK.size * slot, entry.used, 0)
        self._put(at, CHECK.pack(check_of(at ^ self.secret, content)) + content)
        self._counts[idx] += 1

    def clear(self, offset: int, slot_bytes: int, num_shards: int) -> None:
        """Removes the record of a slot, if it has one."""
        idx, within = divmod(offset, self.extent_bytes)
        if self._classes[idx] != (slot_bytes, nbytes := _SUMS_AT + 8 * num_shards):
            return
        at = _EXTENTS_AT + idx * _EXTENT_BYTES + _RECORDS_AT + within // slot_bytes * nbytes
        if CHECK.unpack_from(self._view, at) != (0,):
            self._put(at, _ABSENT)
            self._counts[idx] -= 1

    def mark(self, start_offset: int, slot_bytes: int, uses: Sequence[int], pins: Sequence[int]) -> None:
        """Sets the last uses of some slots, and the ends of their pins."""
        idx, within = divmod(start_offset, self.extent_bytes)
        if self._classes[idx][0] == slot_bytes:
            marks = np.empty(len(uses), _MARKS)
            marks["used"], marks["pinned_until"] = uses, pins
            self._put(self._start(idx) + _MARKS_AT + _MARK.size * (within // slot_bytes), marks.tobytes())

    def sift(self, idx: int, keep: Callable[[Kind, Columns], Sequence[int]]) -> None:
        """Removes the records of an extent but for those that are there whole, and whose offsets `keep` returns."""
        slot_bytes, record_bytes = self._classes[idx]
        count, first = self._num_slots(idx), self._record_at(idx, 0)
        content, start, secret = self._read(first, count * record_bytes), idx * self.extent_bytes, self.secret
        if not count:
            return
        table = np.frombuffer(content, np.uint8).reshape(count, record_bytes)
        checks = np.array(table[:, : CHECK.size], order="C").view(np.uint64).reshape(-1)
        view, there = memoryview(content), np.flatnonzero(checks)
        found = [
            check_of(first + at ^ secret, view[at + CHECK.size : at + record_bytes])
            for at in (there * record_bytes).tolist()
        ]
        whole = there[checks[there] == np.array(found, np.uint64)]
        marks = np.frombuffer(self._read(self._start(idx) + _MARKS_AT, _MARK.size * count), _MARKS)
        keys = np.ascontiguousarray(table[whole, CHECK.size : _HASH_AT]).view(np.uint32).reshape(-1)
        num_shards = (record_bytes - _SUMS_AT) // 8
        self._counts[idx] = 0
        for key in np.unique(keys).tolist():
            slots = whole[keys == key]
            sums = array("Q", table[slots, _SUMS_AT:].tobytes())
            names, parents = (
                np.ascontiguousarray(table[slots, at : at + HASH_BYTES]).view(f"V{HASH_BYTES}").reshape(-1).tolist()
                for at in (_HASH_AT, _PARENT_AT)
            )
            columns = Columns(
                (start + slots * slot_bytes).tolist(),
                names,
                [b"" if parent == _ROOT else parent for parent in parents],
                [sums[at : at + num_shards] for at in range(0, len(sums), num_shards)],
                marks["used"][slots].tolist(),
                marks["pinned_until"][slots].tolist(),
            )
            kept = keep(Kind(key & 0xFFFF, key >> 16, slot_bytes, num_shards), columns)
            checks[(np.array(kept, np.int64) - start) // slot_bytes] = 0
            self._counts[idx] += len(kept)
        for slot in np.flatnonzero(checks).tolist():
            self._put(self._record_at(idx, slot), _ABSENT)

    def slot_bytes(self, idx: int) -> int:
        """Of an extent's slots; 0: none is used."""
        return self._classes[idx][0]

    def _num_slots(self, idx: int) -> int:
        """Of an extent that has, or has had, records."""
        slot_bytes, record_bytes = self._classes[idx]
        if not record_bytes:
            return 0
        return min(self.extent_bytes // slot_bytes, MAX_SLOTS_PER_EXTENT, RECORDS_BYTES // record_bytes)

    def _class_of(self, idx: int) -> tuple[int, int]:
        (word,) = CHECK.unpack(self._read(self._start(idx) + _CLASS_AT, CHECK.size))
        slot_bytes, record_bytes = word >> 16, word & 0xFFFF
        if not 0 < slot_bytes <= self.extent_bytes:
            return (0, 0)
        return (slot_bytes, record_bytes if record_bytes > _SUMS_AT else 0)

    def _has_records(self, idx: int, slot_bytes: int, record_bytes: int) -> bool:
        """Has an extent have records of a size, if it has no others."""
        slots = min(self.extent_bytes // slot_bytes, MAX_SLOTS_PER_EXTENT)
        if self._counts[idx] or record_bytes > 0xFFFF or slots * record_bytes > RECORDS_BYTES:
            return False
        self._put_class(idx, slot_bytes, record_bytes)
        return True

    def _put_class(self, idx: int, slot_bytes: int, record_bytes: int) -> None:
        self._erase(self._record_at(idx, 0), self._num_slots(idx) * self._classes[idx][1])
        self._put(self._start(idx) + _CLASS_AT, CHECK.pack(slot_bytes << 16 | record_bytes))
        self._classes[idx] = (slot_bytes, record_bytes)

    @staticmethod
    def _start(idx: int) -> int:
        return _EXTENTS_AT + idx * _EXTENT_BYTES

    def _record_at(self, idx: int, slot: int) -> int:
        return self._start(idx) + _RECORDS_AT + slot * self._classes[idx][1]

    # Bytes

    def _put_text(self, at: int, most: int, order: int, text: bytes) -> bool:
        content = _LENGTH.pack(order, len(text)) + text
        if CHECK.size + len(content) > most:
            return False
        self._put_checked(at, content)
        return True

    def _json(self, at: int, most: int, kind: type[Value]) -> tuple[int, Value] | None:
        """The order and the value that are there whole, in JSON; None if none of this kind is."""
        if (found := self._text(at, most)) is not None:
            with contextlib.suppress(msgspec.MsgspecError):  # Another release has written it.
                return found[0], msgspec.json.decode(found[1], type=kind)
        return None

    def _text(self, at: int, most: int) -> tuple[int, bytes] | None:
        """The order and the text that `_put_text` has put there; None if they are not there whole."""
        head, start = self._read(at, CHECK.size + _LENGTH.size), at + CHECK.size
        (check,), (order, length) = CHECK.unpack_from(head), _LENGTH.unpack_from(head, CHECK.size)
        content = self._read(start, _LENGTH.size + length) if check and length <= most else b""
        return (order, content[_LENGTH.size :]) if check and check == check_of(at, content) else None

    def _read(self, at: int, nbytes: int) -> bytes:
        """Reads the file, and not its pages: a hole that is touched there takes memory."""
        return os.pread(self.fd, nbytes, at)

    def _put_checked(self, at: int, content: bytes) -> None:
        self._put(at, CHECK.pack(check_of(at, content)) + content)

    def _erase(self, at: int, nbytes: int) -> None:
        """Zeroes bytes from the beginning of a page, and gives their memory back where the system can."""
        if nbytes:
            try:
                self._pages.madvise(mmap.MADV_REMOVE, at, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            except OSError:
                self._put(at, bytes(nbytes))

    def _put(self, at: int, data: bytes) -> None:
        self._view[at : at + len(data)] = data


def file_bytes(num_extents: int) -> int:
    """Of a table, most of which has no memory."""
    return _EXTENTS_AT + num_extents * _EXTENT_BYTES
