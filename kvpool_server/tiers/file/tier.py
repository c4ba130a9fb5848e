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
import functools
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import structlog
from pydantic import ByteSize, Field, field_validator

from kvpool.protocol.errors import ConfigError, InvalidRequestError, OutOfSpaceError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Group, Record
from kvpool_server.cache.pool import Pool
from kvpool_server.cache.steps import Steps, finish
from kvpool_server.tiers.block_mac import BlockMac
from kvpool_server.tiers.calls import DaemonThreadPool
from kvpool_server.tiers.file.directory import OwnDirectory, UntrustedFileError, raise_descriptor_limit
from kvpool_server.tiers.file.extents import BlockSpot, Disk, Extents, UsrbioDisk, read_all
from kvpool_server.tiers.file.journal import Inventory
from kvpool_server.tiers.file.own_blocks import TTL_MS, OwnBlocks
from kvpool_server.tiers.file.peer_directories import DEFAULT_MEMORY_BYTES, PeerBlocks, PeerDirectories
from kvpool_server.tiers.tier import Block, Tier, TierContext, TierError, TierOptions

if TYPE_CHECKING:
    from kvpool.v1 import pool_pb2 as pb

log = structlog.get_logger()

MIN_MEMORY_BYTES, SIZE_PER_MEMORY = 1 << 30, 16
"""The blocks of this server's journal may take a share of the tier's size in memory, and at least so much."""
REFRESH_S = 1.0
CLOSE_S = 2.0


class FileOptions(TierOptions):
    """A directory, on a local disk or shared."""

    EXAMPLE: ClassVar[str] = "file:/mnt/kv,size=200GiB"
    PLACE: ClassVar[str] = "path"

    path: Path = Field(description="directory, on a local disk or shared")
    size: ByteSize = Field(ge=4 << 20, description="bytes that this server may take there, as 200GiB")
    # `.` and `..` are other directories, and a directory that is being deleted begins with a dot.
    name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*)?$",
        title="a name of letters, digits, dots, _ and - that does not begin with a dot",
        description="this server's directory below; default: host and port",
    )
    threads: int = Field(4, ge=1, le=64, description="reads and writes at once")
    io: Literal["direct", "buffered", "usrbio"] = Field(
        "direct", description="direct bypasses the page cache where possible; usrbio is for mounts of 3FS"
    )
    owners: tuple[int, ...] = Field(
        (), description="user ids beside this server's own whose directories and files are trusted, as 1000+1001"
    )
    peer_memory: ByteSize = Field(
        ByteSize(DEFAULT_MEMORY_BYTES), ge=0, description="memory for what other servers' journals list, as 4GiB"
    )
    create: bool = Field(False, description="yes: make the directory if it does not exist")

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: Path) -> Path:
        """A relative path depends on where the server was started; ~ would be a directory of that name."""
        if not path.is_absolute():
            raise ValueError("an absolute path, as in file:/mnt/kv")
        return path

    @field_validator("owners", mode="before")
    @classmethod
    def _split_owners(cls, owners: object) -> object:
        if not isinstance(owners, str):
            return owners
        if not all(part.isascii() and part.isdecimal() for part in owners.split("+")):
            raise ValueError("user ids as numbers, as 1000 or 1000+1001")
        return tuple(map(int, owners.split("+")))

    @property
    def tier_name(self) -> str:
        return f"file:{self.path}"

    def make(self, context: TierContext) -> FileTier:
        return FileTier(self, context, UsrbioDisk(self.path) if self.io == "usrbio" else Disk())


