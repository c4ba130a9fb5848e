"""Other kvpool servers as a tier: a block that lies in any one's memory comes up from there.

Truth and bytes stay with the owner: a block is there if its owner's lookup leases it, and its bytes are verified. Each
peer has a health of its own: one that is dead, slow or lying costs misses, and is not asked again for a while. Nothing
is written to peers: each keeps what its own engines store, and what its own lookups have read from others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import structlog

from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import BusyError, ConfigError, LeaseExpiredError
from kvpool.protocol.text import escaped
from kvpool.transport.helpers import movers_of
from kvpool.transport.mover import MAX_PEERS, Movers
from kvpool.transport.segment import Segment
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.tiers.calls import AWAY_S, DaemonThreadPool, Health
from kvpool_server.tiers.peers.directory import Directory, is_announced
from kvpool_server.tiers.peers.handover import HandOver
from kvpool_server.tiers.peers.leases import Lease, Leases, Level, neighbours
from kvpool_server.tiers.tier import Block, Prompt, Tier, TierError, keys_of

if TYPE_CHECKING:
    from kvpool.v1 import pool_pb2 as pb
    from kvpool_server.tiers.peers.peer import LeasedRun, Peer

log = structlog.get_logger()

T = TypeVar("T")

CONTROL_MS, STALL_MS, DATA_MS = 500, 1_000, 5_000
"""Deadlines of a question to a peer, of a silence while it sends, and of a read."""
QUESTIONS, READS = 4, 2
"""Threads for each. Two large reads fill the wire: one goes on while the next one's room is made."""
MAX_ASKING = 16
"""Questions to one peer with which it is behind: to further ones all its blocks are misses."""
CLOSE_S = 2.0
WATCH_S, FORGET_S = 5.0, 60.0
"""How often servers are asked whether they answer, and after how long without an answer one that only the directory has
named is forgotten."""
MAX_OWNERS = 3
"""Servers that answer, of which one question's blocks are sought, beside those that are always asked."""
MAX_WHY_CHARS = 200
"""Of what a peer's answer says."""
AWAY = f"not asked for up to {AWAY_S[1]:.0f} s, because a call has failed"


