"""The file tier: a directory of a local disk, of NFS or of 3FS, kept as the arena is.

Its slots are managed by a pool of their own (`kvpool_server.cache`): what is leased while it is read, what gives way
when there is no room, and in which order, are decided by the same code as in memory. What lies where is written to a
journal, from which the next process on this directory starts.

    PATH/NAME/lock             whose it is
    PATH/NAME/journal          what lies where
    PATH/NAME/extent-00000...  slots

Servers that share PATH read each other's blocks, and write only to their own directories.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from kvpool.errors import ConfigError, InvalidRequestError, OutOfSpaceError
from kvpool.holdings import TierHoldings
from kvpool.namespace import NamespaceSpec
from kvpool.types import BlockRun, TierStats
from kvpool_server.cache.allocator.arena import ALIGNMENT, Arena
from kvpool_server.cache.entry import Entry, Record
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.limits import Limits
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.tier_access import commit, reserve, restore
from kvpool_server.collector import no_collections
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.extent_io import Place, Source, read_all, write_all
from kvpool_server.tiers.file.extents import Extents
from kvpool_server.tiers.file.journal import GroupKey, Inventory, Journal
from kvpool_server.tiers.file.lock import DirectoryGoneError, DirectoryLock, take
from kvpool_server.tiers.file.news import News
from kvpool_server.tiers.file.open_files import OPEN_FILES, OpenFiles, raise_descriptor_limit
from kvpool_server.tiers.file.peer_directories import PeerDirectories
from kvpool_server.tiers.file.shelf import Shelf
from kvpool_server.tiers.health import ANSWER_S
from kvpool_server.tiers.threads import Threads
from kvpool_server.tiers.tier import Block, Tier, TierError

log = structlog.get_logger()

EXTENTS_PER_TIER = 256
MIN_EXTENT_BYTES = 32 << 20
MIN_EXTENTS = 4
LOOK_AROUND_S = 1.0
LOOK_AGAIN_S = 0.2
CLOSE_S = 2.0

_LIMITS = Limits(max_ttl_ms=3_600_000, grace_ms=0, max_namespaces=100_000)
_TTL_MS = 3_600_000


class FileTier(Tier):
    """See the module.

    Args:
        root: the path that is shared, or not.
        owner: name of this server's directory below it.
        size_bytes: what its slots may take of the disk.
        policy: makes what decides who goes.
        threads: that read and write at once.
        direct: whether to pass by the page cache where that is possible.
        handover_s: how long to wait for a predecessor of the same name to stop; see `open`.
        create: whether to make the root where it is not there; else that is an error, for a mount may be missing.
        files: where descriptors are counted.
    """

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
        files: OpenFiles = OPEN_FILES,
    ):
        self.name = f"file:{root}"
        self.counters: Counter[str] = Counter()
        self._root = root
        self._directory = root / owner
        self._size_bytes = size_bytes
        self._policy = policy
        self._num_threads = threads
        self._direct = direct
        self._create = create
        self._handover_s = handover_s
        self._disk = disk or Disk()
        self._files = files
        self._ids = itertools.count(1)
        self._journal = Journal(self._directory, self._disk)
        self._peers = PeerDirectories(root, self._directory, self._disk, files, direct)
        self._to_close: list[Callable[[], None]] = [self._journal.close, self._peers.close]
        self._news = News()
        self._writing = asyncio.Lock()
        self._lock: DirectoryLock | None = None
        self._threads: Threads | None = None
        self._watcher: Threads | None = None
        self._looking: asyncio.Task[None] | None = None
        self._is_gone = False
        self._said: dict[str, str] = {}

    # Start and end

    async def open(self) -> None:
        raise_descriptor_limit()
        self._threads = Threads(self._num_threads, "kvpool-tier")
        self._watcher = Threads(1, "kvpool-tier-watch")
        try:
            self._lock = await self._take_over(self._threads)
            await self._threads.call(self._load)
        except TimeoutError:
            await self.close()
            raise ConfigError(
                f"tier {self.name}: the file system does not answer; see whether it is mounted, and its server there"
            ) from None
        except BlockingIOError:
            await self.close()
            raise ConfigError(
                f"tier {self.name}: {self._directory} belongs to another running server; give each server a path, or "
                "a name= of its own; where this one is to replace it, stop the other server first"
            ) from None
        except ConfigError:
            await self.close()
            raise
        except OSError as error:
            await self.close()
            raise ConfigError(f"tier {self.name}: {error}; give a directory that this server can write to") from None
        self._looking = asyncio.create_task(self._keep_looking())

    async def _take_over(self, threads: Threads) -> DirectoryLock:
        """The directory's lock; waits for a server that is about to stop, and to write down what it has.

        Raises:
            BlockingIOError: that server did not stop in time.
        """
        ends_at = time.monotonic() + self._handover_s
        is_waiting = False
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await threads.call(self._take_directory)
            except BlockingIOError:
                if time.monotonic() >= ends_at:
                    raise
            left_s = round(ends_at - time.monotonic(), 1)
            if not is_waiting:
                is_waiting = True
                log.warning(
                    "a tier waits for another server to let go of its directory",
                    tier=self.name,
                    directory=str(self._directory),
                    left_s=left_s,
                )
            await asyncio.sleep(LOOK_AGAIN_S)

    def _take_directory(self) -> DirectoryLock:
        if self._create:
            self._root.mkdir(parents=True, exist_ok=True)
        elif not self._root.exists():
            raise ConfigError(
                f"tier {self.name}: {self._root} does not exist; mount it, or add create=yes to have it made on the "
                "disk that is there"
            )
        return take(self._directory)

    @no_collections()
    def _load(self) -> None:
        started = time.perf_counter()
        inventory = self._journal.load()
        if inventory.trouble:
            log.warning("a tier's journal cannot be read to its end", tier=self.name, error=inventory.trouble)
        extent_bytes = inventory.extent_bytes or _extent_bytes(self._size_bytes)
        if extent_bytes > self._size_bytes:
            inventory, extent_bytes = Inventory(), _extent_bytes(self._size_bytes)
        inventory.extent_bytes = extent_bytes
        arena = Arena(self._size_bytes, extent_bytes)
        self._pool = Pool(arena, time.monotonic, lambda: next(self._ids), _LIMITS, self._policy)
        self._extents = Extents(
            self._directory, extent_bytes, self._disk, self._files, writable=True, direct=self._direct
        )
        self._to_close.append(self._extents.close)
        for fingerprint, spec in inventory.specs.items():
            try:
                opened, _ = self._pool.open_namespace(spec)
            except InvalidRequestError:
                continue  # Its blocks are larger than what a smaller tier has room for.
            for group in opened.groups:
                if records := inventory.groups.get((fingerprint, group.idx)):
                    restore(self._pool, group, list(records.values()))
        self._pool.observe(self._news)
        self._journal.begin(inventory.only(self._lies_at))
        self._extents.tidy(arena.num_extents, set(arena.unused_extents()))
        for fingerprint in inventory.specs:
            self._news.already_told(fingerprint)
        self._warn_of_a_small_disk()
        if inventory.specs:
            seconds = round(time.perf_counter() - started, 2)
            log.info("tier restored", tier=self.name, entries=self._pool.stats().num_entries, seconds=seconds)

    def _warn_of_a_small_disk(self) -> None:
        disk = os.statvfs(self._directory)
        room = disk.f_bavail * disk.f_frsize + self._pool.arena.used_bytes
        if room < self._size_bytes:
            log.warning(
                "a tier may take more than its disk has; what it then cannot write is dropped, and nothing gives way",
                tier=self.name, size_bytes=self._size_bytes, room_bytes=room,
            )  # fmt: skip

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if self._threads is not None and self._watcher is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._write_news()
            except (TimeoutError, OSError, TierError) as error:
                log.warning("a tier's last news were not written", tier=self.name, error=str(error))
            threads, self._threads = self._threads, None
            # Who hangs in the file system goes on hanging, and keeps its files.
            if threads.close(CLOSE_S) & self._watcher.close(CLOSE_S):
                for close in self._to_close:
                    close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # What is there

    def known(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        if self._is_gone:
            return [False] * len(block_hashes)
        index = self._index(namespace.fingerprint, group_idx)
        group = (namespace.fingerprint, group_idx)
        others = len(self._peers) > 0
        return [
            ((entry := index.get(block_hash)) is not None and entry.complete)
            or (others and self._peers.find(group, block_hash) is not None)
            for block_hash in block_hashes
        ]

    async def find(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        return self.known(namespace, group_idx, block_hashes)

    def _lies_at(self, group: GroupKey, record: Record) -> bool:
        entry = self._index(*group).get(record.block_hash)
        return entry is not None and entry.offset == record.offset

    def _index(self, fingerprint: bytes, group_idx: int) -> dict[bytes, Entry]:
        namespace = self._pool.namespace(fingerprint)
        return {} if namespace is None else namespace.groups[group_idx].index

    # Down

    async def write(self, namespace: Namespace, group_idx: int, blocks: Sequence[Block]) -> int:
        async with self._writing:
            self._running()
            there = self.known(namespace, group_idx, [block.block_hash for block in blocks])
            new = {block.block_hash: block for block, is_there in zip(blocks, there, strict=True) if not is_there}
            try:
                written = await self._write_new(namespace, group_idx, list(new.values())) if new else 0
                await self._write_news()
            except (InvalidRequestError, OutOfSpaceError) as error:
                self.counters["refused_blocks"] += len(new)
                log.debug("a tier has no room for blocks", tier=self.name, blocks=len(new), error=str(error))
                written = 0
            except OSError as error:
                raise TierError(f"{self.name}: {error}") from None
        return sum(there) + written

    async def _write_new(self, namespace: Namespace, group_idx: int, blocks: Sequence[Block]) -> int:
        opened = self._pool.namespace(namespace.fingerprint) or self._pool.open_namespace(namespace.spec)[0]
        self._news.opened(namespace)
        group = opened.groups[group_idx]
        grant = reserve(self._pool, group, _runs(group_idx, blocks))
        # Nobody else writes here, and no block is there: all are granted.
        places = [
            Place(offset, block.payload, block.checksums) for offset, block in zip(grant.offsets, blocks, strict=True)
        ]
        try:
            await write_all(self._running(), self._extents, places)
        except OSError:
            self._pool.put_revoke(grant.ticket_id)
            raise
        commit(self._pool, grant.ticket_id, [block.checksums for block in blocks])
        self.counters["written_bytes"] += sum(block.payload.nbytes for block in blocks)
        return len(blocks)

    async def _write_news(self) -> None:
        frames = self._news.take()
        if frames:
            try:
                await self._running().call(self._journal.append, frames)
            except BaseException:
                self._news.put_back(frames)
                raise

    # Up

    async def read(
        self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        group = (namespace.fingerprint, group_idx)
        self._running()
        own = self._index(*group)
        sources: dict[Source, dict[int, Place]] = {}
        theirs: dict[int, tuple[Shelf, Record]] = {}
        for nth, (block_hash, view) in enumerate(zip(block_hashes, into, strict=True)):
            entry = own.get(block_hash)
            if entry is not None and entry.complete:
                place = Place(entry.offset, view, entry.checksums)
                sources.setdefault(self._extents, {})[nth] = place
            elif (other := self._peers.find(group, block_hash)) is not None:
                theirs[nth] = other
                place = Place(other[1].offset, view, other[1].checksums)
                sources.setdefault(other[0], {})[nth] = place
        here = [block_hashes[nth] for nth in sources.get(self._extents, {})]
        lease_id = self._lease(group, here)
        found: list[Sequence[int] | None] = [None] * len(block_hashes)
        try:
            for source, places in sources.items():
                came = await read_all(self._running(), source, list(places.values()))
                for (nth, place), is_sound in zip(places.items(), came, strict=True):
                    if is_sound:
                        found[nth] = place.checksums
                        self.counters["read_bytes"] += place.view.nbytes
        except OSError as error:
            if error.errno == errno.EIO and here:
                # The disk, or a bad spot that has all of these: that one is not to fail the tier each time anew.
                self._pool.remove(namespace.fingerprint, [BlockRun(group_idx, here)])
            raise TierError(f"{self.name}: {error}") from None
        finally:
            self._pool.release([lease_id])
        for nth, (shelf, record) in theirs.items():
            if found[nth] is None:
                shelf.forget(record)
        changed = [block_hashes[nth] for nth in sources.get(self._extents, {}) if found[nth] is None]
        if changed:
            self.counters["corrupt_blocks"] += len(changed)
            log.error(
                "blocks of a tier cannot be read, or are not what was stored, and are forgotten",
                tier=self.name,
                blocks=len(changed),
            )
            self._pool.remove(namespace.fingerprint, [BlockRun(group_idx, changed)])
        return found

    def _lease(self, group: GroupKey, block_hashes: Sequence[bytes]) -> int:
        """Keeps own blocks where they are until it is released; 0 for none."""
        if not block_hashes:
            return 0
        runs = [BlockRun(group[1], block_hashes)]
        return self._pool.lookup(group[0], runs, prefix_only=False, lease_ttl_ms=_TTL_MS).lease_id

    # Forgetting

    async def remove(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        if self._pool.namespace(namespace.fingerprint) is not None:
            self._pool.remove(namespace.fingerprint, [BlockRun(group_idx, block_hashes)])
            await self._forget_extents()

    async def clear(self, fingerprint: bytes = b"") -> None:
        if not fingerprint or self._pool.namespace(fingerprint) is not None:
            self._pool.clear(fingerprint)
            await self._forget_extents()

    async def _forget_extents(self) -> None:
        """Writes down what is gone, and gives the file system back what nothing lies in."""
        async with self._writing:
            try:
                await self._write_news()
                await self._running().call(self._free, self._pool.arena.unused_extents())
            except OSError as error:
                raise TierError(f"{self.name}: {error}") from None

    def _free(self, extents: Sequence[int]) -> None:
        for idx in extents:
            self._extents.free(idx)

    # State

    def specs(self) -> list[NamespaceSpec]:
        opened = self._pool.open_namespaces()
        return [namespace.spec for namespace in opened if any(group.index for group in namespace.groups)]

    def holdings(self, fingerprint: bytes) -> TierHoldings:
        namespace = self._pool.namespace(fingerprint)
        groups = [] if namespace is None else namespace.groups
        num_entries = sum(len(group.index) for group in groups)
        return TierHoldings(self.name, num_entries, sum(len(group.index) * group.spec.slot_bytes for group in groups))

    def stats(self) -> TierStats:
        pool = self._pool.stats()
        counters = dict(self.counters)
        counters["evicted_blocks"] = pool.counters.get("evicted_blocks", 0)
        return TierStats(
            self.name,
            size_bytes=pool.arena_bytes,
            used_bytes=pool.arena_bytes - pool.free_bytes,
            num_entries=pool.num_entries,
            counters=counters,
        )

    def check_integrity(self) -> None:
        """Recomputes the invariants of its slots; raises AssertionError. For tests: it visits every slot."""
        self._pool.check_integrity()

    # Helpers

    def _running(self) -> Threads:
        if self._threads is None:
            raise TierError(f"{self.name} is closed")
        if self._is_gone:
            raise TierError(f"{self.name}: {self._directory} was removed or replaced; start this server again")
        return self._threads

    async def _keep_looking(self) -> None:
        while True:
            await self._look_around()
            await asyncio.sleep(LOOK_AROUND_S)

    async def _look_around(self) -> None:
        """Says that this server lives, and looks what others have. Whatever fails is tried again the next time."""
        assert self._watcher is not None and self._lock is not None
        try:
            await self._watcher.call(self._lock.give_sign_of_life)
            self._is_gone = False
            self._say("a tier's directory cannot be touched", "")
        except DirectoryGoneError as error:
            if not self._is_gone:
                log.error("a tier's directory has gone, and the tier with it", tier=self.name, error=str(error))
            self._is_gone = True
        except Exception as error:
            self._say("a tier's directory cannot be touched", str(error))
        try:
            await self._watcher.call(self._peers.refresh)
            self._say("a tier's path cannot be read", "")
        except Exception as error:
            self._say("a tier's path cannot be read", str(error))

    def _say(self, what: str, error: str) -> None:
        """Warns, once for each error in a row."""
        if error and error != self._said.get(what):
            log.warning(what, tier=self.name, error=error)
        self._said[what] = error


def _extent_bytes(size_bytes: int) -> int:
    wanted = min(max(size_bytes // EXTENTS_PER_TIER, MIN_EXTENT_BYTES), size_bytes // MIN_EXTENTS)
    return max(wanted // ALIGNMENT, 1) * ALIGNMENT


def _runs(group_idx: int, blocks: Sequence[Block]) -> list[BlockRun]:
    """Blocks in their order, as runs of those that follow each other."""
    runs: list[BlockRun] = []
    hashes: list[bytes] = []
    for block in blocks:
        if not hashes or block.parent_hash != hashes[-1]:
            hashes = []
            runs.append(BlockRun(group_idx, hashes, block.parent_hash))
        hashes.append(block.block_hash)
    return runs
