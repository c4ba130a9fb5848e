"""Lookups that wait for pending blocks: answered once the blocks are up, or lost, or after the wait."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from kvpool.protocol.errors import UnknownNamespaceError
from kvpool.protocol.types import Lookup
from kvpool_server.cache.leases import NOBODY, Owner
from kvpool_server.tiering import promoter, tiered_pool
from tests.support.memory_tier import SLOT, MemoryTier, Rig, asked, play, turns
from tests.support.values import block_hash, group_spec, namespace_spec, run_of

LONG_MS = 20_000


def ask(
    rig: Rig, *names: object, wait_ms: int = LONG_MS, prefix_only: bool = True, owner: Owner = NOBODY
) -> asyncio.Task[Lookup]:
    fingerprint, runs = rig.namespace.fingerprint, [run_of(*names)]
    return asyncio.create_task(
        rig.tiered.lookup(fingerprint, runs, prefix_only=prefix_only, lease_ttl_ms=1_000, owner=owner, wait_ms=wait_ms)
    )


def looks_of(rig: Rig) -> list[object]:
    """A list that gets an element each time that blocks are looked up in the pool."""
    find, looks = rig.pool.lookups.find, list[object]()

    def counted(*arguments: object, **options: object) -> object:
        looks.append(arguments)
        return find(*arguments, **options)  # type: ignore[arg-type]

    rig.pool.lookups.find = counted  # type: ignore[method-assign,assignment]
    return looks


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_pool, "MAX_WAIT_MS", LONG_MS)


@pytest.mark.parametrize("make", [MemoryTier, asked])
def test_it_is_answered_once_its_blocks_are_up(make: type[MemoryTier]) -> None:
    @play(make)
    async def test(rig: Rig, tier: MemoryTier) -> None:
        await rig.demote("a", "b", "c")
        tier.gate.clear()
        task = ask(rig, "a", "b", "c", "d")
        await turns()
        looks = looks_of(rig)
        for _ in range(10):
            rig.tiered._progressed()
            await turns()
        assert not task.done() and not looks, "what others wait for makes it look again"
        tier.gate.set()
        found = await task
        assert (found.hits[0].num_leading, found.hits[0].num_pending, found.retry_after_ms) == (3, 0, 0)
        assert rig.pool.stats().num_leases == 1 and rig.pool.leases.get(found.lease_id)
        assert rig.pool.counters["lookups"] == 1, "a repeated lookup counts once"

    test()


@pytest.mark.parametrize(("wait_ms", "longest_ms"), [(5, LONG_MS), (2**32 - 1, 5)])
@play()
async def test_after_the_wait_or_the_longest_it_is_answered_with_what_is_up(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, wait_ms: int, longest_ms: int
) -> None:
    monkeypatch.setattr(tiered_pool, "MAX_WAIT_MS", longest_ms)
    await rig.demote("a", "b")
    rig.put("a")
    tier.gate.clear()
    found = await ask(rig, "a", "b", wait_ms=wait_ms)
    assert (found.hits[0].num_leading, found.hits[0].num_pending) == (1, 1) and found.retry_after_ms
    assert rig.pool.leases.get(found.lease_id)
    tier.gate.set()


@play()
async def test_what_comes_up_meanwhile_is_leased_at_once(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{nth}" for nth in range(8)]
    await rig.demote(*names)
    monkeypatch.setattr(promoter, "FIRST_BATCH_BYTES", 1)
    monkeypatch.setattr(MemoryTier, "read_bytes", 1)
    tier.reads_at_once = 1
    tier.gate.clear()
    task = ask(rig, *names)
    await turns()
    tier.gate.set()
    while not (leases := rig.pool.leases.values()) or not leases[0].entries:
        assert not task.done(), "nothing was leased before all was up"
        await asyncio.sleep(0)
    assert len(leases[0].entries) < len(names)
    assert (await task).hits[0].num_leading == len(names)
    assert rig.pool.stats().num_leases == 1


@pytest.mark.parametrize(
    ("failure", "prefix_only", "num_leading"), [("", True, 1), ("", False, 1), ("the disk is gone", True, 0)]
)
@play()
async def test_blocks_that_are_lost_and_a_tier_that_fails_end_the_wait(
    rig: Rig, tier: MemoryTier, failure: str, prefix_only: bool, num_leading: int
) -> None:
    await rig.demote("a", "b", "c")
    tier.gate.clear()
    task = ask(rig, "a", "b", "c", prefix_only=prefix_only)
    await turns()
    del tier.kept[block_hash("b")]
    tier.failure = failure
    tier.gate.set()
    found = await task
    assert (found.hits[0].num_leading, found.retry_after_ms) == (num_leading, 0)
    assert not failure or not found.lease_id


@play()
async def test_a_client_that_hangs_up_leaves_no_lease(rig: Rig, tier: MemoryTier) -> None:
    await rig.demote("a", "b")
    rig.put("a")
    tier.gate.clear()
    task = ask(rig, "a", "b")
    await turns()
    assert rig.pool.stats().num_leases == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.pool.stats().num_leases == 0
    tier.gate.set()


@play()
async def test_a_namespace_that_is_closed_meanwhile_ends_the_wait(rig: Rig, tier: MemoryTier) -> None:
    await rig.demote("a", "b")
    rig.put("a")
    tier.gate.clear()
    task = ask(rig, "a", "b")
    await turns()
    # Only a namespace whose weights were replaced, and which nobody has used for a minute, is closed for others.
    rig.pool.open_namespace(dataclasses.replace(rig.namespace.spec, weights_epoch="next"))
    rig.clock.advance(61)
    for nth in range(rig.pool.limits.max_namespaces):
        rig.pool.open_namespace(namespace_spec(group_spec(chunk_bytes=SLOT), salt=f"{nth}"))
    tier.gate.set()
    with pytest.raises(UnknownNamespaceError):
        await task
    assert rig.pool.stats().num_leases == 0


@play()
async def test_a_client_whose_lookups_wait_leaves_places_to_other_clients(
    rig: Rig, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.demote("a")
    tier.gate.clear()
    monkeypatch.setattr(tiered_pool, "MAX_WAITING", 4)
    asked = {name: [ask(rig, "a", owner=Owner(name)) for _ in range(4)] for name in ("acme", "umbra")}
    await turns()
    assert [sum(not task.done() for task in tasks) for tasks in asked.values()] == [2, 1]
    tier.gate.set()
    await asyncio.gather(*asked["acme"], *asked["umbra"])
    rig.evict_all()
    tier.gate.clear()
    again = [ask(rig, "a", owner=Owner("acme")) for _ in range(4)]
    await turns()
    assert sum(not task.done() for task in again) == 2, "those that have ended have left their places"
    tier.gate.set()
    await asyncio.gather(*again)
