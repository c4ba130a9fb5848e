"""What moves blocks down and up, with tiers that are slow, dead, forgetful, or have to be asked."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.hashing import checksum
from kvpool.holdings import TierHoldings
from kvpool.types import BlockRun, Lookup, RunHits, ShardRange, TierStats
from kvpool_server.cache.allocator.arena import Arena
from kvpool_server.cache.namespaces import Namespace
from kvpool_server.cache.pool import Pool
from kvpool_server.metrics import _TIER_COUNTERS
from kvpool_server.tiering import demoter as demotion
from kvpool_server.tiering import promoter as promotion
from kvpool_server.tiering.tiers import Tiers
from kvpool_server.tiers.health import ANSWER_S, AWAY_S
from kvpool_server.tiers.tier import COUNTERS, Block, Tier, TierError
from tests.support.clock import FakeClock
from tests.support.values import block_hash, group_spec, namespace_spec, payload

SLOT = 1024
SLOTS = 16


class MemoryTier(Tier):
    """Keeps everything, as fast or slow as it is told.

    Args:
        answers_at_once: whether it knows without being asked.
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

    def known(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool] | None:
        return [name in self.kept for name in block_hashes] if self._answers_at_once else None

    async def find(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> list[bool]:
        await self._pass("find")
        return [name in self.kept for name in block_hashes]

    async def write(self, namespace: Namespace, group_idx: int, blocks: Sequence[Block]) -> int:
        await self._pass("write")
        for block in blocks:
            self.kept[block.block_hash] = (bytes(block.payload), list(block.checksums))
        return len(blocks)

    async def read(
        self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        await self._pass("read")
        sums: list[Sequence[int] | None] = []
        for name, view in zip(block_hashes, into, strict=True):
            data, expected = self.kept.get(name, (b"", None))
            if expected is not None:
                view[:] = data
            sums.append(expected)
        return sums

    async def remove(self, namespace: Namespace, group_idx: int, block_hashes: Sequence[bytes]) -> None:
        for name in block_hashes:
            self.kept.pop(name, None)

    async def clear(self, fingerprint: bytes = b"") -> None:
        self.kept.clear()

    def holdings(self, fingerprint: bytes) -> TierHoldings:
        return TierHoldings(self.name, len(self.kept), SLOT * len(self.kept))

    def stats(self) -> TierStats:
        return TierStats(self.name, counters=dict(self.counters))

    async def close(self) -> None:
        """Nothing to do."""


class Rig:
    """A pool of sixteen slots, and tiers."""

    def __init__(self, *tiers: MemoryTier, on_evict: bool = False):
        ids = itertools.count(1)
        self.clock = FakeClock()
        self.pool = Pool(Arena(SLOTS * SLOT, 4 * SLOT), self.clock, lambda: next(ids))
        self.memory = np.zeros(SLOTS * SLOT, np.uint8)
        self.tiers = Tiers(self.pool, self.memory, tiers, [on_evict] * len(tiers))
        for mover in self.tiers._movers:
            mover.health._clock = mover.up._clock = self.clock
        self.pool.entry_table.observer = self.pool.below = self.tiers
        self.namespace, _ = self.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=SLOT)))

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
        return self.pool.lookup(self.namespace.fingerprint, runs, prefix_only=prefix_only, lease_ttl_ms=1_000)

    async def hits(self, *names: object, prefix_only: bool = True) -> RunHits:
        """Once nothing is on its way."""
        for _ in range(100):
            found = self.lookup(*names, prefix_only=prefix_only)
            self.pool.release([found.lease_id])
            if not found.retry_after_ms:
                return found.hits[0]
            await turns()
        raise AssertionError("blocks are on their way for ever")

    def evict_all(self) -> None:
        self.pool.clear()

    async def quiet(self) -> None:
        for _ in range(200):
            await turns()
            if not any(len(mover.down) or mover.health.num_calls for mover in self.tiers._movers):
                return
        raise AssertionError("something moves for ever")


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def play(
    *tiers: Callable[[], MemoryTier], on_evict: bool = False
) -> Callable[[Callable[..., Awaitable[None]]], Callable[[], None]]:
    """Runs a test with a rig that is open, and closes it."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            async def within() -> None:
                made = [make() for make in (tiers or (MemoryTier,))]
                rig = Rig(*made, on_evict=on_evict)
                await rig.tiers.open()
                try:
                    async with asyncio.timeout(30):
                        await test(rig, *made)
                    rig.pool.check_integrity()
                finally:
                    await rig.tiers.close()
                rig.clock.advance(1_000)
                rig.pool.expire()
                assert not rig.pool.stats().num_leases and not rig.pool.stats().num_tickets

            asyncio.run(within())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def asked() -> MemoryTier:
    return MemoryTier("asked:", answers_at_once=False)


@play()
async def test_what_is_stored_goes_down_and_comes_back(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b", "c")
    await rig.quiet()
    assert set(tier.kept) == {block_hash(name) for name in "abc"} and tier.counters["demoted_blocks"] == 3
    rig.evict_all()
    found = rig.lookup("a", "b", "c", "d")
    assert (found.hits[0].num_leading, found.hits[0].num_pending) == (0, 3) and 2 <= found.retry_after_ms <= 50
    assert (await rig.hits("a", "b", "c", "d")).num_leading == 3
    assert tier.counters["promoted_blocks"] == 3 and tier.calls["write"] == 1


@play()
async def test_blocks_between_others_come_where_groups_need_single_ones(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b", "c", "d")
    await rig.quiet()
    rig.evict_all()
    del tier.kept[block_hash("b")]
    found = rig.lookup("a", "b", "c", "d", prefix_only=False)
    assert found.hits[0].num_pending == 3
    assert (await rig.hits("a", "b", "c", "d", prefix_only=False)).complete == 0b1101
    assert (await rig.hits("a", "b", "c", "d")).num_leading == 1


@play(asked)
async def test_a_tier_that_must_be_asked_is_asked_once(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.quiet()
    rig.evict_all()
    assert rig.lookup("a", "b", "c").hits[0].num_pending == 3, "what is not known yet may come"
    assert rig.lookup("a", "b", "c").hits[0].num_pending == 3
    assert (await rig.hits("a", "b", "c")).num_leading == 2
    assert tier.calls["find"] == 1
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 2
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 2
    rig.clock.advance(promotion.ANSWER_GOOD_S + 1)
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 3


@play(MemoryTier, asked)
async def test_the_second_tier_has_what_the_first_lacks(rig: Rig, first: MemoryTier, second: MemoryTier) -> None:
    rig.put("a", "b", "c", "d")
    await rig.quiet()
    rig.evict_all()
    del first.kept[block_hash("c")], first.kept[block_hash("d")], second.kept[block_hash("a")]
    assert (await rig.hits("a", "b", "c", "d")).num_leading == 4
    assert (first.counters["promoted_blocks"], second.counters["promoted_blocks"]) == (2, 2)
    await rig.quiet()
    assert set(first.kept) == {block_hash(name) for name in "abcd"}, "what came up from below was not written above"


@play()
async def test_a_tier_that_stands_still_slows_no_put(rig: Rig, tier: MemoryTier) -> None:
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
    assert not rig.tiers.stats()[0].up
    before = tier.counters["dropped_demotions"]
    rig.put("later still")
    assert tier.counters["dropped_demotions"] == before + 1
    tier.gate.set()
    await rig.quiet()
    assert rig.tiers.stats()[0].up
    assert tier.counters["dropped_demotions"] + len(tier.kept) == 103


@play()
async def test_no_more_wait_than_may(rig: Rig, tier: MemoryTier) -> None:
    most, demotion.MAX_WAITING = demotion.MAX_WAITING, 5
    try:
        tier.gate.clear()
        for nth in range(12):
            rig.put(f"p{nth}")
            await turns(2)
        assert len(rig.tiers._movers[0].down) == 5 and tier.counters["dropped_demotions"] == 6
        tier.gate.set()
        await rig.quiet()
        assert len(tier.kept) == 6
    finally:
        demotion.MAX_WAITING = most


@play()
async def test_a_tier_that_fails_is_left_alone_and_tried_again(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.quiet()
    tier.failure = "the disk is gone"
    rig.put("b")
    await rig.quiet()
    assert not rig.tiers.stats()[0].up and tier.counters["dropped_demotions"] == 1
    rig.evict_all()
    assert rig.lookup("a").hits[0].num_pending == 0, "who asks waits for a dead tier"
    tier.failure = ""
    rig.clock.advance(AWAY_S[0] + 0.1)
    assert not rig.tiers.stats()[0].up, "nothing has shown yet that it works"
    assert (await rig.hits("a")).num_leading == 1
    assert rig.tiers.stats()[0].up


@play()
async def test_what_was_dropped_goes_down_with_what_needs_it(rig: Rig, tier: MemoryTier) -> None:
    tier.failure = "away"
    rig.put("a", "b")
    await rig.quiet()
    tier.failure = ""
    rig.clock.advance(AWAY_S[0] + 0.1)
    rig.put("c", parent="b")
    await rig.quiet()
    assert set(tier.kept) == {block_hash(name) for name in "abc"}


@play()
async def test_a_read_that_fails_leaves_nothing_reserved(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.quiet()
    rig.evict_all()
    tier.failure = "the disk is gone"
    assert rig.lookup("a", "b").hits[0].num_pending == 2
    await rig.quiet()
    stats = rig.pool.stats()
    assert stats.num_incomplete == 0 and stats.free_bytes == stats.arena_bytes
    assert rig.lookup("a", "b").hits[0].num_pending == 0


@play()
async def test_what_has_gone_when_it_is_read_is_not_asked_for_at_once_again(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.quiet()
    rig.evict_all()
    known = tier.known
    tier.known = lambda *_: [True] * len(_[2])  # type: ignore[method-assign]  # As a neighbour's old journal has it.
    del tier.kept[block_hash("b")]
    assert (await rig.hits("a", "b")).num_leading == 1
    assert tier.counters["missed_promotions"] == 1
    tier.known = known  # type: ignore[method-assign]


@play()
async def test_without_room_nothing_comes_and_nobody_waits(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.quiet()
    rig.evict_all()
    rig.put(*(f"p{nth}" for nth in range(SLOTS)))
    await rig.quiet()
    held = rig.lookup(*(f"p{nth}" for nth in range(SLOTS)))
    assert held.hits[0].num_leading == SLOTS
    assert (await rig.hits("a", "b")).num_leading == 0
    assert tier.counters["dropped_promotions"] == 2
    rig.pool.release([held.lease_id])
    rig.clock.advance(promotion.ANSWER_GOOD_S + 1)
    assert (await rig.hits("a", "b")).num_leading == 2


@play()
async def test_what_nobody_asks_for_any_more_is_not_read(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    rig.put("b")
    await rig.quiet()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    await turns()
    rig.lookup("b")  # Two are read at once: this one as well.
    await turns()
    assert tier.calls["read"] == 2
    tier.gate.set()
    await rig.quiet()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    rig.lookup("b")
    await turns()
    rig.put("c")  # Known to the tier only when it is written.
    tier.kept[block_hash("c")] = (payload("c", SLOT).tobytes(), [checksum(payload("c", SLOT))])
    rig.evict_all()
    rig.lookup("c")
    rig.clock.advance(promotion.STALE_S + 1)
    tier.gate.set()
    await rig.quiet()
    assert tier.counters["dropped_promotions"] == 1 and rig.lookup("c").hits[0].num_leading == 0


@play()
async def test_cleared_while_it_is_brought_up(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.quiet()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    await turns()
    rig.pool.clear()
    assert rig.pool.stats().num_quarantined == 1, "its slot could be given to another while a thread writes to it"
    tier.gate.set()
    await rig.quiet()
    stats = rig.pool.stats()
    assert stats.num_entries == 0 and stats.free_bytes == stats.arena_bytes


@play()
async def test_a_put_of_what_is_on_its_way_is_busy_and_then_present(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.quiet()
    rig.evict_all()
    tier.gate.clear()
    rig.lookup("a")
    await turns()
    rig.put("a")
    assert rig.pool.counters["put_blocks_busy"] == 1
    tier.gate.set()
    await rig.quiet()
    rig.put("a")
    assert rig.pool.counters["put_blocks_present"] == 1
    assert (await rig.hits("a")).num_leading == 1


@play()
async def test_drain_says_what_is_left(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    rig.put("a")
    await turns()
    rig.put("b", "c")
    assert await rig.tiers.drain(0.05) == 2
    tier.gate.set()
    assert await rig.tiers.drain(5) == 0 and len(tier.kept) == 3


@pytest.mark.parametrize("blocks", [1, 100])
def test_a_long_prompt_is_brought_up_in_parts(blocks: int) -> None:
    """What a prompt asks for beyond the bound is asked for again when the first part is there."""

    @play()
    async def test(rig: Rig, tier: MemoryTier) -> None:
        import kvpool_server.tiering.tiers as module

        names = [f"n{nth}" for nth in range(12)]
        rig.put(*names)
        await rig.quiet()
        rig.evict_all()
        most, module.MAX_AHEAD_BLOCKS = module.MAX_AHEAD_BLOCKS, blocks
        try:
            assert rig.lookup(*names).hits[0].num_pending == min(blocks, 12)
            assert (await rig.hits(*names)).num_leading == 12
        finally:
            module.MAX_AHEAD_BLOCKS = most

    test()


def test_an_exception_of_our_own_does_not_end_the_moving(caplog: Any) -> None:
    @play()
    async def test(rig: Rig, tier: MemoryTier) -> None:
        import kvpool_server.tiering.tiers as module

        again, module.AGAIN_S = module.AGAIN_S, 0.0
        write = tier.write

        async def broken(*_: object) -> int:
            raise ZeroDivisionError

        tier.write = broken  # type: ignore[method-assign]
        rig.put("a")
        await turns()
        tier.write = write  # type: ignore[method-assign]
        rig.clock.advance(AWAY_S[1])
        rig.put("b")
        await rig.quiet()
        assert block_hash("b") in tier.kept
        module.AGAIN_S = again

    test()


@play(on_evict=True)
async def test_on_eviction_nothing_is_written_while_there_is_room(rig: Rig, tier: MemoryTier) -> None:
    rig.put(*(f"a{nth}" for nth in range(SLOTS // 2)))
    await turns()
    assert not tier.kept


@play(MemoryTier, MemoryTier, on_evict=True)
async def test_on_eviction_room_is_made_before_it_is_needed(rig: Rig, first: MemoryTier, second: MemoryTier) -> None:
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


@play(on_evict=True)
async def test_on_eviction_parents_are_written_before_their_children(rig: Rig, tier: MemoryTier) -> None:
    for chain in range(4):
        for nth in range(6):
            rig.put(f"{chain}-{nth}", parent=f"{chain}-{nth - 1}" if nth else None)
            await rig.quiet()
    assert len(tier.kept) >= 4 * 6 - SLOTS and not tier.counters["dropped_demotions"]
    for chain in range(4):
        assert (await rig.hits(*(f"{chain}-{nth}" for nth in range(6)))).num_leading == 6


@play(on_evict=True)
async def test_a_slow_tier_keeps_no_put_waiting_and_what_is_lost_is_counted(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    names = [f"p{nth}" for nth in range(3 * SLOTS)]
    for name in names:
        rig.put(name)
        await turns(2)
    assert rig.pool.counters["put_blocks_completed"] == len(names)
    lost = tier.counters["dropped_demotions"]
    assert lost > 0
    tier.gate.set()
    await rig.quiet()
    assert len(tier.kept) + rig.pool.stats().num_entries + tier.counters["dropped_demotions"] >= len(names)


@play(on_evict=True)
async def test_what_is_read_while_it_is_written_down_stays(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    names = [f"p{nth}" for nth in range(SLOTS)]
    rig.put(*names[:-1])
    rig.put(names[-1])
    await turns()
    assert tier.calls["write"] == 1
    held = [rig.lookup(name).lease_id for name in names]
    tier.gate.set()
    await rig.quiet()
    stats = rig.pool.stats()
    assert stats.num_entries == SLOTS and tier.kept, "a block was dropped under a lease"
    rig.pool.release(held)
    rig.put("new")
    await rig.quiet()
    rig.pool.check_integrity()
    assert rig.pool.stats().num_entries <= SLOTS


@play(on_evict=True)
async def test_where_the_tier_fails_nothing_goes_before_its_time(rig: Rig, tier: MemoryTier) -> None:
    tier.failure = "the disk is gone"
    rig.put(*(f"p{nth}" for nth in range(SLOTS)))
    await rig.quiet()
    assert rig.pool.stats().num_entries == SLOTS and not tier.kept
    rig.put("new")
    assert tier.counters["dropped_demotions"] == 1


@play(on_evict=True)
async def test_at_the_end_everything_is_written(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b", "c")
    rig.put("d")
    assert await rig.tiers.drain(5) == 0
    assert set(tier.kept) == {block_hash(name) for name in "abcd"}


@play(on_evict=True)
async def test_superseded_namespaces_go_first_and_are_not_written(rig: Rig, tier: MemoryTier) -> None:
    old, _ = rig.pool.open_namespace(replace(rig.namespace.spec, weights_epoch="old"))
    rig.namespace = old
    rig.put("a", "b", "c")
    rig.namespace, _ = rig.pool.open_namespace(replace(old.spec, weights_epoch="new"))
    assert old.superseded
    for nth in range(SLOTS - 1):
        rig.put(f"p{nth}")
        await rig.quiet()
    assert not old.entries() and not tier.kept, "what nobody needs was written, or what is needed had to go"


@play(on_evict=True)
async def test_a_tier_that_fails_again_and_again_leaves_the_queues_as_they_are(rig: Rig, tier: MemoryTier) -> None:
    for nth in range(SLOTS):
        rig.put(f"p{nth}")
    policy = rig.pool.entry_table.placement.policy(rig.namespace.groups[0])
    before = len(policy)
    tier.failure = "the disk is gone"
    for _ in range(5):
        rig.clock.advance(AWAY_S[1] + 1)
        rig.tiers._room.taken()
        await rig.quiet()
    assert tier.calls["write"] >= 5 and len(policy) == before
    rig.pool.check_integrity()


@play()
async def test_a_lookup_counts_and_teaches_once_its_blocks_are_got(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.quiet()
    rig.evict_all()
    rig.put("a")
    await rig.quiet()
    tier.gate.clear()
    found = [rig.lookup("a", "b") for _ in range(3)]
    assert all(each.hits[0] == RunHits(1, 0, 1) for each in found)
    assert not rig.pool.counters["lookups"]
    run = BlockRun(0, [block_hash("a")])
    for _ in range(2):
        located = rig.pool.get(found[-1].lease_id, rig.namespace.fingerprint, [run], ShardRange(0, 1))
        assert located.present == (True,)
    counted = [rig.pool.counters[name] for name in ("lookups", "lookup_blocks", "lookup_hits")]
    assert counted == [1, 2, 1]
    rig.pool.release([each.lease_id for each in found])
    tier.gate.set()
    await rig.quiet()


@play()
async def test_behind_a_hole_nothing_more_comes_up(rig: Rig, tier: MemoryTier) -> None:
    names = [f"n{nth}" for nth in range(12)]
    rig.put(*names)
    await rig.quiet()
    rig.evict_all()
    del tier.kept[block_hash("n2")]
    tier.known = lambda *_: [True] * len(_[2])  # type: ignore[method-assign]
    most, promotion.BATCH_BYTES = promotion.BATCH_BYTES, 2 * SLOT
    try:
        assert (await rig.hits(*names)).num_leading == 2
    finally:
        promotion.BATCH_BYTES = most
    assert rig.pool.stats().num_entries <= 6, "blocks came up that are of no use"
    assert not rig.tiers._movers[0].up._coming


@play()
async def test_where_there_is_little_room_a_part_comes(rig: Rig, tier: MemoryTier) -> None:
    names = [f"n{nth}" for nth in range(8)]
    rig.put(*names)
    await rig.quiet()
    rig.evict_all()
    others = [f"p{nth}" for nth in range(SLOTS - 4)]
    rig.put(*others)
    await rig.quiet()
    held = rig.lookup(*others).lease_id
    assert (await rig.hits(*names)).num_leading == 4
    rig.pool.release([held])


@play()
async def test_what_is_removed_while_it_is_written_does_not_stay(rig: Rig, tier: MemoryTier) -> None:
    tier.gate.clear()
    rig.put("a", "b")
    await turns()
    assert tier.calls["write"] == 1
    fingerprint, run = rig.namespace.fingerprint, BlockRun(0, [block_hash("b")])
    rig.pool.remove(fingerprint, [run])
    await rig.tiers.forget(fingerprint, [run])
    tier.gate.set()
    await rig.quiet()
    assert set(tier.kept) == {block_hash("a")}


@play()
async def test_what_is_being_removed_does_not_come_up(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a", "b")
    await rig.quiet()
    fingerprint, run = rig.namespace.fingerprint, BlockRun(0, [block_hash("a")])
    rig.pool.remove(fingerprint, [run])
    really, gate = tier.remove, asyncio.Event()

    async def slowly(*args: Any) -> None:
        await gate.wait()
        await really(*args)

    tier.remove = slowly  # type: ignore[method-assign]
    removing = asyncio.create_task(rig.tiers.forget(fingerprint, [run]))
    await turns()
    assert rig.lookup("a").hits[0].num_pending == 0
    gate.set()
    await removing
    assert block_hash("a") not in tier.kept


@play()
async def test_a_tier_that_cannot_forget_says_so(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.quiet()

    async def fails(*_: Any) -> None:
        raise TierError("the master has gone")

    tier.clear = fails  # type: ignore[method-assign]
    with pytest.raises(TierError, match="the master has gone"):
        await rig.tiers.clear()
    assert not rig.tiers.stats()[0].up


@play(MemoryTier, MemoryTier, on_evict=True)
async def test_a_tier_that_stands_still_does_not_keep_the_others(
    rig: Rig, first: MemoryTier, second: MemoryTier
) -> None:
    import kvpool_server.tiering.watermark as room

    answer, room.ANSWER_S = room.ANSWER_S, 0.02
    try:
        first.gate.clear()
        for nth in range(3 * SLOTS):
            rig.put(f"p{nth}")
            await asyncio.sleep(0.003)
            if nth == SLOTS + 4:
                await asyncio.sleep(0.05)
                rig.clock.advance(ANSWER_S + 1)
        assert len(second.kept) > SLOTS, "one tier that hangs stops the other"
        first.gate.set()
        await rig.quiet()
    finally:
        room.ANSWER_S = answer


def test_every_counter_of_a_tier_has_a_series() -> None:
    assert tuple(_TIER_COUNTERS) == COUNTERS
