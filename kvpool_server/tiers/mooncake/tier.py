"""A Mooncake Store cluster as a tier: servers on many hosts share it, and each promotes what any other has written.

Each block is an object. Mooncake's master knows where objects lie and evicts them. The server calls Mooncake through a
child process (`store_process.py`); one that has died is started again, with an empty segment. Mooncake itself
reconnects to a master that was restarted; the cluster's content is lost then.

Bytes are staged in both directions, and verified once they lie in the arena: a transfer that Mooncake has given up may
go on writing as long as its peer lives, and must reach neither a slot nor bytes that have been verified. While Mooncake
moves the bytes of one transfer, threads of the tier copy and verify those of others. Questions to
the master (which blocks are there, removals) have threads and channels of their own.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import structlog
from pydantic import ByteSize, Field

from kvpool.client.config import is_loopback
from kvpool.protocol.errors import ConfigError
from kvpool.protocol.namespace import GroupSpec
from kvpool_server.cache.entry import Group
from kvpool_server.tiers.block_mac import BlockMac
from kvpool_server.tiers.calls import DaemonThreadPool
from kvpool_server.tiers.mooncake import store_process
from kvpool_server.tiers.mooncake.store_process import StagedRead, footer_bytes, object_key, put_blocks
from kvpool_server.tiers.mooncake.worker import MAX_KEYS, Call, StoreConfig
from kvpool_server.tiers.tier import Block, BlockKey, Tier, TierContext, TierError, TierOptions, keys_of

if TYPE_CHECKING:
    from kvpool.v1 import pool_pb2 as pb

log = structlog.get_logger()

T = TypeVar("T")
U = TypeVar("U")

MIN_SEGMENT_BYTES = 16 << 20
CLOSE_S = 2.0
DEFAULT_THREADS = 3
"""One transfer whose bytes Mooncake moves, and others that are copied and verified meanwhile."""

FRESH_S = 10.0
"""How long a block is believed to be there: the cluster evicts, and other servers remove, without notice."""
MAX_BLOCKS = 1 << 17
"""Blocks that a tier remembers."""
IS_THERE = 1
NO_SPACE = -200
NO_MASTER = range(-1_099, -899)
"""These codes: the master has not answered, or cannot. Lower ones are of files, and of quotas."""


class MooncakeOptions(TierOptions):
    """A Mooncake Store cluster."""

    EXAMPLE: ClassVar[str] = "mooncake:master=HOST:PORT"

    master: str = Field(
        pattern=r"^.+:\d+$",
        title="HOST:PORT of mooncake_master, as 10.0.0.1:50051",
        description="HOST:PORT of mooncake_master",
    )
    metadata: str = Field("P2PHANDSHAKE", description="metadata server of the Transfer Engine")
    segment: ByteSize = Field(ByteSize(0), description="memory that this server gives to the cluster, as 16GiB")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="protocol of the Transfer Engine")
    device: str = Field("", description="RDMA devices of the Transfer Engine")
    host: str = Field("", description="name or address by which other hosts reach this one; default: as in --listen")
    threads: int = Field(DEFAULT_THREADS, ge=1, le=64, description="reads and writes at once")

    @property
    def tier_name(self) -> str:
        return f"mooncake:{self.master}"

    def make(self, context: TierContext) -> MooncakeTier:
        host = self.host or context.listen[0]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        elif self.segment and is_loopback(host) and not is_loopback(self.master.rpartition(":")[0]):
            raise ConfigError(f"tier {self.tier_name}: other hosts do not reach a segment at {host}; give host=")
        config = StoreConfig(self.master, self.metadata, host, int(self.segment), self.protocol, self.device)
        return MooncakeTier(config, self.threads, BlockMac.of(self))


class PresenceCache:
    """The latest MAX_BLOCKS blocks that this server has written, found or read. Belongs to the event loop.

    Attributes:
        num_own: blocks by namespace that this server has written, and has not found gone since.
        own_bytes: bytes of their slots, by namespace.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._blocks: OrderedDict[BlockKey, tuple[float, int]] = OrderedDict()
        """Until when each block is believed to be there, and its own bytes."""
        self.num_own: Counter[bytes] = Counter()
        self.own_bytes: Counter[bytes] = Counter()

    def has(self, key: BlockKey) -> bool:
        """Whether the block was there within the last FRESH_S. False means unknown."""
        fresh_until, _ = self._blocks.get(key, (0.0, 0))
        return self._clock() < fresh_until

    def add(self, key: BlockKey, own_bytes: int = 0) -> None:
        """Notes that a block is there; `own_bytes` are those of its slot if this server has just written it, else 0."""
        _, known_bytes = self._blocks.get(key, (0.0, 0))
        if own_bytes and not known_bytes:
            self.num_own[key[0]] += 1
            self.own_bytes[key[0]] += own_bytes
        self._blocks[key] = self._clock() + FRESH_S, known_bytes or own_bytes
        self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self.discard([next(iter(self._blocks))])

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Notes that blocks are gone, or about to be removed."""
        for key in keys:
            _, own_bytes = self._blocks.pop(key, (0.0, 0))
            if own_bytes:
                self.num_own[key[0]] -= 1
                self.own_bytes[key[0]] -= own_bytes

    def clear(self, fingerprint: bytes = b"") -> None:
        """Notes that the blocks of a namespace, or of all, are gone."""
        self.discard([key for key in self._blocks if not fingerprint or key[0] == fingerprint])


class MooncakeTier(Tier):
    """Writes blocks to a cluster as objects, and reads them: `threads` at once, by a client process."""

    def __init__(self, config: StoreConfig, threads: int = DEFAULT_THREADS, mac: BlockMac | None = None):
        super().__init__(f"mooncake:{config.master}")
        self._mac = mac
        self.reads_at_once = threads
        self.writes_at_once = max(1, threads - 1)  # A thread is left for what a lookup waits for.
        self.store = store_process.Store(config, threads)
        self._segment_bytes = config.segment_bytes
        self._presence = PresenceCache()
        self._transfers: DaemonThreadPool | None = None
        self._questions: DaemonThreadPool | None = None

    async def open(self) -> None:
        if 0 < self._segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(
                f"tier {self.name}: segment={self._segment_bytes} is too small for Mooncake; give at least "
                "16MiB, or 0 for none"
            )
        self._transfers = DaemonThreadPool(self.reads_at_once, "kvpool-tier-mooncake")
        self._questions = DaemonThreadPool(store_process.NUM_QUESTION_CHANNELS, "kvpool-tier-mooncake-ask")
        try:
            await self._call(self._transfers, self.store.start)
        except TierError as failure:
            await self.close()
            raise ConfigError(
                f"tier {failure}; start mooncake_master first, and give its host and rpc_port as master="
            ) from None

    async def close(self) -> None:
        await asyncio.to_thread(self.store.close)
        for threads in (self._transfers, self._questions):
            if threads is not None:
                threads.close(CLOSE_S)
        self._transfers = self._questions = None

    def known(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool] | None:
        """All True for blocks that were lately written, found or read; else only the master can tell."""
        is_fresh = all(self._presence.has((group.fingerprint, group.idx, name)) for name in block_hashes)
        return [True] * len(block_hashes) if is_fresh else None

    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        names, codes = keys_of(group, block_hashes), list[int]()
        for part in _parts(names, MAX_KEYS):
            codes += await self._ask("exist", list(map(object_key, part)))
        self._check(codes)
        for name, code in zip(names, codes, strict=True):
            if code == IS_THERE:
                self._presence.add(name)
            else:
                self._presence.discard([name])
        return [code == IS_THERE for code in codes]

    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        there = await self.find(group, [block.block_hash for block in blocks])
        new = {block.block_hash: block for block, is_there in zip(blocks, there, strict=True) if not is_there}
        slot_bytes = group.spec.slot_bytes
        most = _max_blocks(group.spec)
        if not most:
            self.counters["refused_blocks"] += len(new)
            return sum(there)
        written = 0
        all_names = keys_of(group, list(new))
        for names, part in zip(_parts(all_names, most), _parts(list(new.values()), most), strict=True):
            codes = await self._transfer(functools.partial(put_blocks, names, part, self._mac))
            self._check(codes)
            for name, code in zip(names, codes, strict=True):
                if code == 0:
                    written += 1
                    self._presence.add(name, slot_bytes)
            self.counters["written_bytes"] += codes.count(0) * slot_bytes
            if refused := Counter(code for code in codes if code):
                self.counters["refused_blocks"] += refused.total()
                # A full cluster is normal; any other code means that a segment or a network has failed.
                report = log.debug if set(refused) == {NO_SPACE} else log.warning
                report("Mooncake has refused blocks", tier=self.name, codes=dict(refused))
        return sum(there) + written

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        most = _max_blocks(group.spec)
        if not most:
            return [None] * len(block_hashes)
        found: list[Sequence[int] | None] = []
        all_names = keys_of(group, block_hashes)
        for names, views in zip(_parts(all_names, most), _parts(into, most), strict=True):
            reading = StagedRead(names, views, group.spec.num_shards, self._mac)
            try:
                codes = await self._transfer(reading.run)
            finally:
                reading.cancel()  # A thread may still copy, if this task was cancelled.
            self._check(codes)
            for name, sums, view in zip(names, reading.found, views, strict=True):
                if sums is None:
                    self._presence.discard([name])
                else:
                    self._presence.add(name)
                    self.counters["read_bytes"] += view.nbytes
            if reading.corrupt:
                self.counters["corrupt_blocks"] += len(reading.corrupt)
                log.error("corrupt blocks in a tier were removed", tier=self.name, blocks=len(reading.corrupt))
                self._check(await self._ask("remove", reading.corrupt))
            found += reading.found
        return found

    async def remove(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        names = keys_of(group, block_hashes)
        self._presence.discard(names)
        for part in _parts(names, MAX_KEYS):
            self._check(await self._ask("remove", list(map(object_key, part))))

    async def clear(self, fingerprint: bytes = b"") -> None:
        self._presence.clear(fingerprint)
        prefix = f"kvpool/{fingerprint.hex()}/" if fingerprint else "kvpool/"
        self._check(await self._ask("clear", [f"^{re.escape(prefix)}"]))

    def holdings(self, fingerprint: bytes) -> pb.TierHoldings:
        """Blocks that this server has written and not found gone since, of the latest it has seen.

        The cluster may have evicted some meanwhile; blocks that other servers have written do not count.
        """
        told = super().holdings(fingerprint)
        told.num_entries, told.nbytes = self._presence.num_own[fingerprint], self._presence.own_bytes[fingerprint]
        return told

    def stats(self) -> pb.TierStats:
        """As `holdings`, of all namespaces. The size is unknown: only the master knows the cluster's."""
        told = super().stats()
        told.used_bytes, told.num_entries = self._presence.own_bytes.total(), self._presence.num_own.total()
        return told

    async def _ask(self, what: Call, keys: Sequence[str]) -> list[int]:
        return await self._call(self._questions, self.store.ask, what, keys)

    async def _transfer(self, move: Callable[[store_process.StoreChannel], list[int]]) -> list[int]:
        return await self._call(self._transfers, self.store.transfer, move)

    async def _call(self, threads: DaemonThreadPool | None, function: Callable[..., T], *args: object) -> T:
        if threads is None:
            raise TierError(f"{self.name} is closed")
        try:
            return await threads.call(function, *args)
        except store_process.StoreError as error:
            raise TierError(f"{self.name}: {error}") from None

    def _check(self, codes: Sequence[int]) -> None:
        """Raises TierError if the master has not answered."""
        if code := next((code for code in codes if code in NO_MASTER), 0):
            raise TierError(f"{self.name}: the master does not answer (code {code})")


def _max_blocks(spec: GroupSpec) -> int:
    """Blocks that fit into a channel's staging memory at once; 0: not even one."""
    return min(MAX_KEYS, store_process.STAGING_BYTES // (spec.slot_bytes + footer_bytes(spec.num_shards, has_tag=True)))


def _parts(items: Sequence[U], most: int) -> Iterator[Sequence[U]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
