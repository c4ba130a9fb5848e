"""The file tier: a directory of a local disk, of NFS or of 3FS, managed as the arena is.

A pool of its own (`kvpool_server.cache`) manages the tier's slots: leases of blocks that are being read, and eviction,
are decided by the same code as in memory. A journal lists what lies where, and the next process on this directory
starts from the journal.

    PATH/NAME/lock             owned by the running server
    PATH/NAME/journal          what lies where
    PATH/NAME/extent-00000...  slots

Servers that share PATH read each other's blocks, and write only to their own directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import structlog

from kvpool.errors import ConfigError, InvalidRequestError, OutOfSpaceError
from kvpool.holdings import TierHoldings
from kvpool.namespace import NamespaceSpec
from kvpool.types import BlockRun, TierStats
from kvpool_server.cache.allocator.arena import ALIGNMENT, Arena
from kvpool_server.cache.block_index import BlockIndex
from kvpool_server.cache.entry import Entry, Record
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import finish
from kvpool_server.cache.tier_access import commit, reserve, restore
from kvpool_server.process_memory import no_collections
from kvpool_server.tiers.block_mac import BlockMac
from kvpool_server.tiers.file.directory import UntrustedFileError
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extent_io import BlockSpot, ReadableExtents, read_all, write_all
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.frames import GroupKey
from kvpool_server.tiers.file.journal import Journal, JournalBuffer
from kvpool_server.tiers.file.own_directory import OwnDirectory
from kvpool_server.tiers.file.peer_directories import DEFAULT_MEMORY_BYTES, PeerBlocks, PeerDirectories
from kvpool_server.tiers.open_files import OpenFiles, raise_descriptor_limit
from kvpool_server.tiers.thread_pool import DaemonThreadPool
from kvpool_server.tiers.tier import Block, Tier, TierError

log = structlog.get_logger()

EXTENTS_PER_TIER = 256
MIN_EXTENT_BYTES = 32 << 20
MIN_EXTENTS = 4
MIN_MEMORY_BYTES, SIZE_PER_MEMORY = 1 << 30, 16
"""The blocks of this server's journal may take a share of the tier's size in memory, and at least so much."""
REFRESH_S = 1.0
CLOSE_S = 2.0

_LIMITS = Limits(max_ttl_ms=3_600_000, grace_ms=0, max_namespaces=100_000)
_TTL_MS = 3_600_000


class FileTier(Tier):
    """See the module.

    Args:
        root: the path, which other servers may share.
        owner: name of this server's directory below the path.
        size_bytes: disk space for slots.
        threads: reads and writes at once.
        handover_s, create: as `OwnDirectory` takes them.
        open_files: bounds the files that are kept open; tiers of one server share it.
        owners: user ids that are trusted beside this process's.
        mac: makes and verifies the blocks' tags; None: servers share no key.
        peer_memory_bytes: the most memory that peers' blocks may take.

    Attributes:
        pool: manages the slots; set once the tier is open.
    """

    pool: Pool
    _journal: Journal
    _peers: PeerDirectories

    def __init__(
        self,
        root: Path,
        owner: str,
        size_bytes: int,
        policy: Callable[[], Policy],
        *,
        threads: int = 4,
        direct: bool = True,
        create: bool = False,
        handover_s: float = 0.0,
        disk: Disk | None = None,
        open_files: OpenFiles | None = None,
        owners: Collection[int] = (),
        peer_memory_bytes: int = DEFAULT_MEMORY_BYTES,
        mac: BlockMac | None = None,
    ):
        super().__init__(f"file:{root}")
        self._size_bytes = size_bytes
        self._policy = policy
        self._num_threads = threads
        self._direct = direct
        self._disk = disk or Disk()
        self._open_files = OpenFiles() if open_files is None else open_files
        self._peer_memory_bytes = peer_memory_bytes
        self._own = OwnDirectory(self.name, root, owner, create, handover_s, frozenset({os.geteuid(), *owners}))
        self._mac = mac
        self._tags: dict[int, bytes] = {}
        """Of the blocks in this server's slots, by offset; also of slots that are empty again."""
        self._buffer = JournalBuffer(self._tags)
        self._files = contextlib.ExitStack()
        self._writing = asyncio.Lock()
        self._threads: DaemonThreadPool | None = None
        self._refresh_thread: DaemonThreadPool | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._warnings: dict[str, str] = {}

    async def open(self) -> None:
        raise_descriptor_limit()
        self._threads = DaemonThreadPool(self._num_threads, "kvpool-tier")
        self._refresh_thread = DaemonThreadPool(1, "kvpool-tier-refresh")
        try:
            await self._own.acquire(self._threads)
            await self._threads.call(self._restore)
        except UntrustedFileError as error:
            await self.close()
            raise ConfigError(f"tier {self.name}: {error}") from None
        except OSError as error:
            await self.close()
            raise ConfigError(f"tier {self.name}: {error}; give a directory that this server can write to") from None
        except ConfigError:
            await self.close()
            raise
        self._refreshing = asyncio.create_task(self._refresh_forever())

    @no_collections()
    def _restore(self) -> None:
        started = time.perf_counter()
        own = self._own.directory
        memory_bytes = max(MIN_MEMORY_BYTES, self._size_bytes // SIZE_PER_MEMORY)
        self._journal = Journal(own, self._disk, memory_bytes, has_tags=self._mac is not None)
        self._files.callback(self._journal.close)
        self._peers = PeerDirectories(
            self._own.root,
            self._own.name,
            self._disk,
            self._open_files,
            self._direct,
            self._peer_memory_bytes,
            has_tags=self._mac is not None,
        )
        self._files.callback(self._peers.close)
        inventory = self._journal.load()
        if inventory.trouble:
            log.warning("a tier's journal cannot be read to its end", tier=self.name, error=inventory.trouble)
        extent_bytes = inventory.extent_bytes or _extent_bytes(self._size_bytes)
        if extent_bytes > self._size_bytes or extent_bytes % ALIGNMENT:
            inventory, extent_bytes = self._journal.empty(), _extent_bytes(self._size_bytes)
        inventory.extent_bytes = extent_bytes
        arena, ids = Arena(self._size_bytes, extent_bytes), itertools.count(1)
        self.pool = Pool(arena, time.monotonic, lambda: next(ids), _LIMITS, self._policy)
        self._extents = Extents(own, extent_bytes, self._disk, self._open_files, writable=True, direct=self._direct)
        self._files.callback(self._extents.close)
        for fingerprint, spec in inventory.specs.items():
            try:
                opened, _ = self.pool.open_namespace(spec)
            except InvalidRequestError:
                continue  # Its blocks are too large for a tier that has become smaller.
            for group in opened.groups:
                if records := inventory.groups.get((fingerprint, group.idx)):
                    restore(self.pool, group, list(records.values()))
        self.pool.observe(self._buffer)
        inventory.keep_only(self._is_restored)
        for records in inventory.groups.values():
            self._tags.update((record.offset, record.tag) for record in records.values() if record.tag)
        self._journal.begin(inventory)
        self._extents.tidy(arena.num_extents, set(arena.unused_extents()))
        for fingerprint in inventory.specs:
            self._buffer.skip_namespace(fingerprint)
        self._warn_of_a_small_disk()
        if inventory.specs:
            seconds = round(time.perf_counter() - started, 2)
            log.info("tier restored", tier=self.name, entries=self.pool.stats().num_entries, seconds=seconds)

    def _is_restored(self, group: GroupKey, record: Record) -> bool:
        entry = self._index(*group).get(record.block_hash)
        return entry is not None and entry.offset == record.offset

    def _warn_of_a_small_disk(self) -> None:
        room = self._own.directory.available_bytes() + self.pool.arena.used_bytes
        if room < self._size_bytes:
            log.warning(
                "a tier's disk has less space than size=; a write to a full disk fails, and evicts nothing",
                tier=self.name, size_bytes=self._size_bytes, room_bytes=room,
            )  # fmt: skip

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None
        if self._threads is not None and self._refresh_thread is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._flush_journal()
            except (TimeoutError, OSError, TierError) as error:
                log.warning("a tier's last changes are not in its journal", tier=self.name, error=str(error))
            threads, self._threads = self._threads, None
            # A thread that hangs in the file system keeps its files.
            if threads.close(CLOSE_S) & self._refresh_thread.close(CLOSE_S):
                self._files.close()
        self._own.release()

    def known(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        if self._own.is_gone:
            return [False] * len(block_hashes)
        index = self._index(namespace.fingerprint, group_idx)
        group = (namespace.fingerprint, group_idx)
        has_peers = len(self._peers) > 0
        return [
            ((entry := index.get(block_hash)) is not None and entry.complete)
            or (has_peers and self._peers.find(group, block_hash) is not None)
            for block_hash in block_hashes
        ]

    async def find(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        return self.known(namespace, group_idx, block_hashes)

    def _index(self, fingerprint: bytes, group_idx: int) -> BlockIndex[Entry]:
        namespace = self.pool.namespace(fingerprint)
        return BlockIndex() if namespace is None else namespace.groups[group_idx].index

    async def write(self, namespace: PoolNamespace, group_idx: int, blocks: Sequence[Block]) -> int:
        async with self._writing:
            self._running_threads()
            there = self.known(namespace, group_idx, [block.block_hash for block in blocks])
            new = {block.block_hash: block for block, is_there in zip(blocks, there, strict=True) if not is_there}
            try:
                written = await self._write_new(namespace, group_idx, list(new.values())) if new else 0
                await self._flush_journal()
            except (InvalidRequestError, OutOfSpaceError) as error:
                self.counters["refused_blocks"] += len(new)
                log.debug("a tier has no room for blocks", tier=self.name, blocks=len(new), error=str(error))
                written = 0
            except OSError as error:
                raise TierError(f"{self.name}: {error}") from None
        return sum(there) + written

    async def _write_new(self, namespace: PoolNamespace, group_idx: int, blocks: Sequence[Block]) -> int:
        opened = self.pool.namespace(namespace.fingerprint) or self.pool.open_namespace(namespace.spec)[0]
        self._buffer.open_namespace(namespace)
        group = opened.groups[group_idx]
        grant = finish(reserve(self.pool, group, _runs(group_idx, blocks)))
        # This call is the only writer, and none of the blocks is there: all are granted.
        spots = [
            BlockSpot(offset, block.payload, block.checksums)
            for offset, block in zip(grant.offsets, blocks, strict=True)
        ]
        try:
            if self._mac is not None:
                group_key = (namespace.fingerprint, group_idx)
                self._tags.update(await self._running_threads().call(_make_tags, self._mac, group_key, blocks, spots))
            await write_all(self._running_threads(), self._extents, spots)
        except OSError:
            self.pool.put_revoke(grant.ticket_id)
            raise
        commit(self.pool, grant.ticket_id, [block.checksums for block in blocks])
        self.counters["written_bytes"] += sum(block.payload.nbytes for block in blocks)
        return len(blocks)

    async def _flush_journal(self) -> None:
        frames = self._buffer.pop()
        if frames:
            try:
                await self._running_threads().call(self._journal.append, frames)
            except BaseException:
                self._buffer.push_back(frames)
                raise

    async def read(
        self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        group = (namespace.fingerprint, group_idx)
        self._running_threads()
        own = self._index(*group)
        sources: dict[ReadableExtents, dict[int, BlockSpot]] = {}
        theirs: dict[int, tuple[PeerBlocks, Record]] = {}
        for nth, (block_hash, view) in enumerate(zip(block_hashes, into, strict=True)):
            entry = own.get(block_hash)
            if entry is not None and entry.complete:
                tag = self._tags.get(entry.offset, b"")
                spot = BlockSpot(entry.offset, view, entry.checksums, self._check_of(group, block_hash, tag))
                sources.setdefault(self._extents, {})[nth] = spot
            elif (peer := self._peers.find(group, block_hash)) is not None:
                theirs[nth] = peer
                check = self._check_of(group, block_hash, peer[1].tag)
                spot = BlockSpot(peer[1].offset, view, peer[1].checksums, check)
                sources.setdefault(peer[0], {})[nth] = spot
        ours = [block_hashes[nth] for nth in sources.get(self._extents, {})]
        runs = [BlockRun(group_idx, ours)]
        # Own blocks stay where they are until the lease is released.
        lease_id = self.pool.lookup(group[0], runs, prefix_only=False, lease_ttl_ms=_TTL_MS).lease_id if ours else 0
        found: list[Sequence[int] | None] = [None] * len(block_hashes)
        try:
            for source, spots in sources.items():
                sound = await read_all(self._running_threads(), source, list(spots.values()))
                for (nth, spot), is_sound in zip(spots.items(), sound, strict=True):
                    if is_sound:
                        found[nth] = spot.checksums
                        self.counters["read_bytes"] += spot.view.nbytes
        except OSError as error:
            if error.errno == errno.EIO and ours:
                # The disk fails, or all of these blocks lie on a bad sector, which must fail the tier only once.
                self.pool.remove(group[0], runs)
            raise TierError(f"{self.name}: {error}") from None
        finally:
            self.pool.release([lease_id])
        for nth, (blocks, record) in theirs.items():
            if found[nth] is None:
                blocks.forget(record)
        if corrupt := [block_hashes[nth] for nth in sources.get(self._extents, {}) if found[nth] is None]:
            self.counters["corrupt_blocks"] += len(corrupt)
            log.error("corrupt blocks in a tier were removed", tier=self.name, blocks=len(corrupt))
            self.pool.remove(group[0], [BlockRun(group_idx, corrupt)])
        return found

    def _check_of(self, group: GroupKey, block_hash: bytes, tag: bytes) -> Callable[[memoryview], bool] | None:
        """Whether bytes have a block's tag; None where servers share no key."""
        mac = self._mac
        return None if mac is None else lambda payload: mac.is_valid((*group, block_hash), payload, tag)

    async def remove(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        if self.pool.namespace(namespace.fingerprint) is not None:
            self.pool.remove(namespace.fingerprint, [BlockRun(group_idx, block_hashes)])
            await self._free_extents()

    async def clear(self, fingerprint: bytes = b"") -> None:
        if not fingerprint or self.pool.namespace(fingerprint) is not None:
            self.pool.clear(fingerprint)
            await self._free_extents()

    async def _free_extents(self) -> None:
        """Writes removals to the journal, then frees the disk space of empty extents."""
        async with self._writing:
            try:
                await self._flush_journal()
                await self._running_threads().call(self._extents.free, self.pool.arena.unused_extents())
            except OSError as error:
                raise TierError(f"{self.name}: {error}") from None

    def specs(self) -> list[NamespaceSpec]:
        opened = self.pool.open_namespaces()
        return [namespace.spec for namespace in opened if any(group.index for group in namespace.groups)]

    def holdings(self, fingerprint: bytes) -> TierHoldings:
        namespace = self.pool.namespace(fingerprint)
        groups = [] if namespace is None else namespace.groups
        num_entries = sum(len(group.index) for group in groups)
        return TierHoldings(self.name, num_entries, sum(len(group.index) * group.spec.slot_bytes for group in groups))

    def stats(self) -> TierStats:
        pool = self.pool.stats()
        return TierStats(
            self.name,
            size_bytes=pool.arena_bytes,
            used_bytes=pool.arena_bytes - pool.free_bytes,
            num_entries=pool.num_entries,
            counters={**self.counters, "evicted_blocks": pool.counters["evicted_blocks"]},
        )

    async def refresh(self) -> bool:
        """Sends a heartbeat and reads what peers have added; done every REFRESH_S. Failures are logged and retried.

        Returns True if peers have more to read at once.
        """
        assert self._refresh_thread is not None
        calls: dict[str, Callable[[], bool | None]] = {
            "a tier's directory cannot be touched": self._own.send_heartbeat,
            "a tier's path cannot be read": self._peers.refresh,
        }
        has_more: bool | None = False
        for problem, call in calls.items():
            try:
                has_more = await self._refresh_thread.call(call)
                self._warnings[problem] = ""
            except Exception as error:
                if str(error) != self._warnings.get(problem):  # Once for each error in a row.
                    log.warning(problem, tier=self.name, error=str(error))
                self._warnings[problem] = str(error)
                has_more = False
        return bool(has_more)

    async def _refresh_forever(self) -> None:
        while True:
            has_more = await self.refresh()
            await asyncio.sleep(0.0 if has_more else REFRESH_S)

    def _running_threads(self) -> DaemonThreadPool:
        if self._threads is None:
            raise TierError(f"{self.name} is closed")
        if self._own.is_gone:
            raise TierError(f"{self.name}: {self._own.path} was removed or replaced; restart this server")
        return self._threads


def _extent_bytes(size_bytes: int) -> int:
    wanted = min(max(size_bytes // EXTENTS_PER_TIER, MIN_EXTENT_BYTES), size_bytes // MIN_EXTENTS)
    return max(wanted // ALIGNMENT, 1) * ALIGNMENT


def _make_tags(mac: BlockMac, group: GroupKey, blocks: Sequence[Block], spots: Sequence[BlockSpot]) -> dict[int, bytes]:
    """The tag of each block, by the offset of its slot."""
    return {
        spot.offset: mac.tag((*group, block.block_hash), block.payload)
        for block, spot in zip(blocks, spots, strict=True)
    }


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
