"""A tier in memory that is as slow or broken as a test wants it, and a pool above such tiers."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from kvpool.protocol.hashing import checksum
from kvpool.protocol.types import BlockRun, Lookup, RunHits, ShardRange
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Group
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.tier import Block, Tier, TierError
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.integrity import check_integrity
from tests.support.values import block_hash, group_spec, namespace_spec, payload

SLOT = 1024
SLOTS = 16

Answer = TypeVar("Answer")


def answered(call: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a call that does not wait."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("the call waits")


class MemoryTier(Tier):
    """Keeps every block it is given.

    Args:
        answers_at_once: whether `known` can tell which blocks it has, or `find` must be called.

    Attributes:
        kept: payload and checksums, by block hash.
        calls: how many there were of each kind.
        gate: calls wait until it is set.
        failure: if not empty, calls raise TierError with it.
    """

    def __init__(self, name: str = "memory:", answers_at_once: bool = True):
        super().__init__(name)
        self.kept: dict[bytes, tuple[bytes, Sequence[int]]] = {}
        self.calls: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: str = ""
        self._answers_at_once = answers_at_once

    async def _pass(self, call: str) -> None:
        self.calls[call] += 1
        await asyncio.sleep(0)
        await self.gate.wait()
        if self.failure:
            raise TierError(self.failure)

    def known(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool] | None:
        return [name in self.kept for name in block_hashes] if self._answers_at_once else None

    async def find(self, group: Group, block_hashes: Sequence[bytes]) -> list[bool]:
        await self._pass("find")
        return [name in self.kept for name in block_hashes]

    async def write(self, group: Group, blocks: Sequence[Block]) -> int:
        await self._pass("write")
        for block in blocks:
            self.kept[block.block_hash] = (bytes(block.payload), list(block.checksums))
        return len(blocks)

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        await self._pass("read")
        sums: list[Sequence[int] | None] = []
        for name, view in zip(block_hashes, into, strict=True):
            data, expected = self.kept.get(name, (b"", None))
            if expected is not None:
                view[:] = data
            sums.append(expected)
        return sums

    async def remove(self, group: Group, block_hashes: Sequence[bytes]) -> None:
        for name in block_hashes:
            self.kept.pop(name, None)

    async def clear(self, fingerprint: bytes = b"") -> None:
        self.kept.clear()

    def holdings(self, fingerprint: bytes) -> pb.TierHoldings:
        return pb.TierHoldings(tier=self.name, num_entries=len(self.kept), nbytes=SLOT * len(self.kept))


class Rig:
    """A pool of sixteen slots of one shard, above tiers.

    Args:
        has_tenants: whether extents belong to tenants.
    """

    def __init__(self, *tiers: Tier, write_back: bool = False, has_tenants: bool = False):
        ids = itertools.count(1)
        self.clock = FakeClock()
        self.memory = np.zeros(SLOTS * SLOT, np.uint8)
        arena = Arena(SLOTS * SLOT, 4 * SLOT, zero=self._zero if has_tenants else None)
        self.pool = PoolAtOnce(arena, self.clock, lambda: next(ids))
        self.tiered = TieredPool(self.pool, self.memory, tiers, [write_back] * len(tiers), self.clock)
        self.namespace, _ = self.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=SLOT)))

    def _zero(self, start: int, nbytes: int) -> None:
        self.memory[start : start + nbytes] = 0

    def put(self, *names: object, parent: object = None) -> None:
        run = BlockRun(0, [block_hash(name) for name in names], b"" if parent is None else block_hash(parent))
        grant = self.pool.put_start(self.namespace.fingerprint, [run], ShardRange(0, 1))
        granted = [name for name, status in zip(names, grant.statuses, strict=True) if not status]
        for name, offset in zip(granted, grant.offsets, strict=True):
            self.memory[offset : offset + SLOT] = payload(name, SLOT)
        if granted:
            self.pool.put_end(grant.ticket_id, [checksum(payload(name, SLOT)) for name in granted])

    def lookup(self, *names: object, prefix_only: bool = True) -> Lookup:
        runs = [BlockRun(0, [block_hash(name) for name in names])]
        return answered(self.tiered.lookup(self.namespace.fingerprint, runs, prefix_only, lease_ttl_ms=1_000))

    async def hits(self, *names: object, prefix_only: bool = True) -> RunHits:
        """The hits of a lookup, once no block is pending."""
        for _ in range(100):
            found = self.lookup(*names, prefix_only=prefix_only)
            self.pool.release([found.lease_id])
            if not found.retry_after_ms:
                return found.hits[0]
            await turns()
        raise AssertionError("blocks stay pending")

    async def demote(self, *names: object) -> None:
        """Stores blocks that only the tiers have afterwards."""
        self.put(*names)
        await self.wait_idle()
        self.evict_all()

    def evict_all(self) -> None:
        self.pool.clear()

    async def wait_idle(self) -> None:
        for _ in range(200):
            await turns()
            if self.tiered.is_idle:
                return
        raise AssertionError("transfers do not end")


async def turns(count: int = 20) -> None:
    """Gives other tasks so many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def play(
    *tiers: Callable[[], MemoryTier], write_back: bool = False, has_tenants: bool = False
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test with an open rig, of one `MemoryTier` unless others are given; closes it, and checks for leaks.

    What the test takes behind the rig and its tiers are fixtures and parameters of pytest.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            async def within() -> None:
                made = [make() for make in (tiers or (MemoryTier,))]
                rig = Rig(*made, write_back=write_back, has_tenants=has_tenants)
                await rig.tiered.open()
                try:
                    async with asyncio.timeout(30):
                        await test(rig, *made, **fixtures)
                    check_integrity(rig.pool)
                finally:
                    await rig.tiered.close()
                rig.clock.advance(1_000)
                rig.pool.expire()
                assert not rig.pool.stats().num_leases and not rig.pool.stats().num_tickets

            asyncio.run(within())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        signature = inspect.signature(test)
        fixtures = list(signature.parameters.values())[1 + len(tiers or (MemoryTier,)) :]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def asked() -> MemoryTier:
    """A tier whose `find` must be called."""
    return MemoryTier("asked:", answers_at_once=False)
