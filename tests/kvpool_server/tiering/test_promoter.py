"""Blocks on their way up, from tiers that fail, forget, or have to be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from kvpool.protocol.hashing import checksum
from kvpool_server.cache.entry import Group
from kvpool_server.cache.steps import Steps, Value, at_once
from kvpool_server.tiering import prefetcher, promoter
from kvpool_server.tiers.tier import TierError
from tests.support.memory_tier import SLOT, SLOTS, MemoryTier, Rig, answered, asked, play, turns
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of


@play(asked)
async def test_a_tier_that_must_be_asked_is_asked_once(rig: Rig, tier: MemoryTier) -> None:
    await rig.demote("a", "b")
    assert rig.lookup("a", "b", "c").hits[0].num_pending == 3, "what is not known yet may come"
    assert rig.lookup("a", "b", "c").hits[0].num_pending == 3
    assert (await rig.hits("a", "b", "c")).num_leading == 2
    assert tier.calls["find"] == 1
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 2
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 2
    rig.clock.advance(promoter.ANSWER_VALID_S + 1)
    assert (await rig.hits("nowhere")).num_leading == 0 and tier.calls["find"] == 3


@pytest.mark.parametrize("what", ["clear", "remove"])
@pytest.mark.usefixtures("small_batches")
@play()
async def test_a_block_that_is_dropped_while_it_is_queued_does_not_come_back(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    names = [f"n{nth}" for nth in range(8)]
    await rig.demote(*names)
    monkeypatch.setattr(MemoryTier, "read_bytes", SLOT)
    dropping, drop = asyncio.Event(), getattr(tier, what)

    async def slowly(*arguments: Any) -> None:
        await dropping.wait()
        await drop(*arguments)

    monkeypatch.setattr(tier, what, slowly)
    tier.gate.clear()
    rig.lookup(*names, prefix_only=False)  # One prefix that was being read loses all behind it anyway.
    await turns()
    fingerprint = rig.namespace.fingerprint
    run = run_of(*names)
    call = rig.tiered.clear(fingerprint) if what == "clear" else rig.tiered.remove(fingerprint, [run])
    task = asyncio.create_task(call)
    await turns()
    tier.gate.set()
    await turns(100)
    assert rig.pool.stats().num_entries == 0, "the tier still had what was to be dropped"
    dropping.set()
    await task
    await rig.wait_idle()
    assert rig.lookup(*names).hits[0].num_leading == 0


@play(asked)
async def test_questions_under_way_and_queued_blocks_are_bounded(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "MAX_SEARCHING", 3)
    monkeypatch.setattr(promoter, "MAX_PENDING", 4)
    names = [f"n{nth}" for nth in range(8)]
    await rig.demote(*names)
    tier.gate.clear()
    for _ in range(2):
        pending = [rig.lookup(name).hits[0].num_pending for name in names]
        assert pending == [1] * 3 + [0] * 5, "what is not asked for is a miss"
    await turns()
    assert tier.calls["find"] == 3
    tier.gate.set()
    await turns()
    rig.lookup(*names)
    await turns()
    tier.gate.clear()
    assert rig.lookup(*names).hits[0].num_pending == 4
    tier.gate.set()
    assert (await rig.hits(*names)).num_leading == 8


@play()
async def test_a_lookup_of_many_runs_examines_some_at_a_time(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "LOOKUP_STEP_BLOCKS", 4)
    runs = [run_of(*(f"{idx} {nth}" for nth in range(3))) for idx in range(6)]
    await rig.demote("a")
    tier.gate.clear()
    steps = rig.tiered.bring_up(rig.namespace.fingerprint, [run_of("a"), *runs], False)
    assert next(steps) is None
    tier.gate.set()
    await rig.wait_idle()  # What is pending may be up before the last step.
    assert sum(1 for _ in steps) >= 4, "what no tier has was examined at once"


@pytest.mark.parametrize("failure", ["", "the disk is gone"], ids=["other bytes", "an error"])
@play(has_tenants=True)
async def test_a_read_that_brings_another_tenants_bytes_leaves_none_of_them_in_the_slot(
    rig: Rig, tier: MemoryTier, failure: str
) -> None:
    await rig.demote("a", "b")
    rig.memory[:] = 0

    async def read(*args: Sequence[memoryview]) -> list[None]:
        """As where a neighbour has given the slot to another block meanwhile: the checksum tells."""
        for view in args[-1]:
            view[:] = bytes([0xEE]) * len(view)
        if failure:
            raise TierError(failure)
        return [None] * len(args[-1])

    tier.read = read  # type: ignore[assignment, method-assign]
    assert (await rig.hits("a", "b")).num_leading == 0
    await rig.wait_idle()
    assert tier.counters["missed_promotions"] == 2
    assert not rig.memory.any()


@play()
async def test_a_prefetch_that_no_lookup_asks_for_any_more_is_dropped(rig: Rig, tier: MemoryTier) -> None:
    rig.put("a")
    await rig.demote("b")
    tier.gate.clear()
    rig.lookup("a")
    rig.lookup("b")
    await turns()
    assert tier.calls["read"] == 2, "both reads that there may be at once are under way"
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
    await rig.demote("a")
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
async def test_no_block_is_promoted_behind_one_that_cannot_be_read(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{nth}" for nth in range(12)]
    await rig.demote(*names)
    del tier.kept[block_hash("n2")]
    tier.known = lambda *_: [True] * len(_[1])  # type: ignore[method-assign]
    monkeypatch.setattr(MemoryTier, "read_bytes", 2 * SLOT)
    assert (await rig.hits(*names)).num_leading == 2
    assert rig.pool.stats().num_entries <= 6, "blocks came up that are of no use"
    assert rig.tiered.is_idle


class GatedReads(MemoryTier):
    """Four reads at once, of which each waits for its own gate.

    Attributes:
        reads: the blocks of each read, and its gate.
        is_open: whether later reads pass at once.
    """

    reads_at_once = 4

    def __init__(self, answers_at_once: bool = True) -> None:
        super().__init__(answers_at_once=answers_at_once)
        self.reads: list[tuple[list[bytes], asyncio.Event]] = []
        self.is_open = False

    def open_all(self) -> None:
        """Lets all reads pass, also later ones."""
        self.is_open = True
        for _, gate in self.reads:
            gate.set()

    async def read(
        self, group: Group, block_hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Sequence[int] | None]:
        self.reads.append((list(block_hashes), asyncio.Event()))
        if not self.is_open:
            await self.reads[-1][1].wait()
        return await super().read(group, block_hashes, into)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one block at first, then of twice as many, and of four at most."""
    monkeypatch.setattr(promoter, "FIRST_BATCH_BYTES", SLOT)
    monkeypatch.setattr(promoter, "BATCH_GROWTH", 2)
    monkeypatch.setattr(promoter, "MAX_ARENA_SHARE", 1 / 4)
    monkeypatch.setattr(MemoryTier, "read_bytes", 4 * SLOT)


