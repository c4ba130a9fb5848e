"""Blocks on their way up, from tiers that fail, forget, or have to be asked."""

from __future__ import annotations

from kvpool.hashing import checksum
from kvpool_server.tiering import promoter
from tests.support.memory_tier import SLOT, SLOTS, MemoryTier, Rig, asked, play, turns
from tests.support.values import block_hash, payload


@play(asked)
async def test_a_tier_that_must_be_asked_is_asked_once(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.wait_idle()
    rig.evict_all()
    assert rig.lookup("a", "b", "c").hits[0].num_pending == 3, "what is not known yet may come"
    assert rig.lookup("a", "b", "c").hits[0].num_pending == 3
    assert (await rig.hits("a", "b", "c")).num_leading == 2
    assert tier.calls["find"] == 1
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 2
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 2
    rig.clock.advance(promoter.ANSWER_VALID_S + 1)
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 3


@play()
async def test_a_failed_read_leaves_no_slot_reserved(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.wait_idle()
    rig.evict_all()
    tier.failure = "the disk is gone"
    assert rig.lookup("a", "b").hits[0].num_pending == 2
    await rig.wait_idle()
    stats = rig.pool.stats()
    assert stats.num_incomplete == 0 and stats.free_bytes == stats.arena_bytes
    assert rig.lookup("a", "b").hits[0].num_pending == 0


@play()
async def test_a_block_that_could_not_be_read_is_not_read_again_at_once(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.wait_idle()
    rig.evict_all()
    known = tier.known
    tier.known = lambda *_: [True] * len(_[2])  # type: ignore[method-assign]  # As a neighbour's old journal has it.
    del tier.kept[block_hash("b")]
    assert (await rig.hits("a", "b")).num_leading == 1
    assert tier.counters["missed_promotions"] == 1
    tier.known = known  # type: ignore[method-assign]


@play()
async def test_without_free_slots_nothing_is_promoted_and_nothing_is_pending(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.wait_idle()
    rig.evict_all()
    rig.put(*(f"p{nth}" for nth in range(SLOTS)))
    await rig.wait_idle()
    held = rig.lookup(*(f"p{nth}" for nth in range(SLOTS)))
    assert held.hits[0].num_leading == SLOTS
    assert (await rig.hits("a", "b")).num_leading == 0
    assert tier.counters["dropped_promotions"] == 2
    rig.pool.release([held.lease_id])
    rig.clock.advance(promoter.ANSWER_VALID_S + 1)
    assert (await rig.hits("a", "b")).num_leading == 2


@play()
async def test_a_prefetch_that_no_lookup_asks_for_any_more_is_dropped(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    rig.put("b")
    await rig.wait_idle()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    await turns()
    rig.lookup("b")  # Two are read at once: this one as well.
    await turns()
    assert tier.calls["read"] == 2
    tier.gate.set()
    await rig.wait_idle()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    rig.lookup("b")
    await turns()
    rig.put("c")  # Known to the tier only when it is written.
    tier.kept[block_hash("c")] = (payload("c", SLOT).tobytes(), [checksum(payload("c", SLOT))])
    rig.evict_all()
    rig.lookup("c")
    rig.clock.advance(promoter.STALE_S + 1)
    tier.gate.set()
    await rig.wait_idle()
    assert tier.counters["dropped_promotions"] == 1 and rig.lookup("c").hits[0].num_leading == 0


@play()
async def test_a_block_that_is_cleared_while_it_is_read_keeps_its_slot_until_the_read_ends(
    rig: Rig, tier: MemoryTier
) -> None:
    rig.put("a")
    await rig.wait_idle()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    await turns()
    rig.pool.clear()
    assert rig.pool.stats().num_quarantined == 1, "its slot could be given to another while a thread writes to it"
    tier.gate.set()
    await rig.wait_idle()
    stats = rig.pool.stats()
    assert stats.num_entries == 0 and stats.free_bytes == stats.arena_bytes


@play()
async def test_a_put_of_a_pending_block_is_busy_and_then_present(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.wait_idle()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    await turns()
    rig.put("a")
    assert rig.pool.counters["put_busy_blocks"] == 1
    tier.gate.set()
    await rig.wait_idle()
    rig.put("a")
    assert rig.pool.counters["put_present_blocks"] == 1
    assert (await rig.hits("a")).num_leading == 1


@play()
async def test_no_block_is_promoted_behind_one_that_cannot_be_read(rig: Rig, tier: MemoryTier) -> None:
    names = [f"n{nth}" for nth in range(12)]
    rig.put(*names)
    await rig.wait_idle()
    rig.evict_all()
    del tier.kept[block_hash("n2")]
    tier.known = lambda *_: [True] * len(_[2])  # type: ignore[method-assign]
    most, promoter.BATCH_BYTES = promoter.BATCH_BYTES, 2 * SLOT
    try:
        assert (await rig.hits(*names)).num_leading == 2
    finally:
        promoter.BATCH_BYTES = most
    assert rig.pool.stats().num_entries <= 6, "blocks came up that are of no use"
    assert rig.tiered.is_idle


@play()
async def test_with_few_free_slots_a_part_is_promoted(rig: Rig, tier: MemoryTier) -> None:
    names = [f"n{nth}" for nth in range(8)]
    rig.put(*names)
    await rig.wait_idle()
    rig.evict_all()
    others = [f"p{nth}" for nth in range(SLOTS - 4)]
    rig.put(*others)
    await rig.wait_idle()
    held = rig.lookup(*others).lease_id
    assert (await rig.hits(*names)).num_leading == 4
    rig.pool.release([held])