class PeersTier(Tier):
    """Reads from peers.

    Args:
        config: how to reach any, but for its endpoint.
        peers: endpoints of those that are always asked, after those of the directory.
        handover_bytes: that peers are asked to read at most when this server leaves; 0: none.
        clock: monotonic seconds.
        own_boot_token: of this server; 0: not known.
        arena: of this server, into which processes of their own read from peers; None: this process does.
    """

    keeps = False
    reads_at_once = READS
    read_bytes = 512 << 20  # The helpers share a large read in large parts, which cost one interpreter fewer turns.

    def __init__(
        self,
        name: str,
        config: ClientConfig,
        peers: Sequence[str],
        directory: Directory | None = None,
        handover_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        own_boot_token: int = 0,
        arena: Callable[[], Segment | None] = lambda: None,
    ):
        super().__init__(name)
        self._own_boot_token, self._arena = own_boot_token, arena
        self._own: set[str] = set()  # Endpoints that have turned out to be this server's.
        self._config = config
        self._peers = peers
        self._directory = directory
        self._handover_bytes = handover_bytes
        self.hands_over = handover_bytes > 0
        self._clock = clock
        self._levels: dict[str, Level] = {}
        self._has_warned = False
        self._leases = Leases()
        self._questions: DaemonThreadPool | None = None
        self._reads: DaemonThreadPool | None = None
        self._movers: Movers | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._questions = DaemonThreadPool(QUESTIONS, "kvpool-peers-ask")
        self._reads = DaemonThreadPool(READS, "kvpool-peers-read")
        if (arena := self._arena()) is not None:
            self._movers = Movers(movers_of(len(os.sched_getaffinity(0))), arena)
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
                boot_token = await self._call(level.questions, self._questions, level.peer.ping)
                if boot_token == self._own_boot_token != 0 and endpoint not in self._own:
                    self._own.add(endpoint)
                    log.error("a tier names this server as another one; take it out", tier=self.name, peer=endpoint)
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
        if self._movers is not None:
            await asyncio.to_thread(self._movers.close)  # A process unmaps the arena before it has ended.
        await asyncio.gather(*(asyncio.to_thread(level.peer.close) for level in levels.values()))
        await asyncio.gather(*(asyncio.to_thread(threads.close, CLOSE_S) for threads in pools if threads is not None))

    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        found = await self._search(group, block_hashes, {})
        has_directory = self._directory is not None and self._directory.health.is_available
        if not (found or has_directory or any(level.questions.is_available for level in self._levels.values())):
            raise TierError(f"{self.name}: no other server answers")
        return [block_hash in found for block_hash in block_hashes]

    async def holders(self, group: Group, block_hashes: Sequence[bytes], away: dict[str, str]) -> Sequence[bool | str]:
        found = await self._search(group, block_hashes, away, lease=False)
        if self._directory is not None and not self._directory.health.is_available:
            away[self._directory.name] = AWAY
        return [found.get(block_hash, False) for block_hash in block_hashes]

    async def _search(
        self, group: Group, block_hashes: Sequence[bytes], away: dict[str, str], lease: bool = True
    ) -> dict[bytes, str]:
        """The peer that has each block, and with `lease` keeps it for a read; `away` takes the others, and why."""
        found: dict[bytes, str] = {}
        num_asked = 0
        for endpoint in await self._likely(group, block_hashes):
            missing = [block_hash for block_hash in block_hashes if block_hash not in found]
            if not missing:
                break
            is_named = endpoint in self._peers
            if num_asked == MAX_OWNERS and not is_named:
                run: LeasedRun | str | None = f"not asked, after {MAX_OWNERS} others"
            elif (level := await self._level(endpoint)) is None:
                run = "the tier's options do not fit it"
            elif not (level.reads.is_available and level.questions.is_available):
                run = AWAY
            elif level.num_asking == MAX_ASKING:
                run = f"not asked, while {MAX_ASKING} questions wait for its answer"
            else:
                num_asked += not is_named
                run = await self._ask(level, level.peer.find, group, missing, lease)
                if run is not None and not isinstance(run, str):
                    found |= dict.fromkeys(run.indices, endpoint)
                    if lease:
                        self._leases.add(group, level, run)
            if isinstance(run, str):
                away[endpoint] = escaped(run, MAX_WHY_CHARS) + ("" if is_named else "; the directory names it")
        return found

    async def _ask(self, level: Level, question: Callable[..., T], *args: object) -> T | str:
        """As `_call`, one question at a time: a peer that does not answer keeps no thread from the others."""
        level.num_asking += 1
        try:
            async with level.turn:
                return await self._call(level.questions, self._questions, question, *args)
        finally:
            level.num_asking -= 1

    async def _likely(self, group: Group, block_hashes: Sequence[bytes]) -> list[str]:
        """Endpoints of peers that may have some of these blocks, the likeliest first."""
        owners: list[str] = []
        if group.is_measurement:
            return owners
        if self._directory is not None:
            owners = await self._directory.owners(group.fingerprint, group.idx, block_hashes, group.spec)
        likely = [*owners, *(peer for peer in self._peers if peer not in owners)]
        return [endpoint for endpoint in likely if endpoint not in self._own]

    async def _level(self, endpoint: str) -> Level | None:
        """None for one that the directory names, and the settings do not allow; raises ConfigError for a named one.

        That is for files that cannot be used, and for plaintext to another host.
        """
        level = self._levels.pop(endpoint, None)
        if level is None:
            if self._questions is None:
                return None
            from kvpool_server.tiers.peers.peer import Peer  # `--help` loads no gRPC.

            try:
                config = dataclasses.replace(self._config, endpoint=endpoint)
                peer = await self._questions.call(Peer, config, self._movers)
            except ConfigError as error:
                if endpoint in self._peers:
                    raise ConfigError(f"tier {self.name}: {error}") from None
                if not self._has_warned:
                    problem = "the tier's options do not fit a server that the directory names"
                    log.error(problem, tier=self.name, endpoint=endpoint, error=str(error))
                self._has_warned = True
                return None
            level = Level(endpoint, peer, self._clock)
            if (other := self._levels.pop(endpoint, None)) is not None:  # Another question has reached it meanwhile.
                peer.close()
                level = other
        self._levels[endpoint] = level  # The last used is last.
        if len(self._levels) > MAX_PEERS:
            self._drop(next(iter(self._levels)))
        return level

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        sums: list[Sequence[int] | None] = [None] * len(block_hashes)

        async def read(lease: Lease, nths: list[int]) -> None:
            names, destinations = [block_hashes[nth] for nth in nths], [into[nth] for nth in nths]
            level = lease.level
            read = await self._call(level.reads, self._reads, level.peer.read, lease.run, names, destinations)
            for nth, checksums in zip(nths, () if isinstance(read, str) else read, strict=False):
                sums[nth] = checksums
                self.counters["read_bytes"] += into[nth].nbytes
                level.read_bytes += into[nth].nbytes
            lease.num_reads -= 1
            for key in keys_of(group, names):
                self._leases.forget(key, lease)

        leases = self._leases.of(group, block_hashes)
        if ended := [each for each, lease in zip(block_hashes, leases, strict=True) if lease is None]:
            await self._search(group, ended, {})
            leases = self._leases.of(group, block_hashes)
        parts = list(neighbours(leases, block_hashes))
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
    ) -> T | str:
        """What a peer answers, or why it does not."""
        if threads is None or not health.is_available:
            return AWAY
        try:
            with health.call():
                try:
                    return await threads.call(call, *args)
                except (LeaseExpiredError, BusyError) as error:  # The peer works; its blocks are misses.
                    return f"refused: {error}"
        except Exception as error:  # `Health` has logged it.
            return f"no answer: {error}"

    async def hand_over(self, prompts: Iterator[Prompt]) -> None:
        async def ask(endpoint: str, question: Callable[[Peer], T]) -> T | None:
            if (level := await self._level(endpoint)) is None:
                return None
            answer = await self._ask(level, question, level.peer)
            return None if isinstance(answer, str) else answer

        others = await self._directory.servers() if self._directory is not None else []
        receivers = [each for each in dict.fromkeys([*self._peers, *others]) if each not in self._own]
        for endpoint in receivers:  # One that was away may have come back: it is asked at once.
            if (level := self._levels.get(endpoint)) is not None and not level.questions.is_available:
                self._drop(endpoint)
        handed = HandOver(receivers, self._handover_bytes, self._likely, ask)
        try:
            await handed.run(prompts)
        finally:
            say = log.info if handed.num_blocks or not handed.num_prompts else log.warning
            servers = {"servers_asked": len(receivers), "servers_read": len(+handed.bytes_of)}
            say("blocks handed over", tier=self.name, blocks=handed.num_blocks, **servers)

    def stats(self) -> pb.TierStats:
        stats = super().stats()
        for endpoint, level in list(self._levels.items()):
            is_up = level.questions.is_working and level.reads.is_available
            stats.servers.add(name=endpoint, up=is_up, read_bytes=level.read_bytes)
        if self._directory is not None:
            directory = self._directory
            stats.servers.add(name=directory.name, up=directory.health.is_working, key=directory.key_fingerprint)
            stats.counters["unannounced_blocks"] = self._directory.num_dropped
        return stats

    def hold(self, entry: Entry, *, is_there: bool) -> None:
        group = entry.group
        if self._directory is None or group.is_measurement:
            return
        if is_announced(entry.block_hash, group.spec.block_tokens):
            self._directory.hold(group.fingerprint, group.idx, entry.block_hash, is_there=is_there)

    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        return 0

    async def remove(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        """Peers keep theirs."""

    async def clear(self, fingerprint: bytes = b"") -> None:
        """Peers keep theirs."""
