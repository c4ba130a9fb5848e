"""The blocks in this server's own directory: a pool manages their slots, a journal lists what lies where."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvpool.protocol.errors import InvalidRequestError, OutOfSpaceError
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.arena import ALIGNMENT, Arena
from kvpool_server.cache.entry import BlockIndex, Entry, Group, Observer, Record
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.server_access import commit, reserve, restore
from kvpool_server.cache.steps import finish
from kvpool_server.process.runtime import no_collections
from kvpool_server.sharing import Limits
from kvpool_server.tiers.block_mac import BlockMac
from kvpool_server.tiers.calls import DaemonThreadPool
from kvpool_server.tiers.file import journal
from kvpool_server.tiers.file.directory import Directory, OpenFile
from kvpool_server.tiers.file.extents import BlockSpot, Disk, MakeExtents, write_all
from kvpool_server.tiers.file.journal import GroupKey, Inventory, MakeInventory
from kvpool_server.tiers.tier import Block, keys_of

log = structlog.get_logger()

EXTENTS_PER_TIER = 256
MIN_EXTENT_BYTES = 32 << 20
MIN_EXTENTS = 4
TTL_MS = 3_600_000
"""Of leases and tickets, longer than any call takes."""
NEW_FILE_NAME = "journal.new"
"""A journal that is being compacted."""
COMPACT_AT_LEAST_BYTES = 16 << 20
"""A journal is compacted when it is twice as long as after the last compaction, and so much longer still."""
_LIMITS = Limits(max_ttl_ms=TTL_MS, grace_ms=0, max_namespaces=100_000)


class Journal:
    """The journal's file, appended by its owner. Blocking; thread-safe. Every method but `close` raises OSError."""

    def __init__(self, directory: Directory, disk: Disk, empty: MakeInventory = Inventory):
        self._directory = directory
        self._disk = disk
        self._empty = empty
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._nbytes = self._compact_at_bytes = 0

    def load(self) -> Inventory:
        """The blocks at the end of the last run; empty without a journal."""
        inventory = self._empty()
        with contextlib.suppress(FileNotFoundError):
            file = self._open(journal.FILE_NAME, os.O_RDONLY)
            inventory.read(file.fd)
        return inventory

    def begin(self, inventory: Inventory) -> None:
        """Continues from this content. Called once, before `append`."""
        with self._lock:
            if inventory.nbytes and inventory.is_exact:
                self._continue(self._open(journal.FILE_NAME, os.O_RDWR), inventory.nbytes)
            else:
                self._rewrite(inventory)

    def append(self, text: bytes) -> None:
        """Adds frames, all or nothing as far as readers see."""
        with self._lock:
            assert self._file is not None, "the journal is not open"
            self._disk.write(self._file.fd, [memoryview(text)], self._nbytes)
            self._nbytes += len(text)
            if self._nbytes < self._compact_at_bytes:
                return
            try:
                inventory = self._empty()
                inventory.read(self._file.fd)
                self._rewrite(inventory)
            except OSError as error:
                # The frames are written. The journal grows on, and is compacted when it is worth another try.
                self._compact_at_bytes = self._nbytes + COMPACT_AT_LEAST_BYTES
                directory = str(self._directory.path)
                log.warning("a tier's journal cannot be compacted", directory=directory, error=str(error))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file = None

    def _open(self, name: str, flags: int) -> OpenFile:
        return OpenFile(self._disk.open(self._directory, name, flags), self._disk.close)

    def _rewrite(self, inventory: Inventory) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._directory, NEW_FILE_NAME)  # Of a process that died meanwhile.
        file, nbytes = self._open(NEW_FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL), 0
        try:
            for text in inventory.encode():
                self._disk.write(file.fd, [memoryview(text)], nbytes)
                nbytes += len(text)
            self._disk.replace(self._directory, NEW_FILE_NAME, journal.FILE_NAME)
        except BaseException:
            del file  # Closed first: its space is free once it is removed.
            with contextlib.suppress(OSError):
                # The file takes space, of which there may be none left.
                self._disk.remove(self._directory, NEW_FILE_NAME)
            raise
        self._continue(file, nbytes)

    def _continue(self, file: OpenFile, nbytes: int) -> None:
        self._file, self._nbytes = file, nbytes
        self._compact_at_bytes = 2 * nbytes + COMPACT_AT_LEAST_BYTES


