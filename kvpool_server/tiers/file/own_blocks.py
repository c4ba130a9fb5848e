"""The blocks in this server's own directory: a pool manages their slots, a journal lists what lies where."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence

import structlog

from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.allocator.arena import ALIGNMENT, Arena
from kvpool_server.cache.entry import BlockIndex, Entry, Record
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import finish
from kvpool_server.cache.tier_access import commit, reserve, restore
from kvpool_server.process.process_memory import no_collections
from kvpool_server.tiers.block_mac import BlockMac
from kvpool_server.tiers.file.directory import Directory
from kvpool_server.tiers.file.extents import BlockSpot, MakeExtents, write_all
from kvpool_server.tiers.file.frames import GroupKey
from kvpool_server.tiers.file.journal import Journal, JournalBuffer
from kvpool_server.tiers.thread_pool import DaemonThreadPool
from kvpool_server.tiers.tier import Block

log = structlog.get_logger()

EXTENTS_PER_TIER = 256
MIN_EXTENT_BYTES = 32 << 20
MIN_EXTENTS = 4
TTL_MS = 3_600_000
"""Of leases and tickets, longer than any call takes."""
_LIMITS = Limits(max_ttl_ms=TTL_MS, grace_ms=0, max_namespaces=100_000)


class OwnBlocks:
    """A thread calls the constructor, which restores the blocks; all else belongs to the event loop.

    Args:
        mac: makes the blocks' tags; None: servers share no key.
        files: closes what the constructor opens, also if it raises OSError.

    Attributes:
        pool: manages the slots.
        extents: hold the bytes.
        buffer: of changes that the journal does not have yet.
    """

    @no_collections()
    def __init__(
        self,
        tier_name: str,
        directory: Directory,
        size_bytes: int,
        policy: Callable[[], Policy],
        journal: Journal,
        make_extents: MakeExtents,
        mac: BlockMac | None,
        files: contextlib.ExitStack,
    ):
        started = time.perf_counter()
        self._mac = mac
        self._tags: dict[int, bytes] = {}
        """Of the blocks in the slots, by offset; also of slots that are empty again."""
        self.buffer = JournalBuffer(self._tags)
        self._journal = journal
        files.callback(journal.close)
        inventory = journal.load()
        if inventory.trouble:
            log.warning("a tier's journal cannot be read to its end", tier=tier_name, error=inventory.trouble)
        extent_bytes = inventory.extent_bytes or _extent_bytes(size_bytes)
        if extent_bytes > size_bytes or extent_bytes % ALIGNMENT:
            inventory, extent_bytes = journal.empty(), _extent_bytes(size_bytes)
        inventory.extent_bytes = extent_bytes
        arena, ids = Arena(size_bytes, extent_bytes), itertools.count(1)
        self.pool = Pool(arena, time.monotonic, lambda: next(ids), _LIMITS, policy)
        self.extents = make_extents(directory, extent_bytes, True)
        files.callback(self.extents.close)
        for fingerprint, spec in inventory.specs.items():
            try:
                opened, _ = self.pool.open_namespace(spec)
            except InvalidRequestError:
                continue  # Its blocks are too large for a tier that has become smaller.
            for group in opened.groups:
                if records := inventory.groups.get((fingerprint, group.idx)):
                    restore(self.pool, group, list(records.values()))
        self.pool.observe(self.buffer)
        inventory.keep_only(self._is_restored)
        for records in inventory.groups.values():
            self._tags.update((record.offset, record.tag) for record in records.values() if record.tag)
        journal.begin(inventory)
        self.extents.tidy(arena.num_extents, set(arena.unused_extents()))
        self.buffer.named.update(inventory.specs)
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

    async def write(
        self, threads: DaemonThreadPool, namespace: PoolNamespace, group_idx: int, blocks: Sequence[Block]
    ) -> None:
        """Stores blocks, of which none may be there yet; for one caller at a time.

        Raises OSError, OutOfSpaceError or InvalidRequestError; nothing is stored then.
        """
        opened = self.pool.namespace(namespace.fingerprint) or self.pool.open_namespace(namespace.spec)[0]
        self.buffer.open_namespace(namespace)
        grant = finish(reserve(self.pool, opened.groups[group_idx], _runs(group_idx, blocks)))
        # This call is the only writer, and none of the blocks is there: all are granted.
        spots = [
            BlockSpot(offset, block.payload, block.checksums)
            for offset, block in zip(grant.offsets, blocks, strict=True)
        ]
        try:
            if self._mac is not None:
                names = [(namespace.fingerprint, group_idx, block.block_hash) for block in blocks]
                payloads = [block.payload for block in blocks]
                tags = await threads.call(lambda mac: list(map(mac.tag, names, payloads)), self._mac)
                self._tags.update(zip(grant.offsets, tags, strict=True))
            await write_all(threads, self.extents, spots)
        except OSError:
            self.pool.put_revoke(grant.ticket_id)
            raise
        commit(self.pool, grant.ticket_id, [block.checksums for block in blocks])

    async def flush_journal(self, threads: DaemonThreadPool) -> None:
        """Writes changes to the journal; for one caller at a time. Raises OSError; the next call repeats the write."""
        if frames := self.buffer.pop():
            try:
                await threads.call(self._journal.append, frames)
            except BaseException:
                self.buffer.push_back(frames)
                raise

    async def free_extents(self, threads: DaemonThreadPool) -> None:
        """Writes removals to the journal, then frees the disk space of empty extents. Raises OSError."""
        await self.flush_journal(threads)
        await threads.call(self.extents.free, self.pool.arena.unused_extents())


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
