"""Prefetch hints: prefixes come up from tiers to their ends, and no client looks for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from kvpool.protocol.errors import InvalidRequestError, OutOfSpaceError, UnknownNamespaceError
from kvpool.protocol.types import BlockRun, Lookup, RunHits
from kvpool_server.cache.hints import HintResult
from kvpool_server.tiering import prefetcher
from tests.contracts.tier_contract import awaited
from tests.support.memory_tier import MemoryTier, Rig, asked, play, turns
from tests.support.values import block_hash


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks again without a wait."""
    monkeypatch.setattr(prefetcher, "LOOK_EVERY_S", 0.0)


def _run(names: Sequence[object]) -> list[BlockRun]:
    return [BlockRun(0, [block_hash(name) for name in names])]


async def _prefetch(rig: Rig, *names: object) -> HintResult:
    return await rig.tiered.prefetch(rig.namespace.fingerprint, _run(names))


async def _ended(rig: Rig) -> None:
    for _ in range(200):
        await turns()
        if not rig.tiered._prefetcher._tasks:
            return
    raise AssertionError("a hint is followed for ever")


def _present(rig: Rig, *names: object) -> int:
    return rig.pool.lookup(rig.namespace.fingerprint, _run(names), prefix_only=True).hits[0].num_leading


@pytest.mark.parametrize("tier", [MemoryTier, asked])
def test_a_long_prefix_comes_up_to_its_end(tier: type[MemoryTier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "MAX_PREFETCH_BLOCKS", 3)
    names = [f"n{nth}" for nth in range(12)]

    @play(tier)
    async def test(rig: Rig, tier: MemoryTier) -> None:
        await rig.demote(*names)
        found = await _prefetch(rig, *names)
        assert found.num_blocks == 0 and found.num_pending >= 3
        await _ended(rig)
        assert _present(rig, *names) == 12
        assert await _prefetch(rig, *names) == HintResult(12)
        assert rig.pool.counters["prefetch_hints"] == 2 and rig.pool.counters["lookups"] == 1, "a hint is no lookup"

    test()


@play()
async def test_what_the_tier_lacks_or_cannot_read_ends_a_prefetch(rig: Rig, tier: MemoryTier) -> None:
    await rig.demote("a", "b", "c")
    del tier.kept[block_hash("b")]
    assert (await _prefetch(rig, "a", "b", "c")).num_pending == 1
    await _ended(rig)
    assert _present(rig, "a", "b", "c") == 1
    assert await _prefetch(rig, "x", "y") == HintResult(0)
    assert not rig.tiered._prefetcher._tasks
    rig.evict_all()
    tier.failure = "broken"
    assert (await _prefetch(rig, "a")).num_pending == 1
    await _ended(rig)
    assert _present(rig, "a") == 0


@play()
async def test_prefetches_are_bounded_and_a_tenant_leaves_some_for_others(rig: Rig, tier: MemoryTier) -> None:
    names = [f"n{nth}" for nth in range(12)]
    await rig.demote(*names)
    tier.gate.clear()
    most = prefetcher.MAX_PREFETCHES // 2
    for name in (names * 2)[:most]:
        assert (await _prefetch(rig, name)).num_pending == 1
    with pytest.raises(OutOfSpaceError, match=f"{most} prefetches are under way; the limit is 16"):
        await _prefetch(rig, names[-1])
    tier.gate.set()
    await _ended(rig)
    assert await _prefetch(rig, names[0]) == HintResult(1)
    assert not rig.tiered._prefetcher._by_tenant


@play()
async def test_a_hint_is_followed_for_a_bounded_time(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "MAX_FOLLOWED_S", 0.02)
    await rig.demote("a")
    tier.gate.clear()
    assert (await _prefetch(rig, "a")).num_pending == 1
    while rig.tiered._prefetcher._tasks:
        await asyncio.sleep(0.005)
    tier.gate.set()
    await rig.wait_idle()
    assert _present(rig, "a") == 1, "what was queued did not come up"


@play()
async def test_an_unknown_namespace_and_two_runs_of_a_group_are_refused(rig: Rig, tier: MemoryTier) -> None:
    with pytest.raises(UnknownNamespaceError):
        await rig.tiered.prefetch(block_hash("none"), _run(["a"]))
    with pytest.raises(InvalidRequestError, match="a prefetch of 2 runs, some of one group"):
        await rig.tiered.prefetch(rig.namespace.fingerprint, [*_run(["a"]), *_run(["b"])])
    assert not rig.tiered._prefetcher._by_tenant


@pytest.mark.parametrize("num_pending", [0, 1])
@awaited
async def test_other_calls_come_between_any_two_looks(num_pending: int) -> None:
    calls: list[str] = []

    def look(fingerprint: bytes, runs: Sequence[BlockRun], prefix_only: bool) -> Lookup:
        calls.append("look")
        return Lookup((RunHits(0, 0, num_pending=num_pending),))

    async def others() -> None:
        while True:
            calls.append("other")
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    subject = prefetcher.Prefetcher(look)
    found = await subject.prefetch(b"", _run("a") * 64, [True] * 64, "")
    assert found == HintResult(0, num_pending=64 * num_pending) and calls.count("look") == 64
    await turns()
    other.cancel()
    subject.close()
    assert ("look", "look") not in itertools.pairwise(calls), "two looks in one turn of the loop"
