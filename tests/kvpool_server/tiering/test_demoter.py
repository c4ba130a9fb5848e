"""Blocks on their way down, to tiers that are slow or fail."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvpool.protocol.namespace import MEASUREMENT_MODEL
from kvpool.protocol.types import BlockRun, ShardRange
from kvpool_server.cache.arena import Arena
from kvpool_server.cache.entry import Group
from kvpool_server.process.runtime import no_collections
from kvpool_server.tiering import demoter
from kvpool_server.tiering.tiered_pool import TieredPool
from kvpool_server.tiers.calls import ANSWER_S, AWAY_S
from kvpool_server.tiers.tier import Block
from testbed.pool_at_once import PoolAtOnce
from tests.support.clock import FakeClock
from tests.support.memory_tier import SLOT, SLOTS, MemoryTier, Rig, play, turns
from tests.support.values import block_hash, group_spec, namespace_spec


@play()
async def test_a_hanging_tier_slows_no_put(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    rig.put("first")
    await turns()
    assert tier.calls["write"] == 1
    for nth in range(100):  # Six times what the arena holds.
        rig.put(f"p{nth}")
        await turns(2)
    assert rig.pool.stats().num_leases == 1, "more than what is being written is kept from eviction"
    rig.clock.advance(ANSWER_S + 1)
    rig.put("later")
    assert not rig.tiered.stats().tiers[0].up
    before = tier.counters["dropped_demotions"]
    rig.put("later still")
    assert tier.counters["dropped_demotions"] == before + 2, "this block, and a queued one that it evicts"
    tier.gate.set()
    await rig.wait_idle()
    assert rig.tiered.stats().tiers[0].up
    assert tier.counters["dropped_demotions"] + len(tier.kept) == 103


@play()
async def test_the_queue_is_bounded(rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demoter, "MAX_QUEUED", 5)
    tier.gate.clear()
    for nth in range(12):
        rig.put(f"p{nth}")
        await turns(2)
    assert rig.tiered.num_queued == 5 and tier.counters["dropped_demotions"] == 6
    tier.gate.set()
    await rig.wait_idle()
    assert len(tier.kept) == 6


@play()
async def test_a_failing_tier_gets_no_calls_for_a_while(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.wait_idle()
    tier.failure = "the disk is gone"
    rig.put("b")
    await rig.wait_idle()
    assert not rig.tiered.stats().tiers[0].up and tier.counters["dropped_demotions"] == 1
    rig.evict_all()
    assert rig.lookup("a").hits[0].num_pending == 0, "who asks waits for a dead tier"
    tier.failure = ""
    rig.clock.advance(AWAY_S[0] + 0.1)
    assert not rig.tiered.stats().tiers[0].up, "nothing has shown yet that it works"
    assert (await rig.hits("a")).num_leading == 1
    assert rig.tiered.stats().tiers[0].up


@play()
async def test_ancestors_that_the_tier_lacks_are_written_with_a_new_block(rig: Rig, tier: MemoryTier) -> None:
    tier.failure = "away"
    rig.put("a", "b")
    await rig.wait_idle()
    tier.failure = ""
    rig.clock.advance(AWAY_S[0] + 0.1)
    rig.put("c", parent="b")
    await rig.wait_idle()
    assert set(tier.kept) == {block_hash(name) for name in "abc"}


@play()
async def test_a_block_that_is_removed_while_it_is_written_or_waits_does_not_stay_in_the_tier(
    rig: Rig, tier: MemoryTier
) -> None:
    tier.gate.clear()
    rig.put("a", "b")
    await turns()
    rig.put("c", "d")
    await turns()
    assert tier.calls["write"] == 1 and rig.tiered.num_queued == 2
    await rig.tiered.remove(rig.namespace.fingerprint, [BlockRun(0, [block_hash("b"), block_hash("d")])])
    assert rig.tiered.num_queued == 1
    tier.gate.set()
    await rig.wait_idle()
    assert set(tier.kept) == {block_hash("a"), block_hash("c")} and tier.counters["dropped_demotions"] == 0


@pytest.mark.parametrize("write_back", [False, True])
def test_blocks_of_measurements_stay_out_of_tiers(write_back: bool) -> None:
    @play(write_back=write_back)
    async def test(rig: Rig, tier: MemoryTier) -> None:
        spec = dataclasses.replace(rig.namespace.spec, model=MEASUREMENT_MODEL)
        rig.namespace, _ = rig.pool.open_namespace(spec)
        rig.put(*range(SLOTS))
        rig.put("more")
        await rig.wait_idle()
        assert await rig.tiered.drain(1) == 0
        assert not tier.calls["write"] and tier.counters["dropped_demotions"] == 0

    test()


class ThreeWrites(MemoryTier):
    writes_at_once = 3


@play(ThreeWrites)
async def test_several_batches_are_written_at_once_within_the_bound_of_pinned_bytes(
    rig: Rig, tier: ThreeWrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "PINNED_BYTES", 6 * SLOT)
    tier.gate.clear()
    rig.put(*(f"p{nth}" for nth in range(10)))
    await turns()
    assert tier.calls["write"] == 3 and rig.pool.stats().num_leases == 3
    assert rig.tiered.num_queued == 4, "a write has more than a third of the bytes"
    draining = asyncio.create_task(rig.tiered.drain(5))
    tier.failure = "the disk is gone"
    tier.gate.set()
    assert await draining == 0
    assert not rig.pool.stats().num_leases and tier.counters["dropped_demotions"] == 10


CHUNK = 64


@play(ThreeWrites)
async def test_a_tier_is_idle_when_the_last_of_several_writes_has_ended(rig: Rig, tier: ThreeWrites) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    write, begun = tier.write, iter(gates)

    async def slowly(*args: Any) -> int:
        await next(begun).wait()
        return await write(*args)

    tier.write = slowly  # type: ignore[method-assign]
    rig.put("a")
    await turns()
    rig.put("b")
    await turns()
    gates[1].set()
    await turns()
    assert set(tier.kept) == {block_hash("b")} and not rig.tiered.is_idle
    gates[0].set()
    await rig.wait_idle()
    assert set(tier.kept) == {block_hash("a"), block_hash("b")}


class WriteBack:
    """A pool of many small slots above a tier that is written to on eviction, and that notes the order of writes."""

    def __init__(self, num_slots: int):
        ids = itertools.count(1)
        nbytes = num_slots * CHUNK
        arena = Arena(nbytes, nbytes)
        arena.max_slots = num_slots
        self.pool = PoolAtOnce(arena, FakeClock(), lambda: next(ids))
        self.written: list[bytes] = []
        self.tier = MemoryTier()
        self.tier.write = self._write  # type: ignore[method-assign]
        self.tiered = TieredPool(self.pool, np.zeros(nbytes, np.uint8), [self.tier], [True])
        self.namespace, _ = self.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK)))

    async def _write(self, group: Group, blocks: Sequence[Block]) -> int:
        self.written += [block.block_hash for block in blocks]
        self.tier.kept |= {block.block_hash: (b"", []) for block in blocks}
        await asyncio.sleep(0)
        return len(blocks)

    def put(self, first: int, count: int, parent: bytes = b"") -> list[bytes]:
        """Stores blocks of one prefix."""
        hashes = [number.to_bytes(32, "big") for number in range(first, first + count)]
        grant = self.pool.put_start(self.namespace.fingerprint, [BlockRun(0, hashes, parent)], ShardRange(0, 1))
        self.pool.put_end(grant.ticket_id, [0] * count)
        return hashes

    async def drain(self) -> None:
        await self.tiered.open()
        try:
            assert await self.tiered.drain(120) == 0
        finally:
            await self.tiered.close()


def test_a_drain_of_a_large_pool_leaves_the_loop_its_turns() -> None:
    num_blocks, chain = 200_000, 2_000

    async def turns_s() -> list[float]:
        turns_s, draining = list[float](), asyncio.create_task(rig.drain())
        while not draining.done():
            began_at = time.thread_time()
            await asyncio.sleep(0)
            turns_s.append(time.thread_time() - began_at)
            assert rig.tiered.num_queued <= demoter.MAX_QUEUED + chain
        await draining
        return turns_s

    with no_collections():
        rig = WriteBack(num_blocks + num_blocks // 8)  # More than the reserve, below which blocks are written earlier.
        for first in range(0, num_blocks, chain):
            rig.put(first, chain)
        turns = asyncio.run(turns_s())
    assert len(rig.written) == num_blocks
    assert max(turns) < 0.1 * sum(turns), "several times what a step takes"


def test_a_drain_writes_the_last_used_prefixes_first_and_each_in_its_order() -> None:
    rig = WriteBack(3_000)
    continued, older, newer = (rig.put(nth * 1_000, 700) for nth in range(3))
    continued += rig.put(700, 1, parent=continued[-1])
    asyncio.run(rig.drain())
    assert rig.written == continued + newer + older


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_blocks_that_are_removed_while_a_drain_queues_all_are_not_written(num_steps: int) -> None:
    rig = WriteBack(1_000)
    rig.put(500, 1, parent=rig.put(0, 500)[-1])  # The last block is visited first, and all others as its ancestors.
    (level,) = rig.tiered._levels
    steps = level.demoter._enqueue_all()
    for _ in itertools.islice(steps, num_steps):
        pass
    rig.pool.clear()
    for _ in steps:
        pass
    assert rig.tiered.num_queued == 0 and level.demoter.idle.is_set()


@play(write_back=True)
async def test_a_drain_sends_a_failed_tier_no_calls(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    level = rig.tiered._levels[0]
    with pytest.raises(ZeroDivisionError), level.health.call():
        raise ZeroDivisionError
    assert await rig.tiered.drain(5) == 0
    await turns()
    assert not tier.calls["write"] and tier.counters["dropped_demotions"] == 2
