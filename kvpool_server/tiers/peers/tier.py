"""Other kvpool servers as a tier: a block that lies in any one's memory comes up from there.

Truth and bytes stay with the owner: a block is there if its owner's lookup leases it, and its bytes are verified. Each
peer has a health of its own: one that is dead, slow or lying costs misses, and is not asked again for a while. Nothing
is written to peers: each keeps what its own engines store, and what its own lookups have read from others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog

from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import BusyError, ConfigError, LeaseExpiredError
from kvpool_server.cache.entry import Entry
from kvpool_server.cache.namespaces import PoolNamespace
from kvpool_server.tiers.health import Health
from kvpool_server.tiers.peers.directory import Directory, is_announced
from kvpool_server.tiers.peers.handover import HandOver
from kvpool_server.tiers.thread_pool import DaemonThreadPool
from kvpool_server.tiers.tier import Block, BlockKey, Prompt, Tier, TierError

if TYPE_CHECKING:
    from kvpool.v1 import pool_pb2 as pb
    from kvpool_server.tiers.peers.peer import LeasedRun, Peer

log = structlog.get_logger()

T = TypeVar("T")

LEASE_MS = 5_000
"""How long a peer keeps the blocks that it has found, until they are read."""
CONTROL_MS, STALL_MS, DATA_MS = 500, 1_000, 5_000
"""Deadlines of a question to a peer, of a silence while it sends, and of a read."""
MAX_LEASED = 1 << 16
"""Blocks that are leased and not read. Beyond it the oldest are forgotten, and their leases expire."""
QUESTIONS, READS = 4, 4
"""Threads for each."""
ASKED_AT_ONCE, MAX_ASKING = 1, 16
"""Questions to one peer, and those with which a slow one is behind: to further ones all its blocks are misses."""
CLOSE_S = 2.0
WATCH_S, FORGET_S = 5.0, 60.0
"""How often servers are asked whether they answer, and after how long without an answer one that only the directory has
named is forgotten."""
MAX_OWNERS = 3
"""Servers that answer, of which one question's blocks are sought, beside those that are always asked."""
MAX_PEERS = 64
"""Servers that are reached; the one that was not asked for longest gives way."""


class _Level:
    """A peer, and whether it is asked and read."""

    def __init__(self, endpoint: str, peer: Peer, clock: Callable[[], float]):
        self.peer = peer
        self.questions = Health(f"peer {endpoint}", clock)
        self.reads = Health(f"bytes of peer {endpoint}", clock)
        self.turn = asyncio.Semaphore(ASKED_AT_ONCE)
        self.num_asking = 0
        self.read_bytes = 0
        self.worked_at = clock()


@dataclass(slots=True, eq=False)
class _Lease:
    """What a peer has leased.

    Args:
        unread: blocks.
        num_reads: under way.
    """

    level: _Level
    run: LeasedRun
    ends_at: float
    unread: set[bytes] = field(default_factory=set)
    num_reads: int = 0