class OwnBlocks(Observer):
    """A thread calls the constructor, which restores the blocks; all else belongs to the event loop.

    `files` closes what the constructor opens, also if it raises OSError.
    """

    @no_collections()
    def __init__(
        self,
        tier_name: str,
        directory: Directory,
        size_bytes: int,
        policy: Callable[[], Policy],
        disk: Disk,
        empty: MakeInventory,
        make_extents: MakeExtents,
        mac: BlockMac | None,
        files: contextlib.ExitStack,
    ):
        started = time.perf_counter()
        self._mac = mac
        self._tags: dict[int, bytes] = {}
        """Of the blocks in the slots, by offset; also of slots that are empty again."""
        self._changes: list[tuple[GroupKey | int | None, list[Any]]] = []
        """What the journal does not have yet, in its order: (group, records) of stored blocks, (REMOVED, offsets) of
        empty slots, (None, encoded frames)."""
        self._journal = Journal(directory, disk, empty)
        files.callback(self._journal.close)
        inventory = self._journal.load()
        if inventory.trouble:
            log.warning("a tier's journal cannot be read to its end", tier=tier_name, error=inventory.trouble)
        extent_bytes = inventory.extent_bytes or _extent_bytes(size_bytes)
        if extent_bytes > size_bytes or extent_bytes % ALIGNMENT:
            inventory, extent_bytes = empty(), _extent_bytes(size_bytes)
        inventory.extent_bytes = extent_bytes
        arena, ids = Arena(size_bytes, extent_bytes), itertools.count(1)
        self.pool = Pool(arena, time.monotonic, lambda: next(ids), _LIMITS, policy)
        self.extents = make_extents(directory, extent_bytes, True)
        files.callback(self.extents.close)
        listed: dict[Group, Sequence[Record]] = {}
        with_blocks = {fingerprint for (fingerprint, _), records in inventory.groups.items() if records}
        inventory.specs = {name: spec for name, spec in inventory.specs.items() if name in with_blocks}
        for fingerprint, spec in inventory.specs.items():
            try:
                opened, _ = self.pool.open_namespace(spec)
            except (InvalidRequestError, OutOfSpaceError):
                continue  # Its blocks are too large for a tier that has become smaller, or too many specs are open.
            keys = ((group, inventory.groups.get((fingerprint, group.idx))) for group in opened.groups)
            listed |= {group: list(records.values()) for group, records in keys if records}
        restore(self.pool, listed)
        self.pool.observe(self)
        inventory.keep_only(self._is_restored)
        for records in inventory.groups.values():
            self._tags.update((record.offset, record.tag) for record in records.values() if record.tag)
        self._journal.begin(inventory)
        self.extents.tidy(arena.num_extents, set(arena.unused_extents()))
        self._named = set(inventory.specs)
        """Namespaces that the journal or the changes name."""
        room = directory.available_bytes() + arena.used_bytes
        if room < size_bytes:
            log.warning(
                "a tier's disk has less space than size=; a write to a full disk fails, and evicts nothing",
                tier=tier_name, size_bytes=size_bytes, room_bytes=room,
            )  # fmt: skip
        if inventory.specs:
            seconds = round(time.perf_counter() - started, 2)
            log.info("tier restored", tier=tier_name, entries=self.pool.stats().num_entries, seconds=seconds)

    def _is_restored(self, group: GroupKey, record: Record) -> bool:
        entry = self.index(group).get(record.block_hash)
        return entry is not None and entry.offset == record.offset

    def index(self, group: GroupKey) -> BlockIndex[Entry]:
        """The entries of a group; empty if its namespace is not open."""
        namespace = self.pool.namespace(group[0])
        return BlockIndex() if namespace is None else namespace.groups[group[1]].index

    async def write(self, threads: DaemonThreadPool, group: Group, blocks: Sequence[Block]) -> None:
        """Stores blocks, of which none may be there yet; for one caller at a time.

        Raises OSError, OutOfSpaceError or InvalidRequestError; nothing is stored then.
        """
        opened = self.pool.namespace(group.fingerprint) or self.pool.open_namespace(group.namespace_spec)[0]
        if group.fingerprint not in self._named:
            self._add(None, journal.encode_namespace(group.namespace_spec))
            self._named.add(group.fingerprint)
        grant = finish(reserve(self.pool, opened.groups[group.idx], _runs(group.idx, blocks)))
        # This call is the only writer, and none of the blocks is there: all are granted.
        spots = [
            BlockSpot(offset, block.payload, block.checksums)
            for offset, block in zip(grant.offsets, blocks, strict=True)
        ]
        try:
            if self._mac is not None:
                names = keys_of(group, [block.block_hash for block in blocks])
                payloads = [block.payload for block in blocks]
                tags = await threads.call(lambda mac: list(map(mac.tag, names, payloads)), self._mac)
                self._tags.update(zip(grant.offsets, tags, strict=True))
            await write_all(threads, self.extents, spots)
        except OSError:
            self.pool.put_revoke(grant.ticket_id)
            raise
        commit(self.pool, grant.ticket_id, [block.checksums for block in blocks])

    def record(self, entry: Entry) -> Record:
        """A complete entry as the journal lists it."""
        tag = self._tags.get(entry.offset, b"")
        return Record(entry.block_hash, entry.parent_hash, entry.offset, entry.checksums, tag)

    def stored(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._add((entry.group.fingerprint, entry.group.idx), self.record(entry))

    def removed(self, entry: Entry) -> None:
        self._add(journal.REMOVED, entry.offset)

    def _add(self, kind: GroupKey | int | None, item: Any) -> None:
        """Adds a change; those of one kind in a row share a frame."""
        if not self._changes or self._changes[-1][0] != kind:
            self._changes.append((kind, []))
        self._changes[-1][1].append(item)

    async def flush_journal(self, threads: DaemonThreadPool) -> None:
        """Writes changes to the journal; for one caller at a time. Raises OSError; the next call repeats the write."""
        changes, self._changes = self._changes, []
        if frames := b"".join(_encode(kind, items) for kind, items in changes):
            try:
                await threads.call(self._journal.append, frames)
            except BaseException:
                self._changes.insert(0, (None, [frames]))
                raise

    async def free_extents(self, threads: DaemonThreadPool) -> None:
        """Writes removals to the journal, then frees the disk space of empty extents. Raises OSError."""
        await self.flush_journal(threads)
        await threads.call(self.extents.free, self.pool.arena.unused_extents())


def _encode(kind: GroupKey | int | None, items: list[Any]) -> bytes:
    if kind is None:
        return b"".join(items)
    return journal.encode_removed(items) if isinstance(kind, int) else journal.encode_stored(kind, items)


def _extent_bytes(size_bytes: int) -> int:
    wanted = min(max(size_bytes // EXTENTS_PER_TIER, MIN_EXTENT_BYTES), size_bytes // MIN_EXTENTS)
    return max(wanted // ALIGNMENT, 1) * ALIGNMENT


def _runs(group_idx: int, blocks: Sequence[Block]) -> list[BlockRun]:
    """Blocks in their order, as runs of which each block follows the one before."""
    runs: list[BlockRun] = []
    hashes: list[bytes] = []
    for block in blocks:
        if not hashes or block.parent_hash != hashes[-1]:
            hashes = []
            runs.append(BlockRun(group_idx, hashes, block.parent_hash))
        hashes.append(block.block_hash)
    return runs
