"""Other servers, and the blocks that they keep for this one until it has read them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_server.cache.entry import Group
from kvpool_server.tiers.calls import Health
from kvpool_server.tiers.tier import BlockKey, keys_of

if TYPE_CHECKING:
    from kvpool_server.tiers.peers.peer import LeasedRun, Peer

LEASE_MS, READ_MS = 5_000, 2_000
"""How long a peer keeps the blocks that it has found, until they are read; and how much of that a read may take."""
MAX_LEASED = 1 << 16
"""Blocks that are leased and not read. Beyond it the oldest are forgotten, and their leases expire."""


class Level:
    """A peer, and whether it is asked and read."""

    def __init__(self, endpoint: str, peer: Peer, clock: Callable[[], float]):
        self.peer = peer
        self.questions = Health(f"peer {endpoint}", clock)
        self.reads = Health(f"bytes of peer {endpoint}", clock)
        self.turn = asyncio.Semaphore(1)  # A slow peer keeps one thread from the others.
        self.num_asking = 0
        self.read_bytes = 0
        self.worked_at = clock()


@dataclass(slots=True, eq=False)
class Lease:
    """What a peer has leased: blocks that are `unread`; `num_reads` are under way."""

    level: Level
    run: LeasedRun
    ends_at: float
    unread: set[bytes] = field(default_factory=set)
    num_reads: int = 0


class Leases:
    """The newest lease on each block. Belongs to the event loop."""

    def __init__(self) -> None:
        self._by_block: OrderedDict[BlockKey, Lease] = OrderedDict()

    def add(self, group: Group, level: Level, run: LeasedRun) -> None:
        """Remembers a lease, and forgets those that have ended."""
        lease = Lease(level, run, min(run.slots.ends_at, time.monotonic() + LEASE_MS / 1000), set(run.indices))
        for key in keys_of(group, run.indices):
            if (older := self._by_block.get(key)) is not None:
                self.forget(key, older)
            self._by_block[key] = lease
        while self._by_block:
            key, oldest = next(iter(self._by_block.items()))
            if len(self._by_block) <= MAX_LEASED and time.monotonic() < oldest.ends_at:
                break
            self.forget(key, oldest)

    def of(self, group: Group, block_hashes: Sequence[bytes]) -> list[Lease | None]:
        """The lease on each block; None where there is none that lasts long enough for a read."""
        now = time.monotonic()
        leases = map(self._by_block.get, keys_of(group, block_hashes))
        return [lease if lease is not None and now + READ_MS / 1000 < lease.ends_at else None for lease in leases]

    def forget(self, key: BlockKey, lease: Lease) -> None:
        """A lease on a block is of no use any more; it ends with the last of its blocks."""
        newest = self._by_block.pop(key, lease)
        for each in {lease, newest}:
            each.unread.discard(key[2])
            if not each.unread and not each.num_reads:
                each.level.peer.release(each.run.lease_id)


def neighbours(leases: Sequence[Lease | None], block_hashes: Sequence[bytes]) -> Iterator[tuple[Lease, list[int]]]:
    """Parts of one lease's neighbours, each as indices of blocks."""
    leased = [(lease, nth) for nth, lease in enumerate(leases) if lease is not None]
    starts = [lease.run.indices[block_hashes[nth]] - at for at, (lease, nth) in enumerate(leased)]
    for _, part in itertools.groupby(zip(leased, starts, strict=True), key=lambda each: (id(each[0][0]), each[1])):
        found = [each for each, _ in part]
        yield found[0][0], [nth for _, nth in found]
