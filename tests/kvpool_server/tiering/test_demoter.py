"""Blocks on their way down, to tiers that are slow or fail."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from kvpool.protocol.namespace import MEASUREMENT_MODEL
from kvpool.protocol.types import BlockRun
from kvpool_server.tiering import demoter
from kvpool_server.tiers.health import ANSWER_S, AWAY_S
from tests.support.memory_tier import SLOT, SLOTS, MemoryTier, Rig, play, turns
from tests.support.values import block_hash


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