class PeersTier(Tier):
    """Reads from peers.

    Args:
        config: how to reach any, but for its endpoint.
        peers: endpoints of those that are always asked, after those of the directory.
        handover_bytes: that peers are asked to read at most when this server leaves; 0: none.
        clock: monotonic seconds.
    """

    keeps = False
    reads_at_once = READS

    def __init__(
        self,
        name: str,
        config: ClientConfig,
        peers: Sequence[str],
        directory: Directory | None = None,
        handover_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name)
        self._config = config
        self._peers = peers
        self._directory = directory
        self._handover_bytes = handover_bytes
        self.hands_over = handover_bytes > 0
        self._clock = clock
        self._levels: dict[str, _Level] = {}
        self._has_warned = False
        self._leased: OrderedDict[BlockKey, _Lease] = OrderedDict()
        self._questions: DaemonThreadPool | None = None
        self._reads: DaemonThreadPool | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._questions = DaemonThreadPool(QUESTIONS, "kvpool-peers-ask")
        self._reads = DaemonThreadPool(READS, "kvpool-peers-read")
        for endpoint in self._peers:
            await self._level(endpoint)
        if self._directory is not None:
            self._directory.open()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Asks servers whether they answer, and forgets those of the directory that have ended."""
        while True:
            await asyncio.sleep(WATCH_S)
            for endpoint, level in list(self._levels.items()):
                await self._call(level.questions, self._questions, level.peer.ping)
                if level.questions.is_working:
                    level.worked_at = self._clock()
                elif endpoint not in self._peers and self._clock() - level.worked_at > FORGET_S:
                    self._drop(endpoint)

    def _drop(self, endpoint: str) -> None:
        if (level := self._levels.pop(endpoint, None)) is not None:
            asyncio.get_running_loop().run_in_executor(None, level.peer.close)

    async def close(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if self._directory is not None:
            await self._directory.close()
        levels, self._levels = self._levels, {}
        pools, self._questions, self._reads = (self._questions, self._reads), None, None
        await asyncio.gather(*(asyncio.to_thread(level.peer.close) for level in levels.values()))
        await asyncio.gather(*(asyncio.to_thread(threads.close, CLOSE_S) for threads in pools if threads is not None))

    async def find(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        found: set[bytes] = set()
        if namespace.is_measurement:
            return [False] * len(block_hashes)
        num_asked = 0
        for endpoint in await self._likely(namespace, group_idx, block_hashes):
            missing = [block_hash for block_hash in block_hashes if block_hash not in found]
            if not missing:
                break
            if num_asked == MAX_OWNERS and endpoint not in self._peers:
                continue
            level = await self._level(endpoint)
            if level is None or not (level.reads.is_available and level.questions.is_available):
                continue
            if level.num_asking == MAX_ASKING:
                continue
            num_asked += endpoint not in self._peers
            run = await self._ask(level, level.peer.lease, namespace, group_idx, missing)
            if run is not None:
                found |= run.indices.keys()
                self._remember(namespace, level, run)
        has_directory = self._directory is not None and self._directory.is_available
        if not (found or has_directory or any(level.questions.is_available for level in self._levels.values())):
            raise TierError(f"{self.name}: no other server answers")
        return [block_hash in found for block_hash in block_hashes]

    async def _ask(self, level: _Level, question: Callable[..., T], *args: object) -> T | None:
        """As `_call`, one question at a time: a peer that does not answer keeps no thread from the others."""
        level.num_asking += 1
        try:
            async with level.turn:
                return await self._call(level.questions, self._questions, question, *args)
        finally:
            level.num_asking -= 1

    async def _likely(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[str]:
        """Endpoints of peers that may have some of these blocks, the likeliest first."""
        owners: list[str] = []
        if self._directory is not None:
            tokens = namespace.groups[group_idx].spec.block_tokens
            owners = await self._directory.owners(namespace.fingerprint, group_idx, block_hashes, tokens)
        return [*owners, *(peer for peer in self._peers if peer not in owners)]

    async def _level(self, endpoint: str) -> _Level | None:
        """None for one that the directory names, and the settings do not allow; raises ConfigError for a named one.

        That is for files that cannot be used, and for plaintext to another host.
        """
        level = self._levels.pop(endpoint, None)
        if level is None:
            if self._questions is None:
                return None
            from kvpool_server.tiers.peers.peer import Peer  # `--help` loads no gRPC.

            try:
                peer = await self._questions.call(Peer, dataclasses.replace(self._config, endpoint=endpoint))
            except ConfigError as error:
                if endpoint in self._peers:
                    raise ConfigError(f"tier {self.name}: {error}") from None
                if not self._has_warned:
                    problem = "the tier's options do not fit a server that the directory names"
                    log.error(problem, tier=self.name, endpoint=endpoint, error=str(error))
                self._has_warned = True
                return None
            level = _Level(endpoint, peer, self._clock)
            if (other := self._levels.pop(endpoint, None)) is not None:  # Another question has reached it meanwhile.
                peer.close()
                level = other
        self._levels[endpoint] = level  # The last used is last.
        if len(self._levels) > MAX_PEERS:
            self._drop(next(iter(self._levels)))
        return level

    def _remember(self, namespace: PoolNamespace, level: _Level, run: LeasedRun) -> None:
        lease = _Lease(level, run, min(run.slots.ends_at, time.monotonic() + LEASE_MS / 1000), set(run.indices))
        for block_hash in run.indices:
            key = (namespace.fingerprint, run.group_idx, block_hash)
            if (older := self._leased.get(key)) is not None:
                self._forget(key, older)
            self._leased[key] = lease
        while self._leased:
            key, oldest = next(iter(self._leased.items()))
            if len(self._leased) <= MAX_LEASED and time.monotonic() < oldest.ends_at:
                break
            self._forget(key, oldest)

    def _forget(self, key: BlockKey, lease: _Lease) -> None:
        """A lease on a block is of no use any more; it ends with the last of its blocks."""
        if self._leased.get(key) is lease:
            del self._leased[key]
        lease.unread.discard(key[2])
        if not lease.unread and not lease.num_reads:
            lease.level.peer.release(lease.run.lease_id)

    async def read(
        self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        sums: list[Sequence[int] | None] = [None] * len(block_hashes)

        async def read(lease: _Lease, nths: list[int]) -> None:
            names, destinations = [block_hashes[nth] for nth in nths], [into[nth] for nth in nths]
            level = lease.level
            read = await self._call(level.reads, self._reads, level.peer.read, lease.run, names, destinations)
            for nth, checksums in zip(nths, read or (), strict=False):
                sums[nth] = checksums
                self.counters["read_bytes"] += into[nth].nbytes
                level.read_bytes += into[nth].nbytes
            lease.num_reads -= 1
            for name in names:
                self._forget((namespace.fingerprint, group_idx, name), lease)

        def leases() -> list[_Lease | None]:
            named = (self._leased.get((namespace.fingerprint, group_idx, each)) for each in block_hashes)
            return [lease if lease is not None and time.monotonic() < lease.ends_at else None for lease in named]

        live = leases()
        if ended := [each for each, lease in zip(block_hashes, live, strict=True) if lease is None]:
            await self.find(namespace, group_idx, ended)
            live = leases()
        parts = list(_neighbours(live, block_hashes))
        for lease, _ in parts:
            lease.num_reads += 1
        reading = asyncio.gather(*(read(*part) for part in parts), return_exceptions=True)
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:  # The threads still write.
            await asyncio.wait([reading])
            raise
        return sums

    async def _call(
        self, health: Health, threads: DaemonThreadPool | None, call: Callable[..., T], *args: object
    ) -> T | None:
        """What a peer answers; None if it does not, or is not to be asked now."""
        if threads is None or not health.is_available:
            return None
        try:
            with health.call():
                try:
                    return await threads.call(call, *args)
                except (LeaseExpiredError, BusyError):  # The peer works; its blocks are misses.
                    return None
        except Exception:  # `Health` has logged it.
            return None

    async def hand_over(self, prompts: Iterator[Prompt]) -> None:
        async def ask(endpoint: str, question: Callable[[Peer], T]) -> T | None:
            level = await self._level(endpoint)
            return None if level is None else await self._ask(level, question, level.peer)

        others = await self._directory.servers() if self._directory is not None else []
        receivers = [*self._peers, *(other for other in others if other not in self._peers)]
        handed = HandOver(receivers, self._handover_bytes, self._likely, ask)
        try:
            await handed.run(prompts)
        finally:
            read_by = len(+handed.bytes_of)
            log.info("blocks handed over", tier=self.name, blocks=handed.num_blocks, servers=read_by, of=len(receivers))

    def stats(self) -> pb.TierStats:
        stats = super().stats()
        for endpoint, level in list(self._levels.items()):
            is_up = level.questions.is_working and level.reads.is_available
            stats.servers.add(name=endpoint, up=is_up, read_bytes=level.read_bytes)
        if self._directory is not None:
            stats.servers.add(name=self._directory.name, up=self._directory.is_working)
            stats.counters["unannounced_blocks"] = self._directory.num_dropped
        return stats

    def stored(self, entry: Entry) -> None:
        self._hold(entry, is_there=True)

    def left(self, entry: Entry) -> None:
        self._hold(entry, is_there=False)

    def _hold(self, entry: Entry, *, is_there: bool) -> None:
        group = entry.group
        if (
            self._directory is not None
            and not group.is_measurement
            and is_announced(entry.block_hash, group.spec.block_tokens)
        ):
            self._directory.hold(group.fingerprint, group.idx, entry.block_hash, is_there=is_there)

    async def write(self, namespace: PoolNamespace, group_idx: int, blocks: Sequence[Block]) -> int:
        return 0

    async def remove(self, namespace: PoolNamespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        """Peers keep theirs."""

    async def clear(self, fingerprint: bytes = b"") -> None:
        """Peers keep theirs."""


def _neighbours(leases: Sequence[_Lease | None], block_hashes: Sequence[bytes]) -> Iterator[tuple[_Lease, list[int]]]:
    """Parts of one lease's neighbours, each as indices of blocks."""
    part: list[int] = []
    for nth, lease in enumerate(leases):
        if lease is None:
            continue
        previous = leases[part[-1]] if part else None
        indices = lease.run.indices
        if lease is previous and indices[block_hashes[nth]] == indices[block_hashes[part[-1]]] + 1:
            part.append(nth)
            continue
        if previous is not None:
            yield previous, part
        part = [nth]
    if part and (last := leases[part[-1]]) is not None:
        yield last, part