@pytest.mark.parametrize(("max_read_blocks", "each"), [(256, SLOTS // 8), (1, 1)])
@play(GatedReads)
async def test_a_read_takes_some_blocks_and_a_share_of_the_arena(
    rig: Rig, tier: GatedReads, monkeypatch: pytest.MonkeyPatch, max_read_blocks: int, each: int
) -> None:
    monkeypatch.setattr(promoter, "MAX_READ_BLOCKS", max_read_blocks)
    names = [f"n{nth}" for nth in range(SLOTS)]
    await rig.demote(*names)
    rig.lookup(*names)
    await turns()
    assert [len(blocks) for blocks, _ in tier.reads] == [each] * tier.reads_at_once
    tier.open_all()
    assert (await rig.hits(*names)).num_leading == SLOTS


@pytest.mark.usefixtures("small_batches")
@play(lambda: GatedReads(answers_at_once=False))
async def test_a_tier_that_must_be_asked_is_asked_twice_for_a_long_prompt(
    rig: Rig, tier: GatedReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "MAX_PREFETCH_BLOCKS", 5)
    names = [f"n{nth}" for nth in range(15)]
    await rig.demote(*names)
    while (found := rig.lookup(*names)).retry_after_ms:
        rig.pool.release([found.lease_id])
        await turns()
        for _, gate in [read for read in tier.reads if not read[1].is_set()][-1:]:
            gate.set()  # The last of those under way ends first.
    assert found.hits[0].num_leading == 15
    assert tier.calls["find"] == 2, "of the first blocks, and of all behind them"


@pytest.mark.usefixtures("small_batches")
@play(GatedReads, has_tenants=True)
async def test_a_prefix_waits_behind_one_batch_of_another_tenant_however_many_namespaces_that_has(
    rig: Rig, tier: GatedReads
) -> None:
    specs = [namespace_spec(group_spec(chunk_bytes=SLOT), tenant="acme", salt=str(nth)) for nth in range(8)]
    specs.append(namespace_spec(group_spec(chunk_bytes=SLOT), tenant="umbra"))
    for nth, spec in enumerate(specs):
        tier.kept[block_hash(nth)] = payload(nth, SLOT).tobytes(), [checksum(payload(nth, SLOT))]
        fingerprint = rig.pool.open_namespace(spec)[0].fingerprint
        answered(rig.tiered.lookup(fingerprint, [run_of(nth)], prefix_only=True, lease_ttl_ms=1_000))
    await turns()
    assert [block_hash(8)] in [blocks for blocks, _ in tier.reads[:2]], "another tenant's namespaces came first"
    tier.open_all()
    await rig.wait_idle()
    assert [block for blocks, _ in tier.reads for block in blocks] == [block_hash(nth) for nth in (0, 8, *range(1, 8))]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("small_batches")
@play(GatedReads)
async def test_no_block_is_read_before_its_ancestors(rig: Rig, tier: GatedReads, seed: int) -> None:
    """Prompts that begin alike, of which lookups name more and less, while reads end in any order."""
    random = Random(seed)
    prompts = [["s", "t", "u", *(f"{prompt}{nth}" for nth in range(4))] for prompt in "abc"]
    for prompt in prompts:
        await rig.demote(*prompt)
    asked: set[bytes] = set()
    for _ in range(40):
        some = random.choice(prompts)[: random.randrange(1, 8)]
        asked |= set(map(block_hash, some))
        rig.pool.release([rig.lookup(*some).lease_id])
        await turns(random.randrange(4))
        if under_way := [gate for _, gate in tier.reads if not gate.is_set()]:
            random.choice(under_way).set()
    tier.open_all()
    await rig.wait_idle()
    order = {block: nth for nth, block in enumerate(block for blocks, _ in tier.reads for block in blocks)}
    assert order.keys() == asked
    for prompt in prompts:
        places = [order[block] for block in map(block_hash, prompt) if block in order]
        assert places == sorted(places)


@play(GatedReads)
async def test_an_answer_says_when_the_next_batch_is_likely_to_be_up(rig: Rig, tier: GatedReads) -> None:
    for name in ("first", "second"):
        await rig.demote(name)
    rig.lookup("first")
    await turns()
    rig.clock.advance(0.020)
    tier.open_all()
    await rig.wait_idle()
    tier.is_open = False
    rig.lookup("second")
    await turns()
    answers = []
    for seconds in (0.0, 0.015, 0.010, 0.040, 5.0):
        rig.clock.advance(seconds)
        answers.append(rig.lookup("second").retry_after_ms)
    # As long as the last read of as many bytes; the later a read is, the less often a client asks.
    assert answers == [20, 5, 3, 23, promoter.MAX_RETRY_MS]
    tier.open_all()


@pytest.mark.parametrize("prefix_only", [True, False])
@pytest.mark.usefixtures("small_batches")
@play(GatedReads)
async def test_a_prompt_that_is_larger_than_the_arena_keeps_what_has_come_up(
    rig: Rig, tier: GatedReads, prefix_only: bool
) -> None:
    """Whoever reserves slots in several steps lets other batches of the prompt try meanwhile."""
    names = [f"n{nth}" for nth in range(2 * SLOTS)]
    for start in (0, SLOTS):
        await rig.demote(*names[start : start + SLOTS])

    async def in_turns(steps: Steps[Value]) -> Value:
        await asyncio.sleep(0)
        return await at_once(steps)

    for each in rig.tiered._promoters:
        each._run = in_turns
    tier.open_all()
    assert (await rig.hits(*names, prefix_only=prefix_only)).num_leading == SLOTS
    assert not rig.pool.counters["evicted_blocks"]
