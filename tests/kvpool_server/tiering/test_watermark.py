"""Slots are kept free for puts where tiers are written to on eviction."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvpool.protocol.types import BlockRun
from kvpool_server.cache.eviction import evictor
from kvpool_server.tiering import demoter
from kvpool_server.tiers.calls import ANSWER_S, AWAY_S
from tests.support.integrity import check_integrity
from tests.support.memory_tier import SLOT, SLOTS, MemoryTier, Rig, play, turns
from tests.support.values import block_hash


@play(MemoryTier, MemoryTier, write_back=True)
async def test_slots_are_freed_before_a_put_needs_them(rig: Rig, first: MemoryTier, second: MemoryTier) -> None:
    names = [f"p{nth}" for nth in range(3 * SLOTS)]
    for name in names:  # Prefixes of one block.
        rig.put(name)
        await turns()
    stats = rig.pool.stats()
    assert stats.free_bytes >= SLOT, "there is no room for the next put"
    held = {
        block_hash(name)
        for name in names
        if rig.pool.lookup(rig.namespace.fingerprint, [BlockRun(0, [block_hash(name)])], prefix_only=True)
        .hits[0]
        .num_leading
    }
    for tier in (first, second):
        assert set(tier.kept) | held == {block_hash(name) for name in names}, "something was lost"
        assert not tier.counters["dropped_demotions"]
    assert (await rig.hits("p0")).num_leading == 1


@play(write_back=True)
async def test_parents_are_written_before_their_children(rig: Rig, tier: MemoryTier) -> None:
    for chain in range(4):
        for nth in range(6):
            rig.put(f"{chain}-{nth}", parent=f"{chain}-{nth - 1}" if nth else None)
            await rig.wait_idle()
    assert len(tier.kept) >= 4 * 6 - SLOTS and not tier.counters["dropped_demotions"]
    for chain in range(4):
        assert (await rig.hits(*(f"{chain}-{nth}" for nth in range(6)))).num_leading == 6


@play(write_back=True)
async def test_a_victim_that_is_leased_while_it_is_written_stays(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    names = [f"p{nth}" for nth in range(SLOTS)]
    rig.put(*names[:-1])
    rig.put(names[-1])
    await turns()
    assert tier.calls["write"] == 1
    held = [rig.lookup(name).lease_id for name in names]
    tier.gate.set()
    await rig.wait_idle()
    stats = rig.pool.stats()
    assert stats.num_entries == SLOTS and tier.kept, "a block was dropped under a lease"
    rig.pool.release(held)
    rig.put("new")
    await rig.wait_idle()
    check_integrity(rig.pool)
    assert rig.pool.stats().num_entries <= SLOTS


@play(write_back=True)
async def test_superseded_namespaces_are_not_written(rig: Rig, tier: MemoryTier) -> None:
    old, _ = rig.pool.open_namespace(replace(rig.namespace.spec, weights_epoch="old"))
    rig.namespace = old
    rig.put("a", "b", "c")
    rig.namespace, _ = rig.pool.open_namespace(replace(old.spec, weights_epoch="new"))
    assert old.superseded
    for nth in range(2 * SLOTS):
        rig.put(f"p{nth}")
        await rig.wait_idle()
    assert len(old.entries()) < 3 and tier.kept, "nothing was evicted"
    assert not tier.kept.keys() & set(map(block_hash, "abc")), "what nobody needs was written"


@play(write_back=True)
async def test_victims_go_back_to_their_evictor_and_stay_each_time_the_tier_fails(rig: Rig, tier: MemoryTier) -> None:
    for nth in range(SLOTS):
        rig.put(f"p{nth}")
    evictor = rig.pool.placement.evictor(rig.namespace.groups[0])
    before = len(evictor)
    tier.failure = "the disk is gone"
    for _ in range(5):
        rig.clock.advance(AWAY_S[1] + 1)
        rig.tiered.stored(rig.namespace.entries()[:1])  # Wakes the watermark.
        await rig.wait_idle()
    assert tier.calls["write"] >= 5 and len(evictor) == before
    assert rig.pool.stats().num_entries == SLOTS and not tier.kept
    rig.put("new")
    assert tier.counters["dropped_demotions"] == 1


@play(write_back=True)
async def test_slots_are_freed_although_the_search_for_victims_is_long(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictor, "MAX_VISITED", 1)
    names = [f"p{nth}" for nth in range(SLOTS)]
    for name in names[:-1]:
        rig.put(name)
    for name in names[:-1]:  # Each use leaves an entry where it was queued before.
        rig.pool.release([rig.lookup(name).lease_id])
    searches: list[object] = []
    search = demoter.pin_next_victims
    monkeypatch.setattr(demoter, "pin_next_victims", lambda *args: searches.append(args) or search(*args))  # type: ignore[func-returns-value]
    rig.put(names[-1])
    for nth in range(1, 6):
        await turns(1)
        assert len(searches) <= nth, "the search holds the loop"
    await rig.wait_idle()
    assert len(searches) > 5
    assert tier.kept and rig.pool.stats().free_bytes == SLOT and not tier.counters["dropped_demotions"]


@play(MemoryTier, MemoryTier, write_back=True)
async def test_a_hanging_tier_does_not_delay_the_others(
    rig: Rig, first: MemoryTier, second: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demoter, "ANSWER_S", 0.02)
    first.gate.clear()
    for nth in range(3 * SLOTS):
        rig.put(f"p{nth}")
        await asyncio.sleep(0.003)
        if nth == SLOTS + 4:
            await asyncio.sleep(0.05)
            rig.clock.advance(ANSWER_S + 1)
    assert len(second.kept) > SLOTS, "one tier that hangs stops the other"
    first.gate.set()
    await rig.wait_idle()