class FileTier(Tier):
    """Reads and writes the blocks of this server's directory, and reads those of its peers. `open` sets `pool`."""

    pool: Pool
    _blocks: OwnBlocks
    _peers: PeerDirectories

    def __init__(self, options: FileOptions, context: TierContext, disk: Disk):
        super().__init__(options.tier_name)
        self._options = options
        self._policy, self._run = context.policy, context.run
        self._disk = disk
        self._mac = BlockMac.of(options)
        direct = options.io == "direct"
        self._make_extents = functools.partial(Extents, disk=disk, open_files=context.open_files, direct=direct)
        name = options.name or re.sub(r"[^A-Za-z0-9._-]|^\.", "_", f"{socket.gethostname()}-{context.listen[1]}")
        owners = frozenset({os.geteuid(), *options.owners})
        self._own = OwnDirectory(self.name, options.path, name, options.create, context.handover_s, owners)
        self._files = contextlib.ExitStack()
        self._writing = asyncio.Lock()
        self._threads: DaemonThreadPool | None = None
        self._refresh_thread: DaemonThreadPool | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._warnings: dict[str, str] = {}

    async def open(self) -> None:
        raise_descriptor_limit()
        self._threads = DaemonThreadPool(self._options.threads, "kvpool-tier")
        self._refresh_thread = DaemonThreadPool(1, "kvpool-tier-refresh")
        try:
            await self._own.acquire(self._threads)
            await self._threads.call(self._restore)
        except (OSError, ConfigError) as error:
            await self.close()
            if isinstance(error, ConfigError):
                raise
            fix = "" if isinstance(error, UntrustedFileError) else "; give a directory that this server can write to"
            raise ConfigError(f"tier {self.name}: {error}{fix}") from None
        self._refreshing = asyncio.create_task(self._refresh_forever())

    def _restore(self) -> None:
        own, options = self._own, self._options
        memory_bytes = max(MIN_MEMORY_BYTES, options.size // SIZE_PER_MEMORY)
        empty = functools.partial(Inventory, memory_bytes, has_tags=self._mac is not None)
        self._peers = PeerDirectories(own.root, own.path.name, self._make_extents, options.peer_memory, empty)
        self._files.callback(self._peers.close)
        make, files = self._make_extents, self._files
        self._blocks = OwnBlocks(
            self.name, own.directory, options.size, self._policy, self._disk, empty, make, self._mac, files
        )
        self.pool = self._blocks.pool

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._blocks.flush_journal(self._running_threads())
            except (TimeoutError, OSError, TierError) as error:
                log.warning("a tier's last changes are not in its journal", tier=self.name, error=str(error))
        if self._threads is not None and self._refresh_thread is not None:
            threads, self._threads = self._threads, None
            # A thread that hangs in the file system keeps its files.
            if threads.close(CLOSE_S) & self._refresh_thread.close(CLOSE_S):
                self._files.close()
        self._own.release()

    def known(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        if self._own.is_gone:
            return [False] * len(block_hashes)
        key = group.fingerprint, group.idx
        index, has_peers = self._blocks.index(key), len(self._peers) > 0
        return [
            ((entry := index.get(block_hash)) is not None and entry.complete)
            or (has_peers and self._peers.find(key, block_hash) is not None)
            for block_hash in block_hashes
        ]

    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        return self.known(group, block_hashes)

    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        async with self._writing:
            threads = self._running_threads()
            there = self.known(group, [block.block_hash for block in blocks])
            new = {block.block_hash: block for block, is_there in zip(blocks, there, strict=True) if not is_there}
            written = 0
            try:
                if new:
                    await self._blocks.write(threads, group, list(new.values()))
                    written = len(new)
                    self.counters["written_bytes"] += sum(block.payload.nbytes for block in new.values())
                await self._blocks.flush_journal(threads)
            except (InvalidRequestError, OutOfSpaceError) as error:
                self.counters["refused_blocks"] += len(new)
                log.debug("a tier has no room for blocks", tier=self.name, blocks=len(new), error=str(error))
            except OSError as error:
                raise TierError(f"{self.name}: {error}") from None
        return sum(there) + written

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        threads, key, mac = self._running_threads(), (group.fingerprint, group.idx), self._mac
        index, own = self._blocks.index(key), self._blocks.extents
        sources: dict[Extents, dict[int, BlockSpot]] = {own: {}}
        theirs: dict[int, tuple[PeerBlocks, Record]] = {}
        for nth, (block_hash, view) in enumerate(zip(block_hashes, into, strict=True)):
            entry = index.get(block_hash)
            if entry is not None and entry.complete:
                extents, record = own, self._blocks.record(entry)
            elif (peer := self._peers.find(key, block_hash)) is not None:
                theirs[nth] = peer
                extents, record = peer[0].extents, peer[1]
            else:
                continue
            check = None if mac is None else functools.partial(mac.is_valid, (*key, block_hash), tag=record.tag)
            spot = BlockSpot(record.offset, view, record.checksums, check)
            sources.setdefault(extents, {})[nth] = spot
        ours = [block_hashes[nth] for nth in sources[own]]
        runs = [BlockRun(group.idx, ours)]
        lease_id = 0
        if ours:  # They stay where they are until the lease is released.
            leased = finish(self.pool.lookups.find(group.fingerprint, runs, False, TTL_MS))
            self.pool.lookups.record_use(leased)
            lease_id = leased.lease_id
        found: list[Sequence[int] | None] = [None] * len(block_hashes)
        try:
            for source, spots in sources.items():
                sound = await read_all(threads, source, list(spots.values()))
                for (nth, spot), is_sound in zip(spots.items(), sound, strict=True):
                    if is_sound:
                        found[nth] = spot.checksums
                        self.counters["read_bytes"] += spot.view.nbytes
        except OSError as error:
            if error.errno == errno.EIO and ours:
                # The disk fails, or all of these blocks lie on a bad sector, which must fail the tier only once.
                finish(self.pool.removals.remove(group.fingerprint, runs))
            raise TierError(f"{self.name}: {error}") from None
        finally:
            self.pool.release([lease_id])
        for nth, (blocks, record) in theirs.items():
            if found[nth] is None:
                blocks.inventory.hide(record)
        if corrupt := [block_hashes[nth] for nth in sources[own] if found[nth] is None]:
            self.counters["corrupt_blocks"] += len(corrupt)
            log.error("corrupt blocks in a tier were removed", tier=self.name, blocks=len(corrupt))
            finish(self.pool.removals.remove(group.fingerprint, [BlockRun(group.idx, corrupt)]))
        return found

    async def remove(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        if self.pool.namespace(group.fingerprint) is not None:
            removal = self.pool.removals.remove(group.fingerprint, [BlockRun(group.idx, block_hashes)])
            await asyncio.shield(self._drop(removal))

    async def clear(self, fingerprint: bytes = b"") -> None:
        if not fingerprint or self.pool.namespace(fingerprint) is not None:
            await asyncio.shield(self._drop(self.pool.removals.clear(fingerprint)))

    async def _drop(self, removal: Steps[int]) -> None:
        """Callers shield it from cancellation: a thread truncates extents, and none may be written to meanwhile."""
        await self._run(removal)
        async with self._writing:
            try:
                await self._blocks.free_extents(self._running_threads())
            except OSError as error:
                raise TierError(f"{self.name}: {error}") from None

    def specs(self) -> list[NamespaceSpec]:
        opened = self.pool.open_namespaces()
        return [namespace.spec for namespace in opened if any(group.index for group in namespace.groups)]

    def holdings(self, fingerprint: bytes) -> pb.TierHoldings:
        namespace = self.pool.namespace(fingerprint)
        held = [] if namespace is None else [(len(group.index), group.spec.slot_bytes) for group in namespace.groups]
        told = super().holdings(fingerprint)
        told.num_entries = sum(count for count, _ in held)
        told.nbytes = sum(count * slot_bytes for count, slot_bytes in held)
        return told

    def stats(self) -> pb.TierStats:
        pool, told = self.pool.stats(), super().stats()
        told.size_bytes, told.used_bytes = pool.arena_bytes, pool.arena_bytes - pool.free_bytes
        told.num_entries = pool.num_entries
        told.counters["evicted_blocks"] = pool.counters["evicted_blocks"]
        return told

    async def refresh(self) -> bool:
        """Sends a heartbeat and reads what peers have added; True if they have more. Failures are logged."""
        assert self._refresh_thread is not None
        calls: dict[str, Callable[[], bool | None]] = {
            "a tier's directory cannot be touched": self._own.send_heartbeat,
            "a tier's path cannot be read": self._peers.refresh,
        }
        has_more: bool | None = False
        for problem, call in calls.items():
            error = ""
            try:
                has_more = await self._refresh_thread.call(call)
            except Exception as caught:
                has_more, error = False, str(caught)
                if error != self._warnings.get(problem):  # Once for each error in a row.
                    log.warning(problem, tier=self.name, error=error)
            self._warnings[problem] = error
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
