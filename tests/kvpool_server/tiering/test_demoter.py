"""Blocks on their way down, to tiers that are slow or fail."""

from __future__ import annotations

from kvpool.types import BlockRun
from kvpool_server.tiering import demoter
from kvpool_server.tiers.health import ANSWER_S, AWAY_S
from tests.support.memory_tier import MemoryTier, Rig, play, turns
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
    assert tier.counters["dropped_demotions"] == before + 1
    tier.gate.set()
    await rig.wait_idle()
    assert rig.tiered.stats().tiers[0].up
    assert tier.counters["dropped_demotions"] + len(tier.kept) == 103


@play()
async def test_the_queue_is_bounded(rig: Rig, tier: MemoryTier) -> None:
    most, demoter.MAX_QUEUED = demoter.MAX_QUEUED, 5
    try:
        tier.gate.clear()
        for nth in range(12):
            rig.put(f"p{nth}")
            await turns(2)
        assert rig.tiered.num_queued == 5 and tier.counters["dropped_demotions"] == 6
        tier.gate.set()
        await rig.wait_idle()
        assert len(tier.kept) == 6
    finally:
        demoter.MAX_QUEUED = most


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
async def test_a_block_that_is_removed_while_it_is_written_does_not_stay_in_the_tier(
    rig: Rig, tier: MemoryTier
) -> None:
    tier.gate.clear()
    rig.put("a", "b")
    await turns()
    assert tier.calls["write"] == 1
    fingerprint, run = rig.namespace.fingerprint, BlockRun(0, [block_hash("b")])
    await rig.tiered.remove(fingerprint, [run])
    tier.gate.set()
    await rig.wait_idle()
    assert set(tier.kept) == {block_hash("a")}
